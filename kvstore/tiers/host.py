"""Blocks in memory that the processor addresses: the host tier, and the device tier of a CPU."""

import heapq
import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.errors import ConfigError


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
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8).reshape(
            capacity, block_bytes
        )
        self._free = FreeIds(capacity)

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
    """Copies between two pools in host memory, runs of adjacent blocks as one piece.

    ``numpy.copyto`` releases the interpreter lock, so a worker thread copies beside the model.
    """

    def __init__(self, device: HostPool) -> None:
        self._device = device

    def fence(self) -> None:
        """On a CPU the owner thread has finished a forward before it submits a copy."""

    def copy_out(
        self,
        block_ids: Sequence[int],
        rows: npt.NDArray[np.uint8],
        row_ids: Sequence[int],
        fence: None = None,
    ) -> None:
        for block, row, count in _runs(block_ids, row_ids):
            np.copyto(rows[row : row + count], self._device.rows[block : block + count])

    def copy_in(
        self,
        rows: npt.NDArray[np.uint8],
        row_ids: Sequence[int],
        block_ids: Sequence[int],
        fence: None = None,
    ) -> None:
        for row, block, count in _runs(row_ids, block_ids):
            np.copyto(self._device.rows[block : block + count], rows[row : row + count])

    def copy_within(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        rows = self._device.rows
        for source, target, count in _runs(src_ids, dst_ids):
            np.copyto(rows[target : target + count], rows[source : source + count])


def _runs(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, target, count) of maximal stretches in which both ids go up by one."""
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        if runs:
            first_source, first_target, count = runs[-1]
            if source == first_source + count and target == first_target + count:
                runs[-1] = (first_source, first_target, count + 1)
                continue
        runs.append((source, target, 1))
    return runs
