"""The suite that any memory tier must pass: a pool of blocks, and what copies them to host memory.

Subclass ``MemoryTierSuite``, say how the tier is made and where its bytes lie, and pytest runs
every test below on it. The oracle is the tier's memory itself, not what the tier says of it.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvstore.tiers.base import BlockCopier, BlockPool, Rows
from kvstore.tiers.host import HostPool

CAPACITY = 24


class MemoryTierSuite(ABC):
    """Tests of one tier of ``CAPACITY`` blocks; a subclass's name begins with ``Test``."""

    @abstractmethod
    def make_tier(self) -> tuple[BlockPool, BlockCopier]:
        """A pool of ``CAPACITY`` free blocks, and its copier."""

    @abstractmethod
    def raw(self, pool: BlockPool) -> Rows:
        """The pool's memory, [CAPACITY, block_bytes], once all work that was submitted is done."""

    def test_ids_are_handed_out_once_in_ascending_order_and_add_up(self) -> None:
        with self.tier() as (pool, _, _):
            first, second = pool.allocate(10), pool.allocate(14)
            assert first == sorted(first)
            assert sorted(first + second) == list(range(CAPACITY))
            assert (pool.num_free, pool.free_ids()) == (0, set())
            for block_id in first[::2]:
                pool.free(block_id)
            assert pool.free_ids() == set(first[::2])
            assert pool.num_free == 5
            assert pool.allocate(5) == first[::2]

    def test_what_can_be_addressed_is_the_block_itself(self) -> None:
        with self.tier() as (pool, _, _):
            payload = pool.payload(3)
            if payload is not None:
                payload[:] = bytes([77]) * len(payload)
                assert _values(self.raw(pool), [2, 3, 4]) == [3, 77, 5]

    def test_blocks_arrive_where_they_are_sent_and_nowhere_else(self) -> None:
        for seed in range(4):
            choose = random.Random(seed)
            blocks, row_ids = (choose.sample(range(CAPACITY), CAPACITY) for _ in range(2))
            if seed % 2:  # adjacent in host memory, in either direction
                row_ids.sort(reverse=seed % 4 == 1)
            with self.tier() as (pool, copier, rows):
                out, into, rest = slice(0, 9), slice(9, 18), slice(18, CAPACITY)
                asyncio.run(_both_ways(copier, rows, blocks, row_ids, out, into))
                assert _values(rows, row_ids[out]) == [block + 1 for block in blocks[out]]
                assert _values(rows, row_ids[into]) == [row + 100 for row in row_ids[into]]
                assert _values(rows, row_ids[rest]) == [row + 100 for row in row_ids[rest]]
                device = self.raw(pool)
                assert _values(device, blocks[into]) == [row + 100 for row in row_ids[into]]
                left = blocks[out] + blocks[rest]
                assert _values(device, left) == [block + 1 for block in left]

    def test_a_copy_of_nothing_changes_nothing(self) -> None:
        with self.tier() as (pool, copier, rows):
            asyncio.run(_both_ways(copier, rows, [], [], slice(0), slice(0)))
            assert _values(self.raw(pool), range(CAPACITY)) == list(range(1, CAPACITY + 1))

    def test_a_copy_within_the_pool_comes_before_later_copies_of_its_blocks(self) -> None:
        with self.tier() as (pool, copier, rows):
            copier.copy_within([3, 4, 9], [5, 6, 1])
            asyncio.run(copier.copy_out([5, 6, 1, 3], rows, [0, 1, 2, 3], copier.fence()))
            assert _values(rows, range(4)) == [4, 5, 10, 4]
            assert _values(self.raw(pool), [5, 6, 1, 3]) == [4, 5, 10, 4]

    def test_host_memory_that_was_adopted_is_accounted_for(self) -> None:
        with self.tier() as (_, copier, rows):
            stats = copier.stats()
            assert stats.page_locked_bytes + stats.pageable_bytes in (0, rows.nbytes)
            assert bool(stats.reason) == bool(stats.pageable_bytes)

    @contextmanager
    def tier(self) -> Iterator[tuple[BlockPool, BlockCopier, Rows]]:
        """Block i holds i + 1, row i of the adopted host memory 100 + i."""
        pool, copier = self.make_tier()
        device = self.raw(pool)
        device[:] = np.arange(1, CAPACITY + 1, dtype=np.uint8)[:, None]
        rows = HostPool(CAPACITY, device.shape[1]).rows
        rows[:] = np.arange(100, 100 + CAPACITY, dtype=np.uint8)[:, None]
        copier.adopt(rows)
        try:
            yield pool, copier, rows
        finally:
            copier.close()


async def _both_ways(
    copier: BlockCopier,
    rows: Rows,
    blocks: Sequence[int],
    row_ids: Sequence[int],
    out: slice,
    into: slice,
) -> None:
    fence = copier.fence()
    await asyncio.gather(
        copier.copy_out(blocks[out], rows, row_ids[out], fence),
        copier.copy_in(rows, row_ids[into], blocks[into], fence),
    )


def _values(rows: npt.NDArray[np.uint8], ids: Sequence[int]) -> list[int]:
    """The one value that all bytes of each block have."""
    assert (rows == rows[:, :1]).all(), "a block was copied in part"
    return [int(rows[i, 0]) for i in ids]
