"""Which dirty blocks are written when, and in which order."""

import contextlib
import math
import threading

import pytest

from kvstore.block import TierName
from kvstore.config import StoreConfig
from kvstore.disk import DiskStore, startup
from kvstore.disk.attach import ATTACH_FILE
from kvstore.errors import BlockMissingError, OutOfBlocksError
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier

END = [0]


def document(number, num_blocks):
    return [number * 100 + i for i in range(4 * num_blocks)]


def settle(engine):
    assert engine.store.run_until_idle(10.0)


@pytest.fixture
def clock():
    return FakeClock()


def test_nearly_full_memory_is_cleaned_until_the_low_watermark_oldest_first(make_engine, clock):
    memory = MemoryDisk()
    config = StoreConfig(
        dirty_max_age_s=1000.0, high_watermark=0.75, low_watermark=0.5, group_commit_bytes=1
    )
    engine = make_engine(16, disk=memory, config=config, clock=clock)
    first = engine.run(document(1, 8) + END)
    clock.advance(1.0)
    settle(engine)
    assert memory.blocks == {}  # below the high watermark nothing is due
    engine.run(document(2, 4) + END)
    settle(engine)
    assert engine.store.stats().dirty_blocks == 8
    assert list(memory.blocks) == first.keys[:4]  # root first
    clock.advance(1000.0)
    settle(engine)
    assert engine.store.stats().dirty_blocks == 0


def test_cleaning_by_fill_ends_at_the_low_watermark_when_the_fill_has_gone(make_engine, clock):
    disk = FaultyDisk(MemoryDisk())
    config = StoreConfig(
        dirty_max_age_s=1000.0, high_watermark=0.75, low_watermark=0.5, group_commit_bytes=1
    )
    engine = make_engine(16, disk=disk, config=config, clock=clock)
    engine.run(document(1, 8) + END)
    engine.run(document(2, 4) + END, "tenant")
    disk.is_held = True
    engine.store.poll()  # starts to write the first of twelve
    engine.store.reset(salt="tenant")
    disk.is_held = False
    settle(engine)
    assert (len(disk.inner.blocks), engine.store.stats().dirty_blocks) == (1, 7)


def test_write_back_leaves_full_memory_dirty_until_somebody_needs_the_room(make_engine, clock):
    memory = MemoryDisk()
    config = StoreConfig(write_policy="write_back", high_watermark=0.5, low_watermark=0.1)
    engine = make_engine(16, disk=memory, config=config, clock=clock)
    engine.run(document(1, 15) + END)
    clock.advance(1e6)
    settle(engine)
    assert (memory.blocks, engine.store.stats().dirty_blocks) == ({}, 15)
    engine.run(document(2, 1) + END)
    assert len(memory.blocks) > 0


def test_a_parent_is_written_before_its_children_whatever_the_group(make_engine, clock):
    memory = MemoryDisk()
    engine = make_engine(32, disk=memory, config=StoreConfig(group_commit_bytes=1), clock=clock)
    for number in (1, 2):
        engine.run(document(number, 6) + END)
    engine.store.flush(10.0)
    seen = set()
    for ref, _ in memory.blocks.values():
        assert ref.depth == 0 or ref.parent in seen
        seen.add(ref.key)
    assert len(seen) == 12


def test_what_is_dirty_and_since_when_is_told(make_engine, clock):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(32, disk=disk, clock=clock)
    engine.run(document(1, 2) + END)
    clock.advance(1.5)
    engine.run(document(2, 3) + END)
    stats = engine.store.stats()
    assert (stats.dirty_blocks, stats.oldest_dirty_age_s) == (5, 1.5)
    engine.store.flush(10.0)
    stats = engine.store.stats()
    assert (stats.dirty_blocks, stats.oldest_dirty_age_s) == (0, 0.0)
    assert stats.written.written_blocks == 5
    assert stats.written_bytes_last_day == 5 * engine.store.layout.block_bytes


def test_a_disk_that_cannot_keep_up_shows_in_the_age_and_a_flush_ends_in_time(make_engine, clock):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(32, disk=disk, clock=clock, config=StoreConfig(group_commit_bytes=1))
    engine.run(document(1, 3) + END)
    disk.is_held = True
    clock.advance(2.0)
    engine.store.poll()
    clock.advance(100.0)
    assert engine.store.stats().oldest_dirty_age_s == 102.0
    assert not engine.store.flush(0.01)
    disk.is_held = False
    assert engine.store.flush(10.0)


def test_min_hits_writes_what_was_found_so_often(make_engine, clock):
    memory = MemoryDisk()
    config = StoreConfig(write_policy="min_hits", min_hits=2)
    engine = make_engine(32, disk=memory, config=config, clock=clock)
    for number_of_hits in range(3):
        engine.run([*document(1, 2), number_of_hits])
        clock.advance(3.0)
        settle(engine)
        assert len(memory.blocks) == (2 if number_of_hits == 2 else 0)
    engine.run(document(2, 2) + END)
    engine.store.flush(10.0)
    assert len(memory.blocks) == 2


def test_min_hits_counts_what_was_found_on_host(make_engine, clock):
    """Such a block used to wait for a request that found it on the device."""
    memory = MemoryDisk()
    config = StoreConfig(write_policy="min_hits", min_hits=2)
    engine = make_engine(4, host_blocks=12, disk=memory, config=config, clock=clock)
    key = engine.run(document(1, 1) + END).keys[0]
    for number in (2, 3):
        engine.run(document(number, 3) + END)  # takes the whole device
        assert key not in memory.blocks
        assert engine.run(document(1, 1) + END).sources == [TierName.HOST]
        engine.store.flush(10.0)
    assert key in memory.blocks


def test_a_dirty_block_leaves_host_only_when_disk_has_it(make_engine, clock):
    memory = MemoryDisk()
    config = StoreConfig(write_policy="write_back")
    engine = make_engine(4, host_blocks=1, disk=memory, config=config, clock=clock)

    def take_the_whole_device(number):
        tokens, lease = document(number, 3) + END, None
        lookup = engine.look_up(tokens)
        while lease is None:
            with contextlib.suppress(OutOfBlocksError):
                lease = engine.store.reserve(lookup, len(tokens))
            settle(engine)
        engine.compute(lease, tokens)
        engine.store.release(lease)

    key = engine.run(document(1, 1) + END).keys[0]
    take_the_whole_device(2)
    assert memory.blocks == {}
    assert engine.look_up(document(1, 1) + END).sources == [TierName.HOST]
    take_the_whole_device(3)  # whose victims want the room on host
    assert key in memory.blocks


def test_disk_is_told_of_a_use_once_in_a_touch_interval_leaf_first(make_engine, clock):
    class Told(MemoryDisk):
        touched: list[bytes]

        async def touch(self, keys):
            self.touched += keys

    memory = Told()
    memory.touched = []
    engine = make_engine(32, disk=memory, clock=clock, config=StoreConfig(touch_interval_s=60.0))
    lookup = engine.run(document(1, 3) + END)
    engine.store.flush(10.0)
    for _ in range(3):
        clock.advance(25.0)
        engine.run(document(1, 3) + END)
        settle(engine)
    assert memory.touched == lookup.keys[::-1]


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_a_parent_that_memory_only_waits_for_is_not_written(make_engine, clock, host_blocks):
    """It used to be written from wherever it was going to be, or from another block's memory."""
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(8, disk=disk, host_blocks=host_blocks, clock=clock)
    parent, child, sibling = document(1, 1), [7] * 4, [8] * 4
    engine.run(parent + END)
    engine.store.flush(10.0)
    engine.run(parent + child + END)
    index = engine.store.index
    engine.store._evictor.drop_device(index.find(engine.look_up_memory(parent + END).ref(0)))
    lookup = engine.look_up(parent + sibling + END)
    disk.inner.blocks.clear()  # by another process, after the probe
    lease = engine.store.reserve(lookup, 9)
    engine.store.urge()
    assert engine.store.run_until_idle(10.0)
    assert lease.failed_keys == lookup.keys[:1]
    engine.store.flush(10.0)  # the child is an orphan, while a lease holds what its parent was not
    assert disk.inner.blocks == {}
    assert engine.store.stats().written.unwritten_blocks == 1
    engine.store.release(lease)


class TouchedDisk(MemoryDisk):
    """Notes what it is told of uses."""

    async def touch(self, keys):
        self.__dict__.setdefault("touched", []).extend(keys)


def test_a_block_that_could_not_be_read_costs_the_others_no_touch(make_engine, clock):
    """Its key was gone by then, and an empty one made the disk pass over all of them."""
    disk = FaultyDisk(TouchedDisk())
    engine = make_engine(8, disk=disk, clock=clock)
    engine.run(document(1, 2) + END)
    engine.store.flush(10.0)
    engine.store.reset()
    clock.advance(1000.0)
    lookup = engine.look_up(document(1, 2) + END)
    bad = lookup.keys[1]
    disk.fail_reads = lambda ref: BlockMissingError("gone") if ref.key == bad else None
    lease = engine.store.reserve(lookup, 9)
    settle(engine)
    engine.store.release(lease)
    settle(engine)
    assert disk.inner.touched == lookup.keys[::-1]


@pytest.mark.parametrize("bytes_per_s", [1, math.inf])
def test_writing_has_any_limit_or_none(make_engine, clock, bytes_per_s):
    disk = MemoryDisk()
    config = StoreConfig(write_bytes_per_s=bytes_per_s)
    engine = make_engine(8, disk=disk, clock=clock, config=config)
    engine.run(document(1, 1) + END)
    engine.store.flush(10.0)
    assert len(disk.blocks) == 1


@pytest.mark.parametrize("host_blocks", [0, 3])
def test_what_is_computed_while_disk_is_checked_is_written_when_that_has_ended(
    make_engine, clock, host_blocks
):
    """It used to be refused as by a full disk, and never written."""
    memory = MemoryDisk(is_checking=True)
    engine = make_engine(6, disk=memory, host_blocks=host_blocks, clock=clock)
    engine.run(document(1, 3) + END)
    clock.advance(100.0)
    settle(engine)
    assert not engine.store.flush(0.0)
    assert (memory.blocks, engine.store.stats().dirty_blocks) == ({}, 3)
    engine.run(document(2, 5) + END)  # nobody waits for the end of the check
    engine.run(document(3, 3) + END)
    memory.is_checking = False
    assert engine.store.flush(10.0)
    assert len(memory.blocks) > 3


def test_closing_waits_for_the_check_of_the_disk_and_then_writes(
    make_engine, tmp_path, monkeypatch
):
    def make():
        return make_engine(8, disk=LmdbTier(DiskStore.open(tmp_path, capacity_bytes=1 << 20)))

    first = make()
    first.run(document(1, 1) + END)
    first.store.close()
    (tmp_path / ATTACH_FILE).unlink()  # the file has no history: it is checked
    go = threading.Event()
    check = startup.check_deep
    monkeypatch.setattr(startup, "check_deep", lambda file: go.wait(60.0) and check(file))
    second = make()
    assert second.store.stats().tiers["disk"].state == "checking"
    second.run(document(2, 2) + END)
    assert not second.store.flush(0.0)
    go.set()
    second.store.close()
    lookup = make().look_up(document(2, 2) + END)
    assert lookup.sources == [TierName.DISK] * 2


def test_what_is_dirty_again_while_everything_is_written_is_written_too(make_engine):
    """Clearing disk makes what memory holds dirty: with write_back nothing else would write it, and
    a flush without a time limit waited for ever."""
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk, config=StoreConfig(write_policy="write_back"))
    store, kept = engine.store, []
    engine.run([1] * 8 + [9])
    disk.held = frozenset({"write"})
    store.urge()
    store.poll()  # all that is dirty is under way
    store.clear_disk("", kept.append)
    while not kept:
        store.poll()
    disk.held = frozenset({"clear"})
    assert store.run_until_idle(10.0)
    assert store.is_clean
    assert len(disk.inner.blocks) == 2
    store.clear_disk("", kept.append)
    store.urge()
    store.poll()  # nothing is dirty yet
    disk.held = frozenset()
    assert store.flush(10.0)
    assert len(disk.inner.blocks) == 2
