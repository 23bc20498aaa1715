"""What a pin keeps, where, until when, and what it says when it cannot."""

import pytest

from kvstore.block import TierName
from kvstore.config import DiskConfig, StoreConfig
from kvstore.disk import DiskStore
from kvstore.errors import (
    BlockMissingError,
    CapacityError,
    ConfigError,
    StoreClosedError,
    TierBrokenError,
)
from kvstore.hashing import encode_tokens
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier

BLOCK = 4
END = [0]


def document(number: int, num_blocks: int = 3) -> list[int]:
    return [number * 100 + i for i in range(num_blocks * BLOCK)]


def churn(engine, num_documents=10):
    for number in range(50, 50 + num_documents):
        engine.run(document(number) + END)


def look_up(engine, tokens):
    return engine.look_up(tokens, num_reusable=len(tokens), peek=True)


def sources(engine, tokens):
    return look_up(engine, tokens).sources


def settle(engine):
    assert engine.store.run_until_idle(10.0)


def unpin(engine, tokens):
    answers = []
    engine.store.unpin(look_up(engine, tokens), answers.append)
    settle(engine)
    return answers[0]


# --- in memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_blocks", [0, 12])
def test_pinned_blocks_stay_in_the_slowest_memory_tier(make_engine, host_blocks):
    engine = make_engine(8, host_blocks=host_blocks)
    engine.run(document(1) + END)
    pin = engine.store.pin(look_up(engine, document(1)))
    assert pin.num_blocks == 3
    churn(engine)
    where = TierName.HOST if host_blocks else TierName.DEVICE
    assert sources(engine, document(1)) == [where] * 3
    assert engine.store.stats().tiers[where.value].pinned_blocks == 3
    pin.release()
    pin.release()
    churn(engine)
    assert sources(engine, document(1)) == []


def test_pins_of_shared_blocks_add_up(make_engine):
    engine = make_engine(8)
    engine.run(document(1) + END)
    with engine.store.pin(look_up(engine, document(1))):
        engine.store.pin(look_up(engine, document(1)[:BLOCK]))
    churn(engine)
    assert sources(engine, document(1)) == [TierName.DEVICE]


def test_more_than_half_of_the_slowest_memory_tier_is_refused(make_engine):
    engine = make_engine(16, host_blocks=8)
    for number in (1, 2):
        engine.run(document(number) + END)
    engine.store.pin(look_up(engine, document(1)))
    with pytest.raises(CapacityError, match=r"6 of 8 blocks.*raise host_cache"):
        engine.store.pin(look_up(engine, document(2)))
    engine.store.pin(look_up(engine, document(2)[:BLOCK]))
    assert engine.store.stats().tiers["device"].pinned_blocks == 4


def test_a_block_that_is_still_being_loaded_is_not_pinned_and_may_fail(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(8, disk=disk)
    engine.run(document(1) + END)
    engine.store.flush(10.0)
    engine.store.reset()
    disk.fail_reads = lambda ref: BlockMissingError("gone") if ref.depth == 1 else None
    lookup = look_up(engine, document(1))
    disk.is_held = True
    lease = engine.store.reserve(lookup, 12)
    in_memory = engine.store.pin(lookup)
    on_disk = engine.store.pin(lookup, persist=True)
    assert (in_memory.num_blocks, on_disk.num_blocks) == (0, 3)
    disk.is_held = False
    settle(engine)
    engine.store.release(lease)
    assert engine.store.check() == []
    assert on_disk.error is None


# --- on disk --------------------------------------------------------------------------------------


def test_a_persisted_pin_is_held_by_disk_and_memory_may_give_its_blocks_up(make_engine):
    memory = MemoryDisk()
    disk = FaultyDisk(memory)
    engine = make_engine(8, disk=disk, clock=FakeClock())
    engine.run(document(1) + END)
    disk.is_held = True
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    engine.store.poll()
    assert not pin.is_settled
    assert set(engine.store.pinning.held) == set(engine.store.index.used_slots())
    disk.is_held = False
    settle(engine)
    assert (pin.is_settled, pin.error, pin.num_blocks) == (True, None, 3)
    assert engine.store.stats().tiers["disk"].pinned_blocks == 3
    assert not engine.store.pinning.held
    churn(engine)
    assert sources(engine, document(1)) == [TierName.DISK] * 3
    pin.release()
    settle(engine)
    assert memory.pins == {}


@pytest.mark.parametrize("write_policy", ["write_back", "min_hits"])
def test_what_is_pinned_on_disk_is_written_whatever_the_policy(make_engine, write_policy):
    memory = MemoryDisk()
    config = StoreConfig(write_policy=write_policy)
    engine = make_engine(disk=memory, config=config, clock=FakeClock())
    engine.run(document(1) + END)
    settle(engine)
    assert memory.blocks == {}
    engine.store.pin(look_up(engine, document(1)), ttl_s=10.0)
    settle(engine)
    assert len(memory.pinned()) == len(memory.blocks) == 3


def test_a_pin_on_disk_that_outlives_its_store_says_how_to_release_it(make_engine):
    memory = MemoryDisk()
    engine = make_engine(8, disk=memory)
    engine.run(document(1) + END)
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    engine.store.close(10.0)
    for _ in range(2):
        with pytest.raises(StoreClosedError, match="stay pinned on disk; kvstore unpin"):
            pin.release()
    assert (pin.is_settled, pin.error, len(memory.pinned())) == (True, None, 3)


def test_a_pin_on_disk_survives_a_restart_and_is_released_by_another_store(make_engine, tmp_path):
    def make():
        config = DiskConfig(free_space_floor=0)
        disk = LmdbTier(DiskStore.open(tmp_path, capacity_bytes=1 << 20, config=config))
        return make_engine(8, disk=disk)

    first = make()
    first.run(document(1) + END)
    first.store.pin(look_up(first, document(1)), persist=True)
    first.store.close(10.0)  # an orderly end tells disk of a pin that was under way
    second = make()
    assert second.store.stats().tiers["disk"].pinned_blocks == 3
    assert not unpin(second, document(1)[:BLOCK])
    assert unpin(second, document(1))
    assert not unpin(second, document(1))
    assert second.store.stats().tiers["disk"].pinned_blocks == 0
    assert sources(second, document(1)) == [TierName.DISK] * 3


def test_a_pin_with_a_time_ends(make_engine):
    memory = MemoryDisk(clock=FakeClock())
    engine = make_engine(disk=memory, clock=memory.clock)
    engine.run(document(1) + END)
    pin = engine.store.pin(look_up(engine, document(1)), ttl_s=5.0)
    settle(engine)
    assert not pin.has_ended
    memory.clock.advance(4.0)
    assert engine.store.stats().tiers["disk"].pinned_blocks == 3
    memory.clock.advance(1.0)
    assert engine.store.stats().tiers["disk"].pinned_blocks == 0
    assert (pin.has_ended, repr(pin)) == (True, "Pin(num_blocks=3, ended)")
    pin.release()
    settle(engine)
    assert repr(pin) == "Pin(num_blocks=3, released)"


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan"), "7d", True])
def test_a_time_that_means_nothing_is_refused(make_engine, ttl_s):
    engine = make_engine(disk=MemoryDisk())
    engine.run(document(1) + END)
    with pytest.raises(ConfigError, match="ttl: expected a positive number of seconds"):
        engine.store.pin(look_up(engine, document(1)), ttl_s=ttl_s)


def test_without_a_disk_that_can_be_written_nothing_persists(make_engine):
    engine = make_engine()
    engine.run(document(1) + END)
    with pytest.raises(ConfigError, match="persist and ttl need a disk tier"):
        engine.store.pin(look_up(engine, document(1)), persist=True)
    config = StoreConfig(disk_mode="ro")
    engine = make_engine(disk=MemoryDisk(), config=config)
    with pytest.raises(ConfigError, match="it is open with disk_mode"):
        engine.store.pin(look_up(engine, document(1)), persist=True)


def test_a_prefix_that_is_not_whole_is_not_persisted(make_engine):
    engine = make_engine(disk=MemoryDisk())
    engine.run(document(1, 2) + END)
    with pytest.raises(BlockMissingError, match="1 of 3 blocks are in no tier"):
        engine.store.pin(look_up(engine, document(1)), persist=True)


def test_what_only_disk_holds_can_be_pinned(make_engine):
    memory = MemoryDisk()
    first = make_engine(disk=memory)
    first.run(document(1) + END)
    first.store.close(10.0)
    second = make_engine(disk=memory)
    pin = second.store.pin(look_up(second, document(1)), persist=True)
    settle(second)
    assert pin.error is None
    assert len(memory.pinned()) == 3


def test_a_block_evicted_by_a_peer_before_it_is_pinned_is_written_again(make_engine):
    memory = MemoryDisk()
    engine = make_engine(disk=memory)
    engine.run(document(1) + END)
    engine.store.flush(10.0)
    lookup = look_up(engine, document(1))
    for key in lookup.keys[1:]:
        del memory.blocks[key]
    pin = engine.store.pin(lookup, persist=True)
    settle(engine)
    assert pin.error is None
    assert memory.pinned() == set(lookup.keys)


def test_a_pin_for_which_disk_has_no_room_says_so(make_engine, caplog):
    memory = MemoryDisk(capacity=2)
    engine = make_engine(disk=memory)
    engine.run(document(1) + END)
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    settle(engine)
    assert isinstance(pin.error, CapacityError)
    assert "1 of 3 blocks cannot be kept on disk: raise disk_cache_size" in str(pin.error)
    assert not engine.store.pinning.held
    assert "could not be pinned on disk" in caplog.text


def test_more_than_half_of_the_disk_is_refused(make_engine):
    memory = MemoryDisk(capacity=5)
    engine = make_engine(disk=memory)
    engine.run(document(1) + END)
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    settle(engine)
    assert isinstance(pin.error, CapacityError)
    assert memory.pins == {}
    pin.release()


def test_a_disk_that_breaks_ends_the_wait(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    engine.run(document(1) + END)
    engine.store.flush(10.0)
    disk.is_broken = True
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    settle(engine)
    assert isinstance(pin.error, TierBrokenError)
    assert not engine.store.pinning.held


def test_a_pin_released_on_its_way_to_disk_is_not_left_there(make_engine):
    memory = MemoryDisk()
    disk = FaultyDisk(memory)
    engine = make_engine(disk=disk)
    engine.run(document(1) + END)
    disk.is_held = True
    pin = engine.store.pin(look_up(engine, document(1)), persist=True)
    engine.store.poll()
    pin.release()
    disk.is_held = False
    settle(engine)
    assert memory.pins == {}
    assert not engine.store.pinning.held


def test_releasing_a_pin_leaves_that_of_another(make_engine):
    memory = MemoryDisk()
    engine = make_engine(disk=memory)
    engine.run(document(1) + END)
    pins = []
    for ttl_s in (None, 60.0):
        pins.append(engine.store.pin(look_up(engine, document(1)), persist=True, ttl_s=ttl_s))
        settle(engine)
    pins[1].release()
    assert not pins[1].is_settled
    settle(engine)
    assert pins[1].is_settled
    assert len(memory.pinned()) == 3
    assert list(*(holds.values() for holds in memory.pins.values())) == [float("inf")]
    pins[0].release()
    settle(engine)
    assert memory.pins == {}


def test_clearing_the_disk_spares_what_is_pinned_there_and_says_so(make_engine):
    memory = MemoryDisk()
    engine = make_engine(disk=memory)
    events = []
    engine.store.events.subscribe(events.extend)
    for number in (1, 2):
        engine.run(document(number) + END)
    engine.store.pin(look_up(engine, document(1)), persist=True)
    engine.store.flush(10.0)
    engine.store.reset()
    kept = []
    engine.store.clear_disk("", kept.append)
    settle(engine)
    assert kept == [3]
    assert sources(engine, document(1)) == [TierName.DISK] * 3
    assert sources(engine, document(2)) == []
    assert not [each for each in events if getattr(each, "medium", "") == "disk" and is_clear(each)]


def is_clear(event):
    return type(event).__name__ == "AllBlocksCleared"


def test_a_pin_of_nothing_holds_nothing(make_engine):
    engine = make_engine(disk=MemoryDisk())
    engine.store.pin(engine.store.lookup(encode_tokens([1, 2])), persist=True).release()
    assert not unpin(engine, [1, 2])
