"""A document on an event loop."""

import contextlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from engine.async_stream import AsyncOutputStream
from engine.document import Document
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from kvstore.config import check_seconds
from kvstore.errors import StoreClosedError
from kvstore.lease import Pin

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM


class AsyncPin:
    """A ``Pin`` whose end is awaited: ``release()``, or ``async with``."""

    def __init__(self, llm: "AsyncLLM", pin: Pin) -> None:
        self.num_blocks = pin.num_blocks
        self._llm = llm
        self._pin = pin

    async def release(self) -> None:
        """End the hold; calling it again, or when the engine is closed, does nothing."""
        with contextlib.suppress(StoreClosedError):
            await self._llm._in_thread(self._pin.release)

    async def __aenter__(self) -> "AsyncPin":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    def __repr__(self) -> str:
        return f"Async{self._pin!r}"


class AsyncDocument:
    """Made by ``AsyncLLM.document``: a ``Document`` whose methods are awaited.

    Cancelled, reading and answering are aborted, and a pin that comes too late is released.
    """

    def __init__(self, llm: "AsyncLLM", document: Document) -> None:
        self._llm = llm
        self._document = document

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix that questions share, the template's included."""
        return self._document.num_tokens

    @property
    def pinned(self) -> AsyncPin | None:
        """The pin this object holds."""
        pin = self._document.pinned
        return None if pin is None else AsyncPin(self._llm, pin)

    async def prefill(self) -> None:
        """Read the document now. Returns at once when the device holds it."""
        await self._llm._run(self._document._reading, is_held=True)

    @overload
    def ask(
        self,
        question: str,
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, RequestOutput]: ...

    @overload
    def ask(
        self,
        question: list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, list[RequestOutput]]: ...

    @overload
    def ask(
        self,
        question: str | list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> AsyncOutputStream: ...

    def ask(
        self,
        question: str | list[str],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Coroutine[Any, Any, RequestOutput | list[RequestOutput]] | AsyncOutputStream:
        """As ``Document.ask``, to be awaited; with ``stream`` to be iterated over."""

        def make() -> list[Request]:
            return self._document._asking(question, sampling_params, is_streamed=stream)

        if stream:
            return self._llm._stream(make, is_held=True)
        return self._answer(question, make)

    def prompt_token_ids(self, question: str) -> list[int]:
        """The whole prompt of one question."""
        return self._document.prompt_token_ids(question)

    async def warm(self) -> None:
        """Start bringing what is cached of the document to the device."""
        await self._llm._in_thread(self._document.warm)

    async def pin(self, *, persist: bool = False, ttl: float | None = None) -> AsyncPin:
        """As ``Document.pin``: read the document if need be, and keep it from being evicted."""
        check_seconds("ttl", ttl)
        await self.prefill()
        pin = await self._llm._in_thread(
            lambda: self._document.pin(persist=persist, ttl=ttl), undo=Pin.release
        )
        return AsyncPin(self._llm, pin)

    async def unpin(self) -> bool:
        """Release every pin of this object, and the document's pin on disk, whichever process set
        it; whether there was one."""
        return await self._llm._in_thread(self._document.unpin)

    async def residency(self) -> dict[str, int]:
        """Tokens of the document by the fastest tier that holds them now; the rest is in none."""
        return await self._llm._in_thread(self._document.residency)

    async def evict(self) -> dict[str, int]:
        """As ``Document.evict``: forget it in every tier; tokens freed, by tier."""
        return await self._llm._in_thread(self._document.evict)

    def __repr__(self) -> str:
        return f"Async{self._document!r}"

    async def _answer(
        self, question: str | list[str], make: Callable[[], list[Request]]
    ) -> RequestOutput | list[RequestOutput]:
        outputs = await self._llm._run(make, is_held=True)
        return outputs if isinstance(question, list | tuple) else outputs[0]
