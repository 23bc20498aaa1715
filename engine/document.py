"""A document that is read once and asked many questions."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

from engine.outputs import RequestOutput
from engine.progress import reading_bar
from engine.resetting import call_when_quiet
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.stream import OutputStream, Stream
from engine.text.document_prompt import DocumentPrompt
from kvstore.block import TierName
from kvstore.config import check_seconds
from kvstore.errors import BlockMissingError, KVStoreError, StoreClosedError
from kvstore.hashing import encode_tokens
from kvstore.lease import Lookup, Pin

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.scheduling.sequence import CacheOptions

_MOST_READINGS = 5  # of a document that others evict before it is pinned

_DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=128)


class Document:
    """Made by ``LLM.document``. Questions share the blocks of the document and of all before it."""

    def __init__(self, llm: "LLM", prompt: DocumentPrompt, cache: "CacheOptions") -> None:
        """Raises ``ConfigError`` for a document that is too long, with the tokens to cut."""
        prompt.check_fits(llm.max_model_len)
        self._pinned: Pin | None = None
        self._held: list[Pin] = []  # of this process's memory
        self._llm = llm
        self._prompt = prompt
        self._cache = cache

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that questions share, the template's included."""
        return len(self._prompt.prefix)

    @property
    def pinned(self) -> Pin | None:
        """What ``pin`` returned last, until it is released or its time is over."""
        if self._pinned is not None and self._pinned.has_ended:
            self._pinned = None
        return self._pinned

    def prefill(self) -> None:
        """Read the document now. Returns at once when the device holds it."""
        self._run(self._reading())

    def warm(self) -> None:
        """Start bringing what is cached of the document to the device, and return at once."""
        store = self._llm._core.store
        tokens = encode_tokens(self._prompt.prefix)
        self._llm._core.call(lambda: store.prefetch_tokens(tokens, self._cache.salt))

    def pin(self, *, persist: bool = False, ttl: float | None = None) -> Pin:
        """Read the document if need be, and keep it from being evicted until the pin is released.

        In this process's memory; with ``persist``, or ``ttl``, the seconds after which it ends, on
        disk, for every process and over restarts: returns when disk has it. The pin is a context
        manager. Raises ``CapacityError`` when pins would take more than half of the slowest memory
        tier, or of the disk, ``ConfigError`` when nothing persists because there is no disk tier.
        """
        check_seconds("ttl", ttl)
        core = self._llm._core
        pin = self._hold(persist=persist, ttl=ttl)
        core.wait_for(lambda: pin.is_settled)
        if pin.error is not None:
            raise pin.error

        def let_go() -> None:
            if self._pinned is held:
                self._pinned = None
            with contextlib.suppress(StoreClosedError):
                if held in self._held:
                    self._held.remove(held)
                core.call(pin.release)
                core.wait_for(lambda: pin.is_settled)

        self._pinned = held = Pin(pin.num_blocks, let_go, has_ended=lambda: pin.has_ended)
        if not persist and ttl is None:
            self._held.append(held)
        return held

    def _hold(self, *, persist: bool, ttl: float | None) -> Pin:
        """Others may evict what has been read before it is pinned: then it is read again."""
        core = self._llm._core
        for tries_left in reversed(range(_MOST_READINGS)):
            self.prefill()
            lookup = self._lookup()
            try:
                return core.call(partial(core.store.pin, lookup, persist=persist, ttl_s=ttl))
            except BlockMissingError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def unpin(self) -> bool:
        """Release every pin of this object, and the document's pin on disk, whichever process set
        it; whether there was one."""
        was_held = bool(self._held)
        for pin in self._held.copy():
            pin.release()
        self._pinned = None
        return self._unpin_on_disk() or was_held

    def _unpin_on_disk(self) -> bool:
        core, lookup = self._llm._core, self._lookup()
        answers: list[bool] = []
        core.call(lambda: core.store.unpin(lookup, answers.append))
        core.wait_for(lambda: bool(answers))
        return answers[0]

    @overload
    def ask(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> RequestOutput: ...

    @overload
    def ask(
        self,
        question: list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def ask(
        self,
        question: str | list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> OutputStream: ...

    def ask(
        self,
        question: str | list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> RequestOutput | list[RequestOutput] | OutputStream:
        """Answer one question, or several as one batch. Default: greedy, at most 128 tokens.

        With ``stream`` the answers come as an iterator of what is new, as those of
        ``LLM.generate``.
        """
        requests = self._asking(question, sampling_params, is_streamed=stream)
        if stream:
            return self._llm._stream(requests)
        outputs = self._run(requests)
        return outputs if isinstance(question, list | tuple) else outputs[0]

    def prompt_token_ids(self, question: str) -> list[int]:
        """The whole prompt of one question."""
        return self._prompt.ask(self._llm._reader, question)

    def residency(self) -> dict[str, int]:
        """Tokens of the document by the fastest tier that holds them now; the rest is in none."""
        size, lookup = self._llm.config.block_size, self._lookup()
        return {tier.value: size * lookup.sources.count(tier) for tier in TierName}

    def evict(self) -> dict[str, int]:
        """Forget the document, and what was said about it, in every tier: tokens freed, by tier.

        What is in use or pinned stays, and so does what other documents share with it.
        """
        core, lookup = self._llm._core, self._lookup()
        size = self._llm.config.block_size
        rest = self._prompt.prefix[len(self._reusable) :] + self._prompt.between
        beginning = encode_tokens(rest[:size])
        outcomes: list[Mapping[TierName, int] | KVStoreError] = []
        call_when_quiet(core, lambda: core.store.forget(lookup, beginning, outcomes.append))
        core.wait_for(lambda: bool(outcomes))
        if isinstance(outcomes[0], KVStoreError):
            raise outcomes[0]
        return {tier.value: size * outcomes[0].get(tier, 0) for tier in TierName}

    def __repr__(self) -> str:
        state = "pinned" if self.pinned is not None else "not pinned"
        return f"Document(model={self._llm.config.model!r}, num_tokens={self.num_tokens}, {state})"

    def _asking(
        self, question: str | list[str], params: SamplingParams | None, *, is_streamed: bool
    ) -> list[Request]:
        """A request for each question."""
        questions = list(question) if isinstance(question, list | tuple) else [question]
        return [
            self._llm._requests.make(
                each,
                self.prompt_token_ids(each),
                params or _DEFAULT_PARAMS,
                self._cache,
                stream=Stream() if is_streamed else None,
            )
            for each in questions
        ]

    def _reading(self) -> list[Request]:
        """The request that reads it, or none where nothing of it would be kept."""
        whole = self._reusable
        if not whole or not self._llm.config.enable_prefix_caching:
            return []
        return [
            self._llm._requests.make(None, whole, _DEFAULT_PARAMS, self._cache, prefill_only=True)
        ]

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        """With a bar on a terminal while the first prompt is read, if that takes several steps."""
        first = requests[0].sequences[0] if requests else None
        is_long = self.num_tokens > self._llm.config.max_num_batched_tokens
        if first is None or not is_long:
            return self._llm._run(requests, show_progress=False)
        with reading_bar(first.num_prompt) as show:
            return self._llm._run(
                requests, show_progress=False, meanwhile=lambda: show(first.num_computed)
            )

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
        return self._prompt.prefix[: self.num_tokens // unit * unit]
