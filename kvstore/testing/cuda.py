"""A CUDA runtime on a CPU that plays any order of events which streams allow.

Work is queued, and done when the test, or the copier's own polling, lets the device run. Memory
changes only then, so a buffer that is reused too early shows as wrong bytes, as on a device.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class FakeEvent:
    """Comes to pass when the stream that recorded it gets there."""

    def __init__(self) -> None:
        self.is_done = False


class FakeStream:
    """A queue of work. ``is_held``: the device does not get to it, until the test releases it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_held = False
        self.work: deque[FakeEvent | Callable[[], object]] = deque()  # an event here is waited for


class FakeCudaRuntime:
    """``CudaRuntime`` on CPU tensors.

    seed                of the order in which streams get to run
    max_locked_bytes    registrations beyond it fail, as with a limit on locked memory
    runs_when_queried   each query lets one piece of work run; else only ``run`` does
    failures            what submitted work has raised: whichever thread let it run is not to blame
    """

    def __init__(
        self, seed: int = 0, *, max_locked_bytes: int = 1 << 62, runs_when_queried: bool = True
    ) -> None:
        self.compute = FakeStream("compute")
        self.streams = [self.compute]
        self.locked: dict[int, int] = {}  # address → bytes
        self.max_locked_bytes = max_locked_bytes
        self.runs_when_queried = runs_when_queried
        self.failures: list[AssertionError] = []
        self.error: RuntimeError | None = None  # raised by every query: the device broke
        self.num_copies = 0  # pieces submitted
        self.num_events = 0  # recorded
        self._random = random.Random(seed)
        self._lock = threading.RLock()

    # ---- what the test does --------------------------------------------------------------------

    def run(self) -> None:
        """Let the device work, on all streams that are not held, until nothing can go on."""
        with self._lock:
            while self._step(self._free_streams()):
                pass

    @property
    def is_stuck(self) -> bool:
        """Whether work waits for a stream that is held, and nothing else is left to do."""
        with self._lock:
            return any(s.work for s in self.streams) and not self._ready(self._free_streams())

    def run_one(self, stream: FakeStream) -> None:
        """The next piece of work of one stream, held or not. It must not have to wait."""
        with self._lock:
            assert self._step([stream]), "the stream is empty, or waits for another"

    def submit(self, work: Callable[[], object]) -> None:
        """Work of the owner: a kernel on its stream."""

        def run() -> None:
            try:
                work()
            except AssertionError as error:
                self.failures.append(error)

        with self._lock:
            self.compute.work.append(run)

    # ---- CudaRuntime ---------------------------------------------------------------------------

    def current_stream(self) -> FakeStream:
        return self.compute

    def create_stream(self, *, is_urgent: bool) -> FakeStream:
        self.streams.append(FakeStream("urgent" if is_urgent else "patient"))
        return self.streams[-1]

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        with self._lock:
            self.num_events += 1
            stream.work.append(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            stream.work.append(event)

    def query(self, event: FakeEvent) -> bool:
        with self._lock:
            if self.error is not None:
                raise self.error
            if self.runs_when_queried:
                self._step(self._free_streams())
            return event.is_done

    def synchronize(self, stream: FakeStream) -> None:
        """Waits, without holds: as if the device got there at last."""
        with self._lock:
            if self.error is not None:
                raise self.error
            while stream.work:
                assert self._step(self.streams), "the streams wait for each other"

    def copy(self, stream: FakeStream, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        with self._lock:
            for target, source in zip(targets, sources, strict=True):
                for side in (target, source):
                    assert side.is_contiguous(), "a copy of several pieces"
                    assert side.nbytes == target.nbytes, "sides of different sizes"
                    self._check_within_piece(side)
                self.num_copies += 1
                stream.work.append(partial(target.copy_, source))

    def launch(
        self, stream: FakeStream, function: Callable[..., object], *arguments: object
    ) -> None:
        with self._lock:
            stream.work.append(partial(function, *arguments))

    def host_register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            if sum(self.locked.values()) + num_bytes > self.max_locked_bytes:
                raise RuntimeError("out of memory (2)")
            self.locked[address] = num_bytes

    def host_unregister(self, address: int) -> None:
        with self._lock:
            assert not any(stream.work for stream in self.streams[1:]), "copies are under way"
            del self.locked[address]

    # ---- the device ----------------------------------------------------------------------------

    def _free_streams(self) -> list[FakeStream]:
        return [stream for stream in self.streams if not stream.is_held]

    def _step(self, streams: Sequence[FakeStream]) -> bool:
        """Does one piece of work of a stream that has some; False when none can go on."""
        ready = self._ready(streams)
        if not ready:
            return False
        work = self._random.choice(ready).work.popleft()
        if not isinstance(work, FakeEvent):
            work()
        return True

    @staticmethod
    def _ready(streams: Sequence[FakeStream]) -> list[FakeStream]:
        """Those whose next piece of work need not wait."""
        return [
            stream
            for stream in streams
            if stream.work and (not isinstance(stream.work[0], FakeEvent) or stream.work[0].is_done)
        ]

    def _check_within_piece(self, tensor: Any) -> None:
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        for address, num_bytes in self.locked.items():
            if start < address + num_bytes and address < end:
                assert address <= start < end <= address + num_bytes, "a copy spans two pieces"
