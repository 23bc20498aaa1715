"""What the server answers: OpenAI's objects, whole or in chunks, made of the engine's outputs.

Choices are numbered through: sample ``i`` of prompt ``p`` is choice ``p * n + i``.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar

from engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from engine.text.token_utf8 import token_utf8


class Usage:
    """Tokens of one response, and the tiers that cached ones were found in."""

    def __init__(self) -> None:
        self._num_prompt = self._num_completion = 0
        self._cached: Counter[str] = Counter()

    def add_prompt(self, token_ids: Sequence[int], metrics: RequestMetrics) -> None:
        self._num_prompt += len(token_ids)
        self._cached.update(metrics.cached_tokens)

    def add_completion(self, parts: Iterable[CompletionOutput]) -> None:
        self._num_completion += sum(len(part.token_ids) for part in parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self._num_prompt + self._num_completion,
            "prompt_tokens_details": {
                "cached_tokens": self._cached.total(),
                "cached_tokens_by_tier": dict(self._cached),
            },
        }


class Reply(ABC):
    """One response. The engine's requests for it have ids that begin with its own."""

    _prefix: ClassVar[str]
    _whole_object: ClassVar[str]
    _chunk_object: ClassVar[str]

    def __init__(self, model: str, num_samples: int, *, wants_usage: bool = False) -> None:
        self.id = f"{self._prefix}-{uuid.uuid4().hex}"
        self.usage = Usage()
        self._model = model
        self._num_samples = num_samples
        self._wants_usage = wants_usage
        self._created = int(time.time())

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for number, output in enumerate(outputs):
            self.usage.add_prompt(output.prompt_token_ids, output.metrics)
            self.usage.add_completion(output.outputs)
            choices += [
                self._choice(number * self._num_samples + sample.index, sample)
                for sample in output.outputs
            ]
        head = self._head(self._whole_object, choices)
        return head | {"usage": self.usage.as_json()}

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        """Chunks that come before anything is computed."""
        return []

    def chunks(self, number: int, delta: RequestOutput) -> list[dict[str, Any]]:
        """Chunks for what prompt ``number`` has got; a part without text says nothing yet."""
        self.usage.add_completion(delta.outputs)
        if delta.finished:
            self.usage.add_prompt(delta.prompt_token_ids, delta.metrics)
        first = number * self._num_samples
        return [
            self._chunk([self._chunk_choice(first + part.index, part)])
            for part in delta.outputs
            if part.text or part.finish_reason or part.logprobs
        ]

    def closing(self) -> list[dict[str, Any]]:
        """Chunks that come at the end."""
        if not self._wants_usage:
            return []
        return [self._head(self._chunk_object, []) | {"usage": self.usage.as_json()}]

    @abstractmethod
    def _choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, index: int, part: CompletionOutput) -> dict[str, Any]: ...

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": None} if self._wants_usage else {}
        return self._head(self._chunk_object, choices) | usage

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


class TextReply(Reply):
    """Of ``/v1/completions``. ``echoes`` are texts to begin the choices of each prompt with."""

    _prefix = "cmpl"
    _whole_object = _chunk_object = "text_completion"

    def __init__(
        self,
        model: str,
        num_samples: int,
        *,
        wants_usage: bool = False,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(model, num_samples, wants_usage=wants_usage)
        self._echoes = echoes
        self._offsets: Counter[int] = Counter()  # by choice, where its next token's text begins

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        return [
            self._chunk([_text_choice(number * self._num_samples + i, text, None, None)])
            for number, text in enumerate(self._echoes)
            for i in range(self._num_samples)
        ]

    def _choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]:
        echo = self._echoes[index // self._num_samples] if self._echoes else ""
        logprobs = self._logprobs(index, sample)
        return _text_choice(index, echo + sample.text, logprobs, sample.finish_reason)

    def _chunk_choice(self, index: int, part: CompletionOutput) -> dict[str, Any]:
        return _text_choice(index, part.text, self._logprobs(index, part), part.finish_reason)

    def _logprobs(self, index: int, part: CompletionOutput) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        sampled = [
            named[token_id] for token_id, named in zip(part.token_ids, part.logprobs, strict=True)
        ]
        offsets = []
        for each in sampled:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(each.decoded_token)
        return {
            "tokens": [each.decoded_token for each in sampled],
            "token_logprobs": [each.logprob for each in sampled],
            "top_logprobs": [
                {each.decoded_token: each.logprob for each in named.values()}
                for named in part.logprobs
            ],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """Of ``/v1/chat/completions``.

    num_top    most likely tokens to name beside each sampled one
    tokenizer  transformers', which knows the bytes of a part of a character
    """

    _prefix = "chatcmpl"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        num_samples: int,
        *,
        tokenizer: Any,
        wants_usage: bool = False,
        num_top: int = 0,
    ) -> None:
        super().__init__(model, num_samples, wants_usage=wants_usage)
        self._tokenizer = tokenizer
        self._num_top = num_top

    def opening(self, num_prompts: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._num_samples)
        ]

    def _choice(self, index: int, sample: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text},
            "logprobs": self._logprobs(sample),
            "finish_reason": sample.finish_reason,
        }

    def _chunk_choice(self, index: int, part: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": part.text} if part.text else {},
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
        }

    def _logprobs(self, part: CompletionOutput) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        content = []
        for token_id, named in zip(part.token_ids, part.logprobs, strict=True):
            top = [self._token(*each) for each in islice(named.items(), self._num_top)]
            content.append(self._token(token_id, named[token_id]) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, named: Logprob) -> dict[str, Any]:
        text = named.decoded_token
        utf8 = token_utf8(self._tokenizer, token_id, text)
        return {"token": text, "logprob": named.logprob, "bytes": list(utf8)}


def _text_choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
