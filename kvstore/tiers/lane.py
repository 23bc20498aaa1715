"""The two directions of copying on CUDA: each a stream, a thread that feeds it, and its events."""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from kvstore.tiers.cuda_runtime import CudaRuntime, Event, Stream
from kvstore.tiers.ring import Ring, Slot
from kvstore.tiers.runs import Ids

_MAX_AHEAD = 4  # batches of one copy submitted at once: 2 ms of work, more than a poll takes
_NUM_YIELDS = 8  # times that a wait only lets other jobs run before it sleeps
_PAUSE_S = 0.001  # the least that an asyncio loop sleeps


@dataclass(frozen=True, slots=True)
class Fence:
    """All work that the owner had submitted to its ``stream`` when ``event`` was recorded."""

    stream: Stream
    event: Event


class Lane:
    """Copies in one direction, in the order in which their batches are submitted.

    ring  for small blocks, None where blocks are large
    """

    def __init__(
        self, runtime: CudaRuntime, ring: Ring | None, *, name: str, is_urgent: bool
    ) -> None:
        self._runtime = runtime
        self._thread = ThreadPoolExecutor(1, name)
        self.stream = runtime.create_stream(is_urgent=is_urgent)
        self.ring = ring

    async def submit(self, send: Callable[[], None], fence: Fence) -> Event:
        """Have ``send`` submit a batch to the stream; returns the event after it.

        ``send`` runs on the lane's thread, for the driver makes its caller wait when a queue is
        full or memory is not page-locked.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._submit, send, fence)

    async def passed(self, event: Event) -> None:
        """Wait for ``event``. Raises RuntimeError when the work before it failed."""
        for num_queries in itertools.count(1):
            if self._runtime.query(event):
                return
            await asyncio.sleep(0 if num_queries <= _NUM_YIELDS else _PAUSE_S)

    def send(self, on_device: Sequence[Tensor], on_host: Sequence[Tensor], fence: Fence) -> None:
        """Lane's thread: submit copies between blocks of the pool and rows."""
        raise NotImplementedError

    def send_small(
        self,
        slot: Slot,
        in_slot: Sequence[Tensor],
        on_host: Sequence[Tensor],
        blocks: Ids,
        fence: Fence,
    ) -> None:
        """Lane's thread: the same for scattered ``blocks``, through parts of a slot of the ring."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits for what has been submitted."""
        self._thread.shutdown(wait=True)
        with contextlib.suppress(RuntimeError):  # a broken device copies no more
            self._runtime.synchronize(self.stream)

    def _submit(self, send: Callable[[], None], fence: Fence) -> Event:
        try:
            send()
            return self._runtime.record(self.stream)
        except BaseException:
            # Part of the batch may be under way, and the caller will believe that nothing is.
            with contextlib.suppress(RuntimeError):
                self._runtime.synchronize(fence.stream)
                self._runtime.synchronize(self.stream)
            raise


class OutLane(Lane):
    """Device to host. Not urgent: the model's own work goes first."""

    def __init__(self, runtime: CudaRuntime, ring: Ring | None) -> None:
        super().__init__(runtime, ring, name="kv-copy-out", is_urgent=False)

    def send(self, on_device: Sequence[Tensor], on_host: Sequence[Tensor], fence: Fence) -> None:
        self._runtime.wait_event(self.stream, fence.event)  # the step that wrote the blocks
        self._runtime.copy(self.stream, on_host, on_device)

    def send_small(
        self,
        slot: Slot,
        in_slot: Sequence[Tensor],
        on_host: Sequence[Tensor],
        blocks: Ids,
        fence: Fence,
    ) -> None:
        assert self.ring is not None
        # On the owner's stream, so after that step; it takes the device some microseconds.
        self.ring.collect(slot, blocks, fence.stream)
        self._runtime.wait_event(self.stream, self._runtime.record(fence.stream))
        self._runtime.copy(self.stream, on_host, in_slot)


class InLane(Lane):
    """Host to device. Urgent: a request waits for it."""

    def __init__(self, runtime: CudaRuntime, ring: Ring | None) -> None:
        super().__init__(runtime, ring, name="kv-copy-in", is_urgent=True)

    def send(self, on_device: Sequence[Tensor], on_host: Sequence[Tensor], fence: Fence) -> None:
        self._runtime.wait_event(self.stream, fence.event)  # the last reader of the blocks
        self._runtime.copy(self.stream, on_device, on_host)

    def send_small(
        self,
        slot: Slot,
        in_slot: Sequence[Tensor],
        on_host: Sequence[Tensor],
        blocks: Ids,
        fence: Fence,
    ) -> None:
        assert self.ring is not None
        self._runtime.copy(self.stream, in_slot, on_host)  # while that reader may still run
        self._runtime.wait_event(self.stream, fence.event)
        self.ring.spread(slot, blocks, self.stream)


class Flight:
    """The batches of one copy. ``async with`` is left, also by an error, when none is under way."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._events: deque[Event] = deque()

    async def add(self, event: Event) -> None:
        """One more batch is under way; returns when the next one may be submitted.

        Bounded, so that a copy which starts later takes turns with this one.
        """
        self._events.append(event)
        if len(self._events) == _MAX_AHEAD:
            await self._lane.passed(self._events.popleft())

    async def __aenter__(self) -> "Flight":
        return self

    async def __aexit__(self, *error: object) -> None:
        for event in self._events:
            await self._lane.passed(event)
