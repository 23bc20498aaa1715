"""What clients send: OpenAI's request bodies, with vLLM's extensions.

What the engine does not have is refused, not ignored, unless its value changes nothing.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.sampling.sampling_params import SamplingParams
from engine.server.errors import CLOSING, ApiError

# Parameters of OpenAI that the engine does not have, with the values that change nothing (None: any
# value: it says nothing about the answer). A null never does.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": None,
    "modalities": (["text"],),
    "parallel_tool_calls": None,
    "prompt_cache_key": None,
    "response_format": ({"type": "text"},),
    "safety_identifier": None,
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": None,
}

MAX_BODY_BYTES = 32 << 20
_MAX_N = 128  # as OpenAI has it: each sample takes memory before it runs
_MAX_LOGPROBS = 20  # likewise: all of a vocabulary beside each token would be gigabytes
_COMPLETION_TOKENS = 16  # without max_tokens: OpenAI's default

_SAMPLING = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
    "seed", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens",
    "bad_words", "allowed_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "truncate_prompt_tokens",
)  # fmt: skip


class BodyLimit:
    """ASGI middleware: a body that is longer than any prompt is not read to its end, as it is in
    memory whole, several times over, before anybody looks at its key; nor is one that has not come
    when the server ends, which may never come.

    is_ending   set when the server ends
    """

    def __init__(self, app: ASGIApp, is_ending: asyncio.Event) -> None:
        self._app = app
        self._is_ending = is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes, is_whole = 0, False

        async def receive_some() -> Message:
            nonlocal num_bytes, is_whole
            message = await (receive() if is_whole else self._unless_ending(receive))
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, receive_some, send)

    async def _unless_ending(self, receive: Receive) -> Message:
        receiving = asyncio.ensure_future(receive())
        ending = asyncio.ensure_future(self._is_ending.wait())
        try:
            await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                return receiving.result()
            raise HTTPException(503, CLOSING)
        finally:
            for task in (receiving, ending):
                task.cancel()


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # padding against who counts bytes


class Body(BaseModel):
    """What both kinds of completions take. From ``cache_salt`` on the names are vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields or name not in _NEUTRAL:
                kept[name] = value
                continue
            neutral = _NEUTRAL[name]
            if value is not None and neutral is not None and value not in neutral:
                message = f"{name}: this server does not support it; leave it out"
                raise ApiError(400, message, param=name)
        return kept

    @model_validator(mode="after")
    def _check(self) -> "Body":
        if self.n is not None and self.n > _MAX_N:
            raise ApiError(400, f"n: expected at most {_MAX_N}, got {self.n}", param="n")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream=true", param="stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def limit(self) -> tuple[str, int | None]:
        """The most tokens that the client asked for, and its name for them."""
        return "max_tokens", self.max_tokens

    def _check_logprobs(self, name: str, count: int | None) -> None:
        if count is not None and not 0 <= count <= _MAX_LOGPROBS:
            message = f"{name}: expected from 0 to {_MAX_LOGPROBS}, got {count}"
            raise ApiError(400, message, param=name)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        named = {name: getattr(self, name) for name in _SAMPLING}
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = _by_token_id(self.logit_bias)
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)


class CompletionBody(Body):
    """``/v1/completions``. ``prompt`` is text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionBody":
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo: not together with logprobs", param="echo")
        self._check_logprobs("logprobs", self.logprobs)
        return self

    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    def sampling(self) -> SamplingParams:
        return self._sampling(
            _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, self.logprobs
        )


class ChatBody(Body):
    """``/v1/chat/completions``. Without a limit an answer may fill the context."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def sampling(self) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs")
        self._check_logprobs("top_logprobs", self.top_logprobs)
        return self._sampling(self.limit()[1], (self.top_logprobs or 0) if self.logprobs else None)

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit()
        return "max_completion_tokens", self.max_completion_tokens


def _by_token_id(bias: Mapping[str, float]) -> dict[int, float]:
    """The names of an object are texts in JSON."""
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        message = f"logit_bias: expected token ids as names, got {', '.join(bias)}"
        raise ApiError(400, message, param="logit_bias") from None
