"""Small blocks through a buffer on the device: collected there, they cross the bus as one piece."""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.tiers.cuda_runtime import CudaRuntime, Event, Stream
from kvstore.tiers.host import HostPool
from kvstore.tiers.page_lock import PageLock
from kvstore.tiers.runs import BATCH_BYTES, Ids

Gather = Callable[[Tensor, Tensor, Tensor], object]  # (pool, block_ids int32, out)
Scatter = Callable[[Tensor, Tensor, Tensor], object]  # (src, pool, block_ids int32)

_NUM_SLOTS = 2  # one is filled while the other is emptied


@dataclass(slots=True)
class Slot:
    """Room for one batch.

    buffer    [num_blocks, *layout.shape] on the device
    rows      the same memory as bytes, [num_blocks, block_bytes]
    ids       [num_blocks] int32 on the device, copied from the page-locked ``host_ids``
    last      the event after the slot's last use, None before the first
    """

    buffer: Tensor
    rows: Tensor
    ids: Tensor
    host_ids: Tensor
    last: Event | None = None


class Ring:
    """Two slots of ``BATCH_BYTES`` beside the pool, for one direction.

    pool             [num_blocks, *layout.shape] on the device
    gather, scatter  enqueue on the current stream; torch's own when None
    """

    def __init__(
        self,
        pool: Tensor,
        runtime: CudaRuntime,
        *,
        gather: Gather | None,
        scatter: Scatter | None,
    ) -> None:
        self._pool = pool
        self._runtime = runtime
        self._gather, self._scatter = gather or _gather, scatter or _scatter
        self._slots: asyncio.Queue[Slot] = asyncio.Queue()
        num_blocks = BATCH_BYTES // pool[0].nbytes
        ids_bytes = -(-4 * num_blocks // mmap.PAGESIZE) * mmap.PAGESIZE
        host_ids = HostPool(_NUM_SLOTS, ids_bytes).rows
        self._lock = PageLock(host_ids, runtime)
        for row in host_ids:
            buffer = pool.new_zeros((num_blocks, *pool.shape[1:]))
            slot = Slot(
                buffer,
                buffer.view(num_blocks, -1).view(torch.uint8),
                torch.zeros(num_blocks, dtype=torch.int32, device=pool.device),
                torch.from_numpy(row).view(torch.int32)[:num_blocks],
            )
            self._slots.put_nowait(slot)
        self._warm_up(slot)

    @contextlib.asynccontextmanager
    async def slot(self, passed: Callable[[Event], Awaitable[None]]) -> AsyncIterator[Slot]:
        """A slot whose last use has ended, waited for with ``passed``. The user sets ``last``."""
        slot = await self._slots.get()
        try:
            if slot.last is not None:
                await passed(slot.last)
            yield slot
        finally:
            self._slots.put_nowait(slot)

    def collect(self, slot: Slot, blocks: Ids, stream: Stream) -> None:
        """Submit to ``stream``: blocks of the pool into the first rows of the slot."""
        ids = self._send_ids(slot, blocks, stream)
        self._runtime.launch(stream, self._gather, self._pool, ids, slot.buffer[: len(blocks)])

    def spread(self, slot: Slot, blocks: Ids, stream: Stream) -> None:
        """Submit to ``stream``: the first rows of the slot into blocks of the pool."""
        ids = self._send_ids(slot, blocks, stream)
        self._runtime.launch(stream, self._scatter, slot.buffer[: len(blocks)], self._pool, ids)

    def close(self) -> None:
        """No copy may be under way."""
        self._lock.close()

    def _send_ids(self, slot: Slot, blocks: Ids, stream: Stream) -> Tensor:
        count = len(blocks)
        slot.host_ids[:count] = torch.from_numpy(blocks)
        self._runtime.copy(stream, [slot.ids[:count]], [slot.host_ids[:count]])
        return slot.ids[:count]

    def _warm_up(self, slot: Slot) -> None:
        """Block 0 out and back: compiles the kernels now, not while a request waits."""
        stream = self._runtime.current_stream()
        ids, buffer = slot.ids[:1], slot.buffer[:1]
        self._runtime.launch(stream, self._gather, self._pool, ids, buffer)
        self._runtime.launch(stream, self._scatter, buffer, self._pool, ids)
        self._runtime.synchronize(stream)


def _gather(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    torch.index_select(pool, 0, block_ids, out=out)


def _scatter(src: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    pool.index_copy_(0, block_ids.long(), src)
