import asyncio
import threading

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.testing.memory_suite import CAPACITY, MemoryTierSuite
from kvstore.tiers.base import CopierStats
from kvstore.tiers.host import FreeIds, HostCopier, HostPool

BLOCK_BYTES = 4096


@pytest.fixture
def pools():
    """A device and a host pool in host memory; block i holds i + 1 on the device, 100 + i on the
    host."""
    device, host = HostPool(24, BLOCK_BYTES), HostPool(24, BLOCK_BYTES)
    device.rows[:] = np.arange(1, 25, dtype=np.uint8)[:, None]
    host.rows[:] = np.arange(100, 124, dtype=np.uint8)[:, None]
    return device, host


@pytest.fixture
def copier(pools):
    copier = HostCopier(pools[0])
    yield copier
    copier.close()


class TestHostTier(MemoryTierSuite):
    @pytest.fixture(autouse=True)
    def _short_batches(self, monkeypatch):
        monkeypatch.setattr("kvstore.tiers.runs.BATCH_BYTES", 3 * BLOCK_BYTES)

    def make_tier(self):
        pool = HostPool(CAPACITY, BLOCK_BYTES)
        return pool, HostCopier(pool)

    def raw(self, pool):
        return pool.rows


def content(rows, ids):
    assert (rows == rows[:, :1]).all(), "a block was copied in part"
    return [int(rows[i, 0]) for i in ids]


def test_free_ids_come_lowest_first_so_that_runs_lie_side_by_side():
    free = FreeIds(6)
    assert free.take(4) == [0, 1, 2, 3]
    for block_id in (2, 0):
        free.give(block_id)
    assert free.take(3) == [0, 2, 4]
    assert set(free) == {5}


def test_taking_more_than_is_free_is_the_callers_bug():
    with pytest.raises(AssertionError, match="than are free"):
        FreeIds(2).take(3)


def test_a_pool_maps_exactly_its_size_and_shows_its_blocks_as_writable_bytes():
    pool = HostPool(3, BLOCK_BYTES)
    assert pool.rows.shape == (3, BLOCK_BYTES)
    assert pool.rows.ctypes.data % 4096 == 0
    pool.payload(1)[:] = b"\x07" * BLOCK_BYTES
    assert content(pool.rows, range(3)) == [0, 7, 0]


@pytest.mark.parametrize(
    ("capacity", "message"), [(0, "at least one block"), (1 << 50, "lower device_cache or host")]
)
def test_a_pool_that_cannot_be_names_the_setting(capacity, message):
    with pytest.raises(ConfigError, match=message):
        HostPool(capacity, BLOCK_BYTES)


def test_a_promotion_does_not_queue_behind_a_demotion(pools, copier, monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def slow(*arguments):
        started.set()
        assert go_on.wait(60)

    monkeypatch.setattr("kvstore.tiers.host._collect", slow)

    async def copy():
        demotion = asyncio.ensure_future(copier.copy_out([0], pools[1].rows, [0]))
        await asyncio.to_thread(started.wait)
        await copier.copy_in(pools[1].rows, [5], [6])
        assert not demotion.done()
        go_on.set()
        await demotion

    asyncio.run(copy())
    assert content(pools[0].rows, [6]) == [105]


def test_a_long_copy_takes_turns_with_a_short_one(pools, copier, monkeypatch):
    monkeypatch.setattr("kvstore.tiers.runs.BATCH_BYTES", BLOCK_BYTES)

    async def copy():
        long = asyncio.ensure_future(copier.copy_in(pools[1].rows, range(20), range(20)))
        await asyncio.sleep(0)
        short = asyncio.ensure_future(copier.copy_in(pools[1].rows, [21], [21]))
        done, _ = await asyncio.wait([long, short], return_when=asyncio.FIRST_COMPLETED)
        assert done == {short}
        await long

    asyncio.run(copy())


def test_a_copy_that_fails_ends_only_when_no_batch_is_under_way(pools, copier, monkeypatch):
    monkeypatch.setattr("kvstore.tiers.runs.BATCH_BYTES", BLOCK_BYTES)
    finished = []

    def copy(device, blocks, rows, row_ids):
        if int(blocks[0]) == 0:
            raise OSError("the memory is gone")
        finished.append(int(blocks[0]))

    monkeypatch.setattr("kvstore.tiers.host._spread", copy)
    with pytest.raises(OSError, match="the memory is gone"):
        asyncio.run(copier.copy_in(pools[1].rows, range(4), range(4)))
    assert finished == [1], "the batch behind the failed one ran to its end, and none after it"


def test_host_memory_needs_no_page_lock(pools, copier):
    copier.adopt(pools[1].rows)
    assert copier.stats() == CopierStats(0, 0, "")
