"""What a request has produced and its consumer has not read yet, and how it is read.

The step thread puts what each step adds; one consumer, in a thread or on an event loop, takes all
of it at once. A consumer that does not keep up pauses its request (``Stream.is_full``), so that
nothing grows and nobody else waits; reading resumes it.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from engine.outputs import CompletionOutput, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from engine.scheduling.request import Request


class Stream:
    """Between the step thread and one consumer.

    max_unread_tokens   a request computes ahead of its consumer, those of a step more. Pausing
                        gives its blocks up, which costs the recomputation of a part of a block, so
                        it should be rare; 256 tokens are some seconds of an answer
    wake                called on the step thread when there is something to take; must not wait
    resume              called on the consumer's thread when it has emptied a full stream; likewise
    """

    max_unread_tokens = 256

    def __init__(self, wake: Callable[[], None], resume: Callable[[], None]) -> None:
        self.wake = wake
        self._resume = resume
        self._lock = threading.Lock()
        self._parts: list[CompletionOutput] = []
        self._num_unread = 0
        self._metrics: RequestMetrics | None = None
        self._has_last = False
        self._has_begun = False

    @property
    def is_full(self) -> bool:
        return self._num_unread >= self.max_unread_tokens

    def put(self, part: CompletionOutput, metrics: RequestMetrics, *, is_last: bool) -> None:
        """Add what a sample has got since it was last put. Step thread."""
        with self._lock:
            is_news = not self._parts
            self._parts.append(part)
            self._num_unread += len(part.token_ids)
            self._metrics = metrics
            self._has_last = is_last
        if is_news:  # else the consumer has not yet come for what it was woken for
            self.wake()

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
            self.wake()  # again: what ended the request is raised next time
        if not parts:
            return None
        assert metrics is not None
        is_first, self._has_begun = not self._has_begun, True
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=_merged(parts),
            finished=is_last,
            metrics=metrics,
            prompt_logprobs=request.prompt_logprobs if is_first else None,
        )


class StreamsRequests(Protocol):
    """Of ``EngineCore``, what a stream of outputs needs."""

    def submit(self, request: "Request") -> None: ...
    def abort(self, requests: "Iterable[Request]") -> None: ...
    def abort_nowait(self, requests: "Iterable[Request]") -> None: ...


class OutputStream(Iterator[RequestOutput]):
    """Deltas of requests as they come: iterate, and ``close()`` or leave the ``with`` block early
    to abort what is not finished.

    Each ``RequestOutput`` holds only what its request got since the one before: ``outputs`` has the
    samples that got something, each with its new text, tokens and logprobs. The first delta of a
    request has the prompt's logprobs, where it asked for them; the last one says ``finished``.

    request_ids   in the order of the prompts; whoever makes it submits them, here or elsewhere
    news          set whenever one of their streams has something
    """

    def __init__(
        self, core: StreamsRequests, requests: "Sequence[Request]", news: threading.Event
    ) -> None:
        self.request_ids = [request.request_id for request in requests]
        self._core = core
        self._news = news
        self._open = list(requests)
        self._ready: deque[RequestOutput] = deque()
        for request in requests:
            request.result.add_done_callback(lambda _: news.set())

    def submit(self) -> "OutputStream":
        try:
            for request in self._open:
                self._core.submit(request)
        except BaseException:
            self.close()
            raise
        return self

    def __iter__(self) -> "OutputStream":
        return self

    def __next__(self) -> RequestOutput:
        try:
            while self._open and not self._ready:
                self._news.wait()
                self._news.clear()
                self._collect()
        except BaseException:  # what ended a request, or Ctrl-C
            self.close()
            raise
        if not self._ready:
            raise StopIteration
        return self._ready.popleft()

    def close(self) -> None:
        """Abort what is not finished; the iteration ends. Calling it again does nothing."""
        left, self._open = self._open, []
        self._ready.clear()
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
        left = getattr(self, "_open", [])
        with contextlib.suppress(Exception):
            self._core.abort_nowait(left)

    def _collect(self) -> None:
        for request in list(self._open):
            assert request.stream is not None
            delta = request.stream.take(request)
            if delta is not None:
                self._ready.append(delta)
                if delta.finished:
                    self._open.remove(request)


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
