"""Answers as they come, on an event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from engine.outputs import RequestOutput
from engine.scheduling.request import Request
from engine.stream import ONE_READER, Deltas, StreamsRequests
from kvstore.errors import ConfigError


class AsyncOutputStream(AsyncIterator[RequestOutput]):
    """``engine.stream.Deltas`` as they come: iterate, and ``close()``, ``aclose()`` or leave the
    ``async with`` block early to abort what is not finished, as cancelling the reading task does.

    submit        makes and submits what is to be read: called when it is first read, or opened
    request_ids   in the order of the prompts; empty before
    """

    def __init__(
        self, core: StreamsRequests, submit: Callable[[], Awaitable[Sequence[Request]]]
    ) -> None:
        self.request_ids: list[str] = []
        self._core = core
        self._submit: Callable[[], Awaitable[Sequence[Request]]] | None = submit
        self._news = asyncio.Event()
        self._deltas: Deltas | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_being_read = False

    async def open(self) -> "AsyncOutputStream":
        """Submit now. Raises what is wrong with the requests, and what reading does."""
        with self._reading():
            await self._open()
        return self

    async def _open(self) -> None:
        submit, self._submit = self._submit, None
        if submit is not None:
            requests = await submit()
            wake = partial(_wake, asyncio.get_running_loop(), self._news)
            self.request_ids = [request.request_id for request in requests]
            self._deltas = Deltas(self._core, requests, wake)
            if self._is_closed:  # meanwhile, by another task
                self.close()

    def __aiter__(self) -> "AsyncOutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises ``ConfigError`` where another task is reading, or it was begun on another loop;
        who reads it there goes on."""
        with self._reading():
            await self._open()
            while self._deltas is not None and not self._deltas.is_over:
                delta = self._deltas.take()
                if delta is not None:
                    return delta
                await self._news.wait()
                self._news.clear()
        raise StopAsyncIteration

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise ConfigError("this stream was begun on another event loop: read it there")
        if self._is_being_read:
            raise ConfigError(ONE_READER)
        self._loop, self._is_being_read = loop, True
        try:
            yield
        except BaseException:  # what ended a request, or the reader's cancellation
            self.close()
            raise
        finally:
            self._is_being_read = False

    def close(self) -> None:
        """Abort what is not finished; the iteration ends. Does not wait; calling it again does
        nothing."""
        self._is_closed, self._submit = True, None
        left = [] if self._deltas is None else self._deltas.give_up()
        if left:
            self._core.abort_nowait(left)

    async def aclose(self) -> None:
        """The same, for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> "AsyncOutputStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(news.set)
