"""Blocks in memory that the processor addresses: the host tier, and the device tier of a CPU."""

import asyncio
import heapq
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvstore.errors import ConfigError
from kvstore.tiers.base import CopierStats, Rows
from kvstore.tiers.runs import Ids, batches, find_runs, in_row_order


class FreeIds:
    """Block ids that are free. Lowest first, so that a run of blocks tends to lie side by side:
    adjacent blocks are copied, and read by attention, as one piece."""

    def __init__(self, capacity: int) -> None:
        self._ids = list(range(capacity))  # a sorted list is a heap

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._ids), "more blocks were taken than are free"
        return [heapq.heappop(self._ids) for _ in range(count)]

    def give(self, block_id: int) -> None:
        heapq.heappush(self._ids, block_id)


class HostPool:
    """``capacity`` blocks of ``block_bytes`` in one anonymous mapping of exactly that size.

    The mapping is committed page by page as blocks are first written, in huge pages where the
    kernel offers them: with 4 KiB pages the faults of a first prefill cost more than its copies.
    """

    def __init__(self, capacity: int, block_bytes: int) -> None:
        if capacity < 1:
            raise ConfigError(
                f"a memory tier needs room for at least one block of {block_bytes} bytes"
            )
        self.capacity = capacity
        self.block_bytes = block_bytes
        try:
            self._mapping = mmap.mmap(-1, capacity * block_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{capacity * block_bytes} bytes of memory cannot be mapped ({error}); "
                "lower device_cache or host_cache"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.rows: Rows = np.frombuffer(self._mapping, np.uint8).reshape(capacity, block_bytes)
        self._free = FreeIds(capacity)

    def commit_memory(self, num_blocks: int) -> None:
        """Have the kernel provide the memory of the blocks that are handed out first.

        Otherwise the first promotion pays for it: with 70 MB the first answer after a restart came
        after 0.136 s instead of 0.098 s.
        """
        self.rows[:num_blocks].reshape(-1)[:: mmap.PAGESIZE] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_ids(self) -> set[int]:
        return set(self._free)

    def allocate(self, count: int) -> list[int]:
        return self._free.take(count)

    def free(self, block_id: int) -> None:
        self._free.give(block_id)

    def payload(self, block_id: int) -> memoryview:
        return memoryview(self.rows[block_id])


class HostCopier:
    """Copies between two pools in host memory, runs of adjacent rows in one call.

    numpy releases the interpreter lock while it copies, so a worker thread copies beside the model.
    Each direction has one thread: a promotion, which a request waits for, never queues behind
    demotions. Halving a copy between two threads made it slower (100 MB on two cores: 16 → 18 ms).
    """

    def __init__(self, device: HostPool) -> None:
        self._device = device
        self._out = ThreadPoolExecutor(1, "kv-copy-out")
        self._in = ThreadPoolExecutor(1, "kv-copy-in")

    def adopt(self, rows: Rows) -> None:
        """Nothing to prepare: the processor reaches both sides."""

    def fence(self) -> None:
        """On a CPU the owner thread has finished a forward before it submits a copy."""

    async def copy_out(
        self, block_ids: Sequence[int], rows: Rows, row_ids: Sequence[int], fence: None = None
    ) -> None:
        await self._copy(self._out, _collect, block_ids, rows, row_ids)

    async def copy_in(
        self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int], fence: None = None
    ) -> None:
        await self._copy(self._in, _spread, block_ids, rows, row_ids)

    def copy_within(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        rows = self._device.rows
        for target, source in zip(dst_ids, src_ids, strict=True):
            np.copyto(rows[target], rows[source])

    def stats(self) -> CopierStats:
        return CopierStats()

    def close(self) -> None:
        self._out.shutdown(wait=True)
        self._in.shutdown(wait=True)

    async def _copy(
        self,
        thread: ThreadPoolExecutor,
        copy: Callable[[Rows, Ids, Rows, Ids], None],
        block_ids: Sequence[int],
        rows: Rows,
        row_ids: Sequence[int],
    ) -> None:
        """In batches, so that a short copy takes turns with a long one; the thread has always the
        next one at hand."""
        blocks, order = in_row_order(block_ids, row_ids)
        loop = asyncio.get_running_loop()
        under_way: deque[asyncio.Future[None]] = deque()
        try:
            for batch in batches(len(blocks), self._device.block_bytes):
                part = (self._device.rows, blocks[batch], rows, order[batch])
                under_way.append(loop.run_in_executor(thread, copy, *part))
                if len(under_way) == 2:
                    await under_way.popleft()
        finally:
            await asyncio.gather(*under_way)


def _collect(device: Rows, blocks: Ids, rows: Rows, row_ids: Ids) -> None:
    """Blocks, wherever they are, into rows: one call for each stretch of adjacent rows."""
    for place, row, count in find_runs(np.arange(len(blocks)), row_ids):
        # "clip" is not needed for the ids, but with the default numpy would copy twice.
        out = rows[row : row + count]
        np.take(device, blocks[place : place + count], axis=0, out=out, mode="clip")


def _spread(device: Rows, blocks: Ids, rows: Rows, row_ids: Ids) -> None:
    for place, row, count in find_runs(np.arange(len(blocks)), row_ids):
        device[blocks[place : place + count]] = rows[row : row + count]
