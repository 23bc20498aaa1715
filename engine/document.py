"""A document that is read once and asked many questions."""

import contextlib
import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from kvstore.block import TierName
from kvstore.errors import ConfigError, StoreClosedError
from kvstore.hashing import encode_tokens
from kvstore.lease import Lookup, Pin

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.sequence import CacheOptions

# What a chat template that prints the day prints: with the real one, a document would be read anew
# every day.
_DATE = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)

_DOCUMENT, _QUESTION = "\ue000document\ue000", "\ue000question\ue000"  # private-use: in no text

_DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=128)


class Document:
    """Made by ``LLM.document``. Questions share the blocks of the text and of all before it.

    The parts of a prompt, template, document and question, are tokenised apart and joined, so that
    no token spans a border and the document's tokens do not depend on the question. Text that looks
    like a special token is not read as one.
    """

    def __init__(self, llm: "LLM", text: str, cache: "CacheOptions") -> None:
        if not text.strip():
            raise ConfigError("the document is empty")
        self.pinned: Pin | None = None  # what ``LLM.document(pin=True)`` holds
        self._llm = llm
        self._cache = cache
        tokenizer = llm._reader.need_tokenizer("a document")
        before, between, after = template_parts(tokenizer)
        encode = llm._reader.encode
        self._prefix = encode(before, is_template=True) + encode(text)
        self._between = encode(between, is_template=True)
        self._after = encode(after, is_template=True)
        least = len(self._prefix) + len(self._between) + len(self._after) + 2
        if least > llm.max_model_len:
            raise ConfigError(
                f"the document has {len(self._prefix)} tokens and the model's context is "
                f"{llm.max_model_len}: cut at least {least - llm.max_model_len} tokens, or use a "
                "model with a longer context"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that questions share, the template's included."""
        return len(self._prefix)

    def prefill(self) -> None:
        """Read the document now. Returns at once when the device holds it."""
        whole = self._reusable
        if whole and self._llm.config.enable_prefix_caching:
            request = self._llm._requests.make(
                None, whole, _DEFAULT_PARAMS, self._cache, prefill_only=True
            )
            self._llm._run([request], show_progress=False)

    def warm(self) -> None:
        """Start bringing what is cached of the document to the device, and return at once."""
        store = self._llm._core.store
        tokens = encode_tokens(self._prefix)
        self._llm._core.call(lambda: store.prefetch_tokens(tokens, self._cache.salt))

    def pin(self, *, persist: bool = False, ttl: float | None = None) -> Pin:
        """Read the document if need be, and keep it from being evicted until the pin is released.

        In this process's memory; with ``persist``, or ``ttl``, the seconds after which it ends, on
        disk, for every process and over restarts: returns when disk has it. The pin is a context
        manager. Raises ``CapacityError`` when pins would take more than half of the slowest memory
        tier, or of the disk, ``ConfigError`` when nothing persists because there is no disk tier.
        """
        self.prefill()
        core, lookup = self._llm._core, self._lookup()
        pin = core.call(lambda: core.store.pin(lookup, persist=persist, ttl_s=ttl))
        core.wait_for(lambda: pin.is_settled)
        if pin.error is not None:
            raise pin.error

        def let_go() -> None:
            with contextlib.suppress(StoreClosedError):
                if persist or ttl is not None:
                    self.unpin()
                else:
                    core.call(pin.release)

        return Pin(pin.num_blocks, let_go)

    def unpin(self) -> bool:
        """Release the document's pin on disk, whichever process set it; whether there was one."""
        core, lookup = self._llm._core, self._lookup()
        answers: list[bool] = []
        core.call(lambda: core.store.unpin(lookup, answers.append))
        core.wait_for(lambda: bool(answers))
        return answers[0]

    @overload
    def ask(
        self, question: str, sampling_params: SamplingParams | None = None
    ) -> RequestOutput: ...

    @overload
    def ask(
        self, question: list[str], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]: ...

    def ask(
        self, question: str | list[str], sampling_params: SamplingParams | None = None
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one question, or several as one batch. Default: greedy, at most 128 tokens."""
        questions = [question] if isinstance(question, str) else list(question)
        requests = [
            self._llm._requests.make(
                each, self.prompt_token_ids(each), sampling_params or _DEFAULT_PARAMS, self._cache
            )
            for each in questions
        ]
        outputs = self._llm._run(requests, show_progress=False)
        return outputs[0] if isinstance(question, str) else outputs

    def prompt_token_ids(self, question: str) -> list[int]:
        """The whole prompt of one question."""
        if not question.strip():
            raise ConfigError("the question is empty")
        return self._prefix + self._between + self._llm._reader.encode(question) + self._after

    def residency(self) -> dict[str, int]:
        """Tokens of the document by the fastest tier that holds them now; the rest is in none."""
        size, lookup = self._llm.config.block_size, self._lookup()
        return {tier.value: size * lookup.sources.count(tier) for tier in TierName}

    def _lookup(self) -> Lookup:
        """Where its reusable blocks are now, disk included; counts no hits."""
        core, tokens = self._llm._core, encode_tokens(self._reusable)
        lookup = core.call(
            lambda: core.store.lookup(
                tokens, self._cache.salt, num_reusable=len(self._reusable), peek=True
            )
        )
        core.wait_for(lambda: lookup.is_ready)
        return lookup

    @property
    def _reusable(self) -> list[int]:
        """The tokens that whole blocks hold, as many as are reused together."""
        unit = self._llm._loaded.reuse_tokens
        return self._prefix[: len(self._prefix) // unit * unit]


def read_document(path: os.PathLike[str]) -> str:
    """A text file's content. Raises ``ConfigError`` in one line for what cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"document {path}: {error.strerror or error}; name a text file that can be read"
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"document {path}: not UTF-8 text; convert it to plain text") from None


def template_parts(tokenizer: Any) -> tuple[str, str, str]:
    """Text before the document, between document and question, and after the question."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "\n\nQuestion: ", "\nAnswer:"
    rendered: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{_DOCUMENT}\n\n{_QUESTION}"}],
        add_generation_prompt=True,
        tokenize=False,
        date_string=_DATE.strftime("%d %b %Y"),
        strftime_now=_DATE.strftime,
    )
    before, _, rest = rendered.partition(_DOCUMENT)
    between, _, after = rest.partition(_QUESTION)
    if not (before or between) or rendered.count(_DOCUMENT) != 1:
        raise ConfigError("the model's chat template does not print the user's message once")
    return before, between, after
