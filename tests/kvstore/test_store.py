import threading

import pytest

from kvstore.block import BlockLayout, TierName
from kvstore.config import StoreConfig
from kvstore.disk import DiskStore
from kvstore.disk.attach import Attachment
from kvstore.errors import (
    CorruptBlockError,
    OutOfBlocksError,
    StoreClosedError,
    TierBrokenError,
)
from kvstore.reports.events import AllBlocksCleared
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier
from kvstore.tiers.host import HostCopier, HostPool

LAYOUT = BlockLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
A, B, C = [1] * 4, [2] * 4, [3] * 4  # one block each
END = [9]  # the last token of a prompt is always computed
FILL = [7] * 4 + [8] * 4 + [6] * 4 + END  # with its end, all blocks of a device of four


def sources(lookup):
    return [source.value for source in lookup.sources]


def test_a_prefix_computed_once_is_found_again(make_engine):
    engine = make_engine()
    assert sources(engine.run(A + B + END)) == []
    assert sources(engine.run(A + B + END)) == ["device", "device"]
    assert sources(engine.run(A + C + END)) == ["device"]


def test_a_block_that_is_not_full_is_not_cached(make_engine):
    engine = make_engine()
    engine.run([*A, 2, 2, 2])
    assert sources(engine.run(A + B + END)) == ["device"]


def test_a_released_prompt_is_evicted_from_its_end(make_engine):
    engine = make_engine(4)
    engine.run(A + B + C + END)
    engine.run([7] * 4 + END)  # two blocks, one of them free
    assert sources(engine.run(A + B + C + END)) == ["device", "device"]


def test_the_least_recently_used_prompt_is_the_victim(make_engine):
    engine = make_engine(6)
    for prompt in (A, B, C):
        engine.run(prompt + END)
    engine.run(A + END)
    engine.run([7] * 4 + [8] * 4 + [6] * 4 + [5] * 4 + END)  # leaves room for one old block
    assert sources(engine.run(A + END)) == ["device"]
    assert engine.store.index.find(engine.look_up(B + END).ref(0)) == -1


@pytest.mark.parametrize(("waits_s", "survives"), [(0.0, True), (10.0, False)])
def test_a_prompt_of_higher_priority_stays_until_its_time_is_over(make_engine, waits_s, survives):
    clock = FakeClock()
    engine = make_engine(4, clock=clock)
    lease = engine.start(A + END)
    engine.compute(lease, A + END)
    engine.store.prefer(lease, 1, 10.0)
    engine.store.release(lease)
    clock.advance(waits_s)
    for prompt in (B, C, [7] * 4):
        engine.run(prompt + [8] * 4 + END)
    assert sources(engine.look_up(A + END)) == (["device"] if survives else [])


def test_a_held_block_is_never_a_victim(make_engine):
    engine = make_engine(4)
    held = engine.start(A + B + END)
    engine.compute(held, A + B + END)
    with pytest.raises(OutOfBlocksError) as raised:
        engine.start(C + END)
    assert (raised.value.needed_blocks, raised.value.available_blocks) == (2, 1)
    engine.check_cached(held, A + B + END)
    engine.store.release(held)
    engine.store.release(engine.start(C + END))


def test_a_failed_reservation_changes_nothing(make_engine):
    engine = make_engine(6)
    engine.run(A + B + END)
    held = engine.start(C + END)
    order = list(engine.store.policy.victims())
    with pytest.raises(OutOfBlocksError):
        engine.store.reserve(engine.look_up(A + B + [5] * 12), 20)
    assert list(engine.store.policy.victims()) == order
    assert engine.store.check() == []
    engine.store.release(held)


def test_an_eviction_that_must_wait_for_some_victims_evicts_none(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, disk=disk)
    engine.run(A + END)
    engine.store.flush(10.0)  # clean: could go at once
    engine.run(B + END)  # dirty: has to be written first
    disk.is_held = True
    lookup = engine.look_up_memory(FILL)
    for _ in range(3):
        with pytest.raises(OutOfBlocksError):
            engine.store.reserve(lookup, 16)
        engine.store.poll()
    for prompt in (A, B):
        assert sources(engine.look_up_memory(prompt + END)) == ["device"]
    disk.is_held = False
    engine.run(FILL)


def test_a_fork_shares_full_blocks_and_copies_the_last_one(make_engine):
    engine = make_engine(8)
    stem = A + B + [3, 3]
    first = engine.start(stem)
    engine.compute(first, stem)
    second = engine.store.fork(first, len(stem))
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    engine.compute(first, [*stem, 4, 4], len(stem))
    engine.compute(second, [*stem, 5, 5], len(stem))
    engine.check_content(first, [*stem, 4, 4])
    engine.store.release(first)
    engine.check_content(second, [*stem, 5, 5])
    engine.store.release(second)
    assert sources(engine.look_up([*stem, 4, 4, *END])) == ["device"] * 3
    assert sources(engine.look_up([*stem, 5, 5, *END])) == ["device"] * 3


def test_a_fork_at_the_end_of_a_block_takes_no_room(make_engine):
    engine = make_engine(2)
    first = engine.start(A + B)
    engine.compute(first, A + B)
    second = engine.store.fork(first, 8)
    assert second.block_ids == first.block_ids
    engine.store.release(second)
    engine.store.release(first)


def test_a_fork_without_room_changes_nothing(make_engine):
    engine = make_engine(2)
    first = engine.start([*A, 2])
    engine.compute(first, [*A, 2])
    with pytest.raises(OutOfBlocksError):
        engine.store.fork(first, 5)
    assert engine.store.leases == {first}
    assert engine.store.check() == []
    engine.store.release(first)


def test_blocks_without_keys_are_shared_until_their_last_user_ends(make_engine):
    """Nothing is committed, as with caching off."""
    engine = make_engine(4)
    first = engine.start(A + B)
    engine.compute(first, A + B, commits=False)
    second = engine.store.fork(first, 8)
    third = engine.store.fork(second, 4)
    assert engine.store.check() == []
    engine.store.release(first)
    engine.check_content(second, A + B)
    engine.store.release(second)
    engine.check_content(third, A)
    assert engine.store.device.num_free == 3
    engine.store.release(third)
    assert engine.store.device.num_free == 4


def test_a_shared_block_gets_its_key_for_all_who_share_it(make_engine):
    engine = make_engine(4)
    first = engine.start(A + B)
    engine.compute(first, A + B, commits=False)
    second = engine.store.fork(first, 8)
    engine.compute(second, A + B, 8)
    assert first.slots == second.slots
    engine.store.release(second)
    assert engine.store.check() == []
    engine.check_content(first, A + B)
    engine.store.release(first)


def test_device_victims_go_to_host_and_come_back(make_engine):
    engine = make_engine(4, host_blocks=8)
    engine.run(A + B + END)
    engine.run(FILL)
    assert sources(engine.run(A + B + END)) == ["host", "host"]
    stats = engine.store.stats()
    assert stats.promoted_blocks == {"host": 2}
    assert stats.demoted_blocks >= 2


def test_a_host_tier_smaller_than_the_victims_does_not_stall(make_engine):
    """Victims used to push each other out of the host tier in turn, for ever."""
    engine = make_engine(12, host_blocks=2)
    for start in range(0, 200, 10):
        engine.run([start + i // 4 for i in range(40)] + END)
    assert engine.store.stats().tiers["host"].used_blocks == 2


class FailingCopier(HostCopier):
    async def copy_out(self, block_ids, rows, row_ids, fence):
        raise OSError("the device does not answer")


def test_copies_to_host_that_fail_do_not_hold_up_eviction(make_engine, caplog):
    """The victims of a failed copy used to be copied, in vain, for ever."""
    device = HostPool(5, LAYOUT.block_bytes)
    engine = make_engine(device=device, copier=FailingCopier(device), host_blocks=8)
    for prompt in (A, B, C):
        engine.run([*prompt, *FILL])
    host = engine.store.stats().tiers["host"]
    assert host.state == "degraded"
    assert "does not answer" in host.reason
    said = [record for record in caplog.records if "host tier takes no blocks" in record.message]
    assert len(said) == 1


def test_a_pinned_block_that_host_cannot_take_is_not_counted_as_available(make_engine):
    """Who waited for the room it was promised used to wait for ever."""
    device = HostPool(5, LAYOUT.block_bytes)
    engine = make_engine(device=device, copier=FailingCopier(device), host_blocks=8)
    engine.run(A + END)
    with engine.store.pin(engine.look_up(A + END)):
        with pytest.raises(OutOfBlocksError):
            engine.store.reserve(engine.look_up(FILL + B), 17)
        engine.store.run_until_idle(10.0)
        assert engine.store.stats().tiers["host"].state == "degraded"
        with pytest.raises(OutOfBlocksError) as raised:
            engine.store.reserve(engine.look_up(FILL + B), 17)
        assert (raised.value.needed_blocks, raised.value.available_blocks) == (5, 4)


def test_memory_victims_are_found_on_disk(make_engine):
    disk = MemoryDisk()
    engine = make_engine(4, disk=disk)
    engine.run(A + B + END)
    engine.run(FILL)
    assert sources(engine.run(A + B + END)) == ["disk", "disk"]
    assert engine.store.stats().promoted_blocks == {"disk": 2}


def test_another_store_finds_what_a_closed_one_left_on_disk(make_engine):
    disk = MemoryDisk()
    first = make_engine(disk=disk)
    first.run(A + B + END)
    first.store.close()
    second = make_engine(disk=disk)
    assert sources(second.run(A + B + END)) == ["disk", "disk"]


def test_a_match_may_alternate_between_tiers(make_engine):
    engine = make_engine(8, disk=MemoryDisk(), host_blocks=4)
    engine.run(A + B + C + END)
    engine.store.flush()
    index = engine.store.index
    middle = engine.look_up(A + B + C + END).ref(1)
    engine.store._evictor.drop_device(index.find(middle))
    assert sources(engine.run(A + B + C + END)) == ["device", "disk", "device"]


def test_blocks_become_dirty_and_are_written_by_age(make_engine):
    clock, disk = FakeClock(), MemoryDisk()
    engine = make_engine(disk=disk, clock=clock)
    engine.run(A + B + END)
    engine.store.poll()
    assert (len(disk.blocks), engine.store.stats().dirty_blocks) == (0, 2)
    assert engine.store.next_deadline() == clock() + 2.0
    clock.advance(1.9)
    engine.store.poll()
    assert engine.store.num_pending == 0
    clock.advance(0.1)
    engine.store.poll()
    engine.store.run_until_idle(10.0)
    assert (len(disk.blocks), engine.store.stats().dirty_blocks) == (2, 0)
    assert engine.store.next_deadline() == float("inf")


def test_write_through_writes_at_once_and_write_back_only_when_evicted(make_engine):
    through, back = MemoryDisk(), MemoryDisk()
    clock = FakeClock()
    engine = make_engine(
        4, disk=through, clock=clock, config=StoreConfig(write_policy="write_through")
    )
    engine.run(A + END)
    engine.store.poll()
    engine.store.run_until_idle(10.0)
    assert len(through.blocks) == 1
    engine = make_engine(4, disk=back, clock=clock, config=StoreConfig(write_policy="write_back"))
    engine.run(A + END)
    clock.advance(1e6)
    engine.store.run_until_idle(0.1)
    assert back.blocks == {}
    engine.run(FILL)
    assert len(back.blocks) == 1


def test_a_dirty_victim_is_written_before_its_room_is_used(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, disk=disk)
    engine.run(A + B + END)
    disk.is_held = True
    lookup = engine.look_up_memory(FILL)
    with pytest.raises(OutOfBlocksError) as raised:
        engine.store.reserve(lookup, 13)
    assert raised.value.available_blocks >= raised.value.needed_blocks
    disk.is_held = False
    engine.run(FILL)
    assert sources(engine.run(A + B + END)) == ["disk", "disk"]


def test_a_parent_evicted_from_disk_by_another_process_is_written_again(make_engine):
    disk = MemoryDisk()
    engine = make_engine(disk=disk)
    engine.run(A + B + END)
    engine.store.flush()
    disk.blocks.clear()
    engine.run(A + B + C + END)
    engine.store.flush()
    assert len(disk.blocks) == 3
    assert engine.store.stats().written.unwritten_blocks == 0


def test_a_child_whose_parent_is_lost_is_given_up(make_engine):
    disk = MemoryDisk()
    engine = make_engine(disk=disk)
    engine.run(A + B + END)
    engine.store.flush()
    lease = engine.start(A + B + C + END)
    disk.blocks.clear()
    engine.compute(lease, A + B + C + END)
    slots = list(lease.slots)
    engine.store.release(lease)
    for slot in reversed(slots[:2]):
        engine.store._evictor.drop_device(slot)
    engine.store.flush(10.0)
    assert engine.store.is_clean
    assert engine.store.stats().written.unwritten_blocks == 1


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_what_no_lookup_reaches_is_counted_and_is_the_first_to_go(make_engine, host_blocks):
    engine = make_engine(8, host_blocks=host_blocks)
    store = engine.store
    engine.run(A + B + C + END)
    lease = engine.start(A + B + C + END)
    slots = list(lease.slots)
    store.release(lease)
    engine.run(FILL[:8] + END)
    assert store.stats().unreachable_blocks == 0
    store._evictor.drop_device(slots[0])  # what eviction, from the leaf up, would not do
    assert store.stats().unreachable_blocks == 2
    engine.run([9] * 20 + END)  # two blocks more than are free
    assert store.stats().unreachable_blocks == 0
    assert engine.look_up(FILL[:8] + END).sources == [TierName.DEVICE] * 2
    assert store.stats().demoted_blocks == 0
    engine.run(A + B + C + END)


def test_a_parent_that_comes_back_makes_its_children_reachable(make_engine):
    engine = make_engine(8)
    store = engine.store
    lookup = engine.run(A + B + END)
    store._evictor.drop_device(store.index.slots[lookup.keys[0]])
    assert store.stats().unreachable_blocks == 1
    engine.run(A + END)
    assert store.stats().unreachable_blocks == 0
    assert engine.look_up(A + B + END).sources == [TierName.DEVICE] * 2


def test_what_disk_refused_has_no_parent_there(make_engine):
    """Blocks that disk holds have their ancestors there, and are reached through them."""
    engine = make_engine(8, disk=MemoryDisk(capacity=2))
    store = engine.store
    lookup = engine.run(A + B + C + END)
    store.flush(10.0)
    slots = [store.index.slots[key] for key in lookup.keys]
    for slot in slots[:2]:
        store._evictor.drop_device(slot)
    assert store.stats().unreachable_blocks == 1
    engine.run(A + B + END)
    assert store.stats().unreachable_blocks == 0


def test_a_failed_load_shortens_the_match_and_is_not_tried_again(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    engine.run(A + B + C + END)
    engine.store.flush()
    engine.store.reset()
    lookup = engine.look_up(A + B + C + END)
    bad = lookup.keys[1]
    failure = CorruptBlockError("bits flipped", reason="checksum")
    disk.fail_reads = lambda ref: failure if ref.key == bad else None
    lease = engine.reserve(lookup, 13)
    while not lease.is_ready:
        engine.store.run_until_idle(1.0)
    assert lease.failed_keys == [bad]
    engine.store.release(lease)
    num_reads = disk.inner.num_reads
    lease = engine.reserve(lookup, 13)
    assert (lease.num_cached, lease.is_ready) == (1, True)
    assert disk.inner.num_reads == num_reads
    engine.check_cached(lease, A + B + C + END)
    engine.compute(lease, A + B + C + END)
    engine.store.release(lease)
    assert engine.store.stats().failed_loads == {"checksum": 1}


def test_requests_that_need_the_same_block_share_one_read(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(16, disk=disk)
    engine.run(A + B + END)
    engine.store.flush()
    engine.store.reset()
    lookups = [engine.look_up(A + B + END) for _ in range(4)]
    disk.is_held = True
    leases = [engine.store.reserve(lookup, 9) for lookup in lookups]
    assert not any(lease.is_ready for lease in leases)
    disk.is_held = False
    engine.store.run_until_idle(10.0)
    for lease in leases:
        assert lease.is_ready
        engine.check_cached(lease, A + B + END)
        engine.store.release(lease)
    assert disk.inner.num_reads == 2
    assert [sources(lookup) for lookup in lookups] == [["disk", "disk"]] * 4


def test_no_request_waits_longer_for_a_shared_prefix_than_alone(make_engine):
    """Everyone used to wait behind one load, and each reloaded what another was loading (the
    convoy of vllm#44294): time to first token went up twelvefold."""
    clock, disk = FakeClock(), FaultyDisk(MemoryDisk())
    document = [token for block in range(12) for token in [block] * 4]
    prompts = [[*document[: 4 * length], 100 + length] for length in range(5, 13)]
    engine = make_engine(48, disk=disk, clock=clock)
    engine.run(document + END)
    engine.store.flush()
    engine.store.reset()
    lookups = [engine.look_up(prompt) for prompt in prompts]
    num_reads = disk.inner.num_reads

    async def pass_time(seconds):
        clock.advance(seconds)

    disk.sleep = pass_time
    disk.bytes_per_s = LAYOUT.block_bytes  # a block a second
    leases = [
        engine.store.reserve(lookup, len(prompt))
        for lookup, prompt in zip(lookups, prompts, strict=True)
    ]
    began, waited = clock(), {}
    while len(waited) < len(leases):
        engine.store.poll()
        for i, lease in enumerate(leases):
            if lease.is_ready:
                waited.setdefault(i, clock() - began)
    assert disk.inner.num_reads - num_reads == 12  # each block once
    assert max(waited.values()) <= 12  # the longest of them alone: twelve blocks
    for lease, prompt in zip(leases, prompts, strict=True):
        engine.check_cached(lease, prompt)
        engine.store.release(lease)


def test_who_gives_up_gets_what_has_arrived_and_others_the_rest_later(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(16, host_blocks=4, disk=disk)
    engine.run(A + B + C + END)
    engine.store.flush()
    engine.store.reset()
    engine.run(A + END)  # on the device again; the others on disk only
    lookups = [engine.look_up(A + B + C + END) for _ in range(2)]
    num_reads = disk.inner.num_reads
    disk.is_held = True
    impatient, patient = (engine.store.reserve(lookup, 13) for lookup in lookups)
    engine.store.give_up(impatient)
    engine.store.release(impatient)
    instead = engine.store.reserve(lookups[0], 13)
    assert (instead.is_ready, instead.num_cached) == (True, 1)
    engine.compute(instead, A + B + C + END)
    assert len(instead.slots) == 1  # a block that is on its way is not merged with
    assert engine.store.check() == []
    disk.is_held = False
    engine.store.run_until_idle(10.0)
    assert (patient.is_ready, patient.num_cached) == (True, 3)
    assert disk.inner.num_reads - num_reads == 2
    for lease in (instead, patient):
        engine.check_content(lease, A + B + C)
        engine.store.release(lease)


def test_who_gives_up_does_not_wait_for_the_head_of_a_block_again(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk, config=StoreConfig(min_partial_tokens=2))
    engine.run(A + END)
    engine.store.flush()
    engine.store.reset()
    lookup = engine.look_up([1, 1, 1, 5, 5, *END])
    disk.is_held = True
    lease = engine.store.reserve(lookup, 6)
    assert lease.partial is not None
    engine.store.give_up(lease)
    engine.store.release(lease)
    lease = engine.store.reserve(lookup, 6)
    assert (lease.is_ready, lease.partial) == (True, None)
    engine.store.release(lease)
    disk.is_held = False


class UnreadableHost(HostCopier):
    """Copies from host memory fail while ``is_broken``."""

    is_broken = False

    async def copy_in(self, *arguments):
        if self.is_broken:
            raise OSError("host memory does not answer")
        await super().copy_in(*arguments)


def test_the_head_of_a_block_that_host_does_not_give_is_not_asked_for_again(make_engine):
    """It used to be asked for, in vain, for ever."""
    device = HostPool(5, LAYOUT.block_bytes)
    copier = UnreadableHost(device)
    config = StoreConfig(min_partial_tokens=2)
    engine = make_engine(device=device, copier=copier, host_blocks=8, config=config)
    engine.run(A + END)
    engine.run([*FILL, *B])
    assert sources(engine.look_up(A + END)) == ["host"]
    copier.is_broken = True
    lookup = engine.look_up([1, 1, 1, 5, 5, *END])
    lease = engine.reserve(lookup, 6)
    assert lease.partial is not None
    engine.store.run_until_idle(10.0)
    assert lease.is_provisional
    engine.store.release(lease)
    lease = engine.store.reserve(lookup, 6)
    assert (lease.is_ready, lease.partial) == (True, None)
    engine.store.release(lease)


def test_a_copy_that_failed_goes_while_the_block_is_written_from_host(make_engine):
    device = HostPool(5, LAYOUT.block_bytes)
    copier, disk = UnreadableHost(device), FaultyDisk(MemoryDisk())
    engine = make_engine(device=device, copier=copier, host_blocks=8, disk=disk)
    engine.run(A + END)
    slot = engine.store.index.find(engine.look_up(A + END).ref(0))
    engine.store._evictor._copy_to_host([slot])
    while engine.store.index.host[slot] == -1:
        engine.store.run_until_idle(1.0)
    engine.store.reset(TierName.DEVICE)
    lookup = engine.look_up(A + END)
    disk.is_held = copier.is_broken = True
    engine.store.urge()
    engine.store.poll()
    lease = engine.store.reserve(lookup, 5)
    while not lease.is_ready:
        engine.store.poll()
    engine.store.release(lease)
    assert engine.store.check() == []
    disk.is_held = False
    assert engine.store.flush(10.0)
    assert list(disk.inner.blocks) == lookup.keys


def test_a_request_does_not_push_its_own_blocks_out_of_host(make_engine):
    """The victims of a prefix that came back displaced what host held of it: the oldest there."""
    engine = make_engine(5, host_blocks=5)
    other = [20 + i // 4 for i in range(16)]
    engine.run(A + B + C + [4] * 4 + END)
    engine.run(other + END)
    assert sources(engine.run(A + B + C + [4] * 4 + END)) == ["host"] * 4
    assert engine.store.stats().promoted_blocks == {"host": 4}


def test_a_priority_does_not_pass_to_the_next_block_of_a_slot(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(5, disk=disk)
    engine.run(A + END)
    engine.store.flush()
    engine.store.reset()
    disk.fail_reads = lambda ref: CorruptBlockError("bad", reason="payload")
    lease = engine.store.reserve(engine.look_up(A + END), 5)
    engine.store.run_until_idle(10.0)
    engine.store.prefer(lease, 1)
    engine.store.release(lease)
    engine.run(B + END)  # in the slot that was A's
    engine.run(C + END)
    engine.run([7] * 4 + [8] * 4 + [6] * 4 + END)
    assert sources(engine.look_up_memory(B + END)) == []
    assert sources(engine.look_up_memory(C + END)) == ["device"]


def test_a_load_nobody_waits_for_any_more_still_owns_its_block(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, disk=disk)
    engine.run(A + B + END)
    engine.store.flush()
    engine.store.reset()
    lookup = engine.look_up(A + B + END)
    disk.is_held = True
    engine.store.release(engine.store.reserve(lookup, 9))
    with pytest.raises(OutOfBlocksError):
        engine.store.reserve(engine.look_up_memory(C + [4] * 4 + [5] * 4 + END), 13)
    assert engine.store.check() == []
    disk.is_held = False
    engine.store.run_until_idle(10.0)
    assert sources(engine.run(A + B + END)) == ["device", "device"]


def test_requests_in_promotion_hold_at_most_half_the_device(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(12, disk=disk)
    prompts = [[base + i // 4 for i in range(16)] + END for base in (10, 20, 30)]
    for prompt in prompts:
        engine.run(prompt)
    engine.store.flush()
    engine.store.reset()
    lookups = [engine.look_up(prompt) for prompt in prompts]
    disk.is_held = True
    first = engine.store.reserve(lookups[0], 17)
    with pytest.raises(OutOfBlocksError):
        engine.store.reserve(lookups[1], 17)
    disk.is_held = False
    engine.store.run_until_idle(10.0)
    second = engine.store.reserve(lookups[1], 17)
    for lease in (first, second):
        engine.store.release(lease)


def test_the_same_block_computed_twice_is_kept_once(make_engine):
    engine = make_engine()
    leases = [engine.start(A + END) for _ in range(2)]
    for lease in leases:
        engine.compute(lease, A + END)
    assert leases[0].block_ids[0] == leases[1].block_ids[0]
    assert engine.store.stats().merged_blocks == 1
    for lease in leases:
        engine.store.release(lease)


def test_salts_and_namespaces_do_not_share(make_engine):
    disk = MemoryDisk()
    engine = make_engine(disk=disk)
    engine.run(A + END, salt="a")
    assert sources(engine.run(A + END, salt="b")) == []
    assert sources(engine.run(A + END)) == []
    assert sources(engine.run(A + END, salt="a")) == ["device"]
    engine.store.flush()
    other = make_engine(disk=disk, namespace="other model")
    assert sources(other.run(A + END, salt="a")) == []


def test_a_broken_disk_is_left_out_and_says_why(make_engine, caplog):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, disk=disk)
    engine.run(A + END)
    disk.is_broken = True
    for prompt in (B, C, A, B):
        engine.run(prompt + [4] * 4 + END)
    assert engine.store.stats().tiers["disk"].state == "off"
    assert engine.store.stats().tiers["disk"].reason == "the disk is gone"
    assert engine.store.stats().dirty_blocks == 0
    assert [record.message for record in caplog.records].count(
        "disk tier is off: the disk is gone"
    ) == 1


def test_a_full_disk_costs_the_copy_and_not_the_request(make_engine):
    engine = make_engine(4, disk=MemoryDisk(capacity=1))
    for prompt in (A, B, C):
        engine.run(prompt + [4] * 4 + END)
    engine.store.flush(10.0)
    assert engine.store.is_clean
    assert engine.store.stats().written.unwritten_blocks > 0


def test_reset_skips_what_is_in_use(make_engine):
    engine = make_engine(host_blocks=8)
    engine.run(B + END)
    held = engine.start(A + END)
    engine.compute(held, A + END)
    assert engine.store.reset() == 1
    assert sources(engine.look_up(B + END)) == []
    assert sources(engine.look_up(A + END)) == ["device"]
    engine.store.release(held)


def test_what_outlives_a_cleared_disk_is_written_again(make_engine):
    """A pinned document used to be cached in memory only, while flush said all was written."""
    disk = MemoryDisk()
    engine = make_engine(disk=disk)
    engine.run(A + B + END)
    engine.store.flush()
    with engine.store.pin(engine.look_up(A + B + END, peek=True)):
        assert engine.store.reset() == 2
        engine.store.clear_disk("", lambda kept: None)
        engine.store.run_until_idle(10.0)
        engine.store.flush()
        assert len(disk.blocks) == 2


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_disk_that_cannot_be_cleared_says_so(make_engine, tmp_path, is_locked):
    """It used to say that nothing stayed, and that all had been cleared."""
    directory = tmp_path / "cache"
    first = make_engine(disk=LmdbTier(DiskStore.open(directory, capacity_bytes=1 << 20)))
    first.run(A + B + END)
    first.store.close()
    config = StoreConfig(disk_mode="rw" if is_locked else "ro")
    disk = DiskStore.open(directory, config=config, lock_timeout_s=0.0)
    engine = make_engine(disk=LmdbTier(disk), config=config)
    other = Attachment(directory, "other")
    if is_locked:
        assert other.try_writer_lock()
    outcomes, events = [], []
    engine.store.events.subscribe(events.extend)
    engine.store.clear_disk("", outcomes.append)
    engine.store.forget(engine.look_up(A + B + END), b"", outcomes.append)
    engine.store.run_until_idle(10.0)
    other.detach()
    assert [type(outcome) for outcome in outcomes] == [TierBrokenError] * 2
    assert ("is being written" if is_locked else "disk_mode='ro'") in str(outcomes[0])
    assert not any(isinstance(event, AllBlocksCleared) for event in events)
    assert sources(engine.look_up(A + B + END)) == ["disk", "disk"]


def test_load_policy_never_uses_the_device_only(make_engine):
    disk = MemoryDisk()
    make_engine(disk=disk).run(A + END)
    engine = make_engine(4, disk=disk, host_blocks=4, config=StoreConfig(load_policy="never"))
    engine.run(A + B + END)
    engine.run(FILL)
    lease = engine.start(A + B + END)
    assert lease.num_cached == 0
    engine.store.release(lease)


def test_a_closed_store_and_another_thread_are_refused(make_engine):
    engine = make_engine()
    failures = []

    def use():
        try:
            engine.store.poll()
        except AssertionError as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(failures) == 1
    engine.store.close()
    engine.store.close()
    with pytest.raises(StoreClosedError):
        engine.store.poll()


def test_reading_stats_changes_nothing(make_engine):
    engine = make_engine(host_blocks=4, disk=MemoryDisk())
    engine.run(A + END)
    engine.store.flush()
    assert engine.store.stats() == engine.store.stats()


def test_hits_misses_and_residents_add_up(make_engine):
    engine = make_engine(6, host_blocks=6, disk=MemoryDisk())
    for prompt in (A, B, C, A, B, C):
        engine.run(prompt + [4] * 4 + END)
    stats = engine.store.stats()
    hits = sum(tier.hits for tier in stats.tiers.values())
    assert stats.looked_up_blocks == 12
    assert 0 < hits <= 12
    device = stats.tiers["device"]
    assert device.used_bytes == device.used_blocks * engine.store.layout.block_bytes


@pytest.mark.parametrize(("policy", "survives"), [("lru", 0), ("slru", 4), ("s3-fifo", 4)])
def test_a_giant_document_read_once_wipes_out_the_hot_set_of_lru_only(
    make_engine, policy, survives
):
    engine = make_engine(24, config=StoreConfig(policy=policy))
    hot = [token for block in range(4) for token in [block] * 4]
    for _ in range(3):
        engine.run(hot + END)
    for part in range(5):
        engine.run([100 + part] * 4 * 10 + END)
    assert len(engine.look_up(hot + END).sources) == survives


def test_requests_that_compete_for_room_to_promote_are_all_served(make_engine):
    """None holds blocks while it waits for another's: reserved together or not at all."""
    engine = make_engine(12, disk=FaultyDisk(MemoryDisk()))
    prompts = [[number] * 4 * 5 + END for number in range(8)]
    for prompt in prompts:
        engine.run(prompt)
    engine.store.flush(10.0)
    engine.store.reset()
    waiting = [(prompt, engine.look_up(prompt)) for prompt in prompts]
    running, refusals = [], 0
    for _ in range(len(prompts)):  # each round serves at least one
        for prompt, lookup in list(waiting):
            try:
                running.append((prompt, engine.store.reserve(lookup, len(prompt))))
                waiting.remove((prompt, lookup))
            except OutOfBlocksError:
                refusals += 1
        assert running or not waiting
        engine.store.run_until_idle(10.0)
        for prompt, lease in running:
            engine.check_cached(lease, prompt)
            engine.store.release(lease)
        running.clear()
    assert not waiting
    assert refusals > 0
