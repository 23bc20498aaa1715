"""An answer under way, on an event loop."""

import asyncio
from collections.abc import Sequence as Tokens
from types import TracebackType
from typing import TYPE_CHECKING

from engine.async_stream import AsyncOutputStream
from engine.generation import Generation
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM


class AsyncGeneration:
    """Made by ``AsyncLLM.start`` and by ``fork``: a ``Generation`` that is awaited.

    Made with ``stream``, it is iterated over once. Whoever leaves the loop early aborts it, and so
    does the end of an ``async with`` block; who is cancelled while waiting for the ``result`` only
    waits no more.
    """

    def __init__(self, llm: "AsyncLLM", generation: Generation) -> None:
        self._llm = llm
        self._generation = generation

    def __aiter__(self) -> AsyncOutputStream:
        async def requests() -> list[Request]:
            return self._generation._to_read()

        return AsyncOutputStream(self._llm._llm._core, requests)

    async def __aenter__(self) -> "AsyncGeneration":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._llm._llm._core.abort_nowait([self._generation._request])

    @property
    def request_id(self) -> str:
        return self._generation.request_id

    @property
    def is_finished(self) -> bool:
        return self._generation.is_finished

    async def result(self) -> RequestOutput:
        """Wait for the answer. Raises what ended the request if that was an error. Whether a stream
        of it is read makes no difference."""
        self._generation._run_ahead()
        return await asyncio.shield(asyncio.wrap_future(self._generation._request.result))

    async def so_far(self) -> RequestOutput:
        """What there is of the answer now."""
        return await self._llm._in_thread(self._generation.so_far)

    async def abort(self) -> None:
        """End it where it is; its result has ``finish_reason`` "abort"."""
        await self._llm._in_thread(self._generation.abort)

    async def fork(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        append: str | Tokens[int] | None = None,
        index: int = 0,
        request_id: str | None = None,
        stream: bool = False,
    ) -> "AsyncGeneration":
        """As ``Generation.fork``: another answer that goes on from where sample ``index`` is now.
        Cancelled, it is aborted."""
        fork = await self._llm._in_thread(
            lambda: self._generation.fork(
                sampling_params, append=append, index=index, request_id=request_id, stream=stream
            ),
            undo=Generation.abort,
        )
        return AsyncGeneration(self._llm, fork)

    def __repr__(self) -> str:
        return f"Async{self._generation!r}"
