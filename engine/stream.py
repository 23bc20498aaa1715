"""What a request has produced and its consumer has not read yet, and how it is read.

The step thread puts what each step adds; one consumer, in a thread or on an event loop, takes all
of it at once. A consumer that does not keep up pauses its request (``Stream.is_full``), so that
nothing grows and nobody else waits; reading resumes it.
"""

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine.scheduling.request import Request


ONE_READER = "this stream has a reader already: let that one hand on what it reads"


class Listener(Protocol):
    """Told what the reader of a stream reads."""

    def heard(self, delta: RequestOutput) -> None: ...

    def ended(self) -> None:
        """The reader has left early, or an error has ended what it read."""


class Stream:
    """Between the step thread and one consumer, which may come later than what it reads.

    max_unread_tokens   a request computes ahead of its consumer, those of a step more. Pausing
                        gives its blocks up, which costs the recomputation of a part of a block, so
                        it should be rare; 256 tokens are some seconds of an answer
    """

    max_unread_tokens = 256

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._wake: Callable[[], None] = _nobody
        self._resume: Callable[[], None] = _nobody
        self._lock = threading.Lock()
        self._parts: list[CompletionOutput] = []
        self._num_unread = 0
        self._metrics: RequestMetrics | None = None
        self._has_last = False
        self._has_begun = False

    def connect(self, wake: Callable[[], None], resume: Callable[[], None]) -> None:
        """From now on ``wake`` is called, on any thread, when there may be something to take, and
        ``resume`` on the consumer's thread when it has emptied a full stream. Neither may wait."""
        self._wake, self._resume = wake, resume
        wake()  # for what came before

    @property
    def is_full(self) -> bool:
        return self._num_unread >= self.max_unread_tokens

    def run_ahead(self, resume: Callable[[], None]) -> None:
        """Never pause again, however much is unread: somebody waits for the whole answer, and may
        be who would have to read. ``resume`` is called where it may be paused now."""
        with self._lock:
            was_full, self.max_unread_tokens = self.is_full, sys.maxsize
        if was_full:
            resume()

    def put(self, part: CompletionOutput, metrics: RequestMetrics, *, is_last: bool) -> None:
        """Add what a sample has got since it was last put. Step thread."""
        with self._lock:
            is_news = not self._parts
            self._parts.append(part)
            self._num_unread += len(part.token_ids)
            self._metrics = metrics
            self._has_last = is_last
        if is_news:  # else the consumer has not yet come for what it was woken for
            self._wake()

    def take(self, request: "Request") -> RequestOutput | None:
        """Everything unread as one delta, or None. Raises what ended the request."""
        with self._lock:
            parts, self._parts = self._parts, []
            was_full, self._num_unread = self.is_full, 0
            metrics, is_last = self._metrics, self._has_last
        if was_full:
            self._resume()
        if not is_last and request.result.done():
            if not parts:
                request.result.result()
            self._wake()  # again: what ended the request is raised next time
        if not parts:
            return None
        assert metrics is not None
        is_first, self._has_begun = not self._has_begun, True
        delta = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=_merged(parts),
            finished=is_last,
            metrics=metrics,
            prompt_logprobs=request.prompt_logprobs if is_first else None,
        )
        if self._listener is not None:
            self._listener.heard(delta)
        return delta

    def end(self) -> None:
        """The consumer takes nothing more."""
        if self._listener is not None:
            self._listener.ended()


class StreamsRequests(Protocol):
    """Of ``EngineCore``, what a stream of outputs needs."""

    def submit(self, request: "Request") -> None: ...
    def abort(self, requests: "Iterable[Request]") -> None: ...
    def abort_nowait(self, requests: "Iterable[Request]") -> None: ...
    def look_again(self) -> None: ...


class Deltas:
    """What is new of requests that have streams, without waiting for it.

    Each ``RequestOutput`` holds only what its request got since the one before: ``outputs`` has the
    samples that got something, each with its new text, tokens and logprobs. The first delta of a
    request has the prompt's logprobs, where it asked for them; the last one says ``finished``.

    wake   called on any thread when there may be something to take; must not wait
    """

    def __init__(
        self, core: StreamsRequests, requests: "Sequence[Request]", wake: Callable[[], None]
    ) -> None:
        self.unfinished = list(requests)
        self._ready: deque[RequestOutput] = deque()
        for request in requests:
            assert request.stream is not None
            request.stream.connect(wake, core.look_again)
            request.result.add_done_callback(lambda _: wake())

    @property
    def is_over(self) -> bool:
        return not self.unfinished and not self._ready

    def take(self) -> RequestOutput | None:
        """The next one, None where there is none yet. Raises what ended a request."""
        if not self._ready:
            self._collect()
        return self._ready.popleft() if self._ready else None

    def give_up(self) -> "list[Request]":
        """Take nothing more; what is to be aborted."""
        left, self.unfinished = self.unfinished, []
        self._ready.clear()
        for request in left:
            assert request.stream is not None
            request.stream.end()
        return left

    def _collect(self) -> None:
        for request in list(self.unfinished):
            assert request.stream is not None
            delta = request.stream.take(request)
            if delta is not None:
                self._ready.append(delta)
                if delta.finished:
                    self.unfinished.remove(request)


class OutputStream(Iterator[RequestOutput]):
    """``Deltas`` as they come: iterate, and ``close()`` or leave the ``with`` block early to abort
    what is not finished.

    request_ids   in the order of the prompts; whoever makes it submits them, here or elsewhere
    """

    def __init__(self, core: StreamsRequests, requests: "Sequence[Request]") -> None:
        self.request_ids = [request.request_id for request in requests]
        self._core = core
        self._news = threading.Event()
        self._reading = threading.Lock()
        self._deltas = Deltas(core, requests, self._news.set)

    def submit(self) -> "OutputStream":
        try:
            for request in self._deltas.unfinished:
                self._core.submit(request)
        except BaseException:
            self.close()
            raise
        return self

    def __iter__(self) -> "OutputStream":
        return self

    def __next__(self) -> RequestOutput:
        """Raises ``ConfigError`` where another thread is reading, which goes on."""
        if not self._reading.acquire(blocking=False):
            raise ConfigError(ONE_READER)
        try:
            while not self._deltas.is_over:
                delta = self._deltas.take()
                if delta is not None:
                    return delta
                self._news.wait()
                self._news.clear()
        except BaseException:  # what ended a request, or Ctrl-C
            self.close()
            raise
        finally:
            self._reading.release()
        raise StopIteration

    def close(self) -> None:
        """Abort what is not finished; the iteration ends. Calling it again does nothing."""
        left = self._deltas.give_up()
        if left:
            self._core.abort(left)

    def __enter__(self) -> "OutputStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Any thread may collect garbage, the step thread too: it must not wait for itself.
        with contextlib.suppress(Exception):
            self._core.abort_nowait(self._deltas.give_up())


def _nobody() -> None:
    """Where no consumer has come yet."""


def _merged(parts: Sequence[CompletionOutput]) -> list[CompletionOutput]:
    """One part a sample, in the order of samples."""
    by_sample: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        by_sample.setdefault(part.index, []).append(part)
    return [_joined(by_sample[index]) for index in sorted(by_sample)]


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    if len(parts) == 1:
        return last
    return CompletionOutput(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=None
        if last.logprobs is None
        else [entry for part in parts for entry in part.logprobs or ()],
    )
