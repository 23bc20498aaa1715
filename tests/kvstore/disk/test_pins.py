"""Pins on disk: what they hold, for how long, against whom, and what they count."""

import math
import os
import signal
from pathlib import Path

import lmdb
import pytest
from disk_case import (
    IDENTITY,
    NAMESPACE,
    Blocks,
    Child,
    FakeClock,
    damage_payload,
    in_fork,
    problems_on_disk,
    raw_records,
    small,
)

from kvstore.block import BlockRef, PutOutcome, Removal
from kvstore.disk import DiskStore
from kvstore.disk.offline.carry import export_documents, import_documents
from kvstore.disk.offline.compact import compact
from kvstore.disk.offline.evict import evict
from kvstore.disk.offline.summary import list_blocks, summarize
from kvstore.disk.offline.unpin import unpin
from kvstore.disk.offline.verify import verify
from kvstore.errors import CapacityError, CorruptBlockError, TierBrokenError

CAPACITY = 2 << 20


@pytest.fixture
def store(directory: Path, clock: FakeClock):
    """Room for about 80 blocks."""
    config = small(touch_interval_s=0)
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=config, clock=clock) as opened:
        opened.register_namespace(NAMESPACE, IDENTITY)
        yield opened
    assert problems_on_disk(directory) == []


def keys(refs: list[BlockRef]) -> list[bytes]:
    return [ref.key for ref in refs]


def put(store: DiskStore, blocks: Blocks, num_blocks: int, start: int | None = None):
    refs = blocks.chain(num_blocks, start=start)
    assert PutOutcome.ORPHAN not in store.put_group(blocks.writes(refs))
    return refs


def churn(store: DiskStore, blocks: Blocks) -> None:
    """Twice as many blocks as there is room for."""
    evicted = store.stats().evictions
    for _ in range(20):
        put(store, blocks, 8)
    assert store.stats().evictions > evicted


def num_present(store: DiskStore, refs: list[BlockRef]) -> int:
    return len(store.probe(refs))


# --- what they hold -------------------------------------------------------------------------------


def test_pinned_sequence_is_not_evicted_and_the_rest_is(store: DiskStore, blocks: Blocks) -> None:
    pinned, other = put(store, blocks, 6), put(store, blocks, 6)
    assert store.pin(keys(pinned)) == []
    assert store.stats().pinned_blocks == 6
    churn(store, blocks)
    assert num_present(store, pinned) == 6
    assert num_present(store, other) == 0


def test_what_continues_a_pinned_block_may_go(store: DiskStore, blocks: Blocks) -> None:
    pinned = put(store, blocks, 3)
    below = blocks.below(pinned[-1], 3, start=9)
    store.put_group(blocks.writes(below))
    store.pin(keys(pinned))
    churn(store, blocks)
    assert num_present(store, [*pinned, *below]) == 3


def test_released_sequence_is_as_old_as_its_last_use(store: DiskStore, blocks: Blocks) -> None:
    pinned, used = put(store, blocks, 3), put(store, blocks, 16)
    store.pin(keys(pinned))
    store.touch(keys(used)[::-1])
    assert store.unpin(pinned[-1].key)
    assert store.stats().pinned_blocks == 0
    while num_present(store, pinned) == 3:
        put(store, blocks, 1)
    assert num_present(store, pinned) == 0
    assert num_present(store, used) > 8  # several blocks go at once
    assert not store.unpin(pinned[-1].key)


def test_a_shared_prefix_is_pinned_until_its_last_pin_goes(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    trunk = put(store, blocks, 3)
    one, other = (blocks.below(trunk[-1], 2, start) for start in (1, 2))
    store.put_group(blocks.writes([*one, *other]))
    store.pin(keys([*trunk, *one]))
    store.pin(keys([*trunk, *other]))
    store.pin(keys(trunk))
    assert store.stats().pinned_blocks == 7
    store.unpin(one[-1].key)
    assert store.stats().pinned_blocks == 5
    churn(store, blocks)
    assert num_present(store, [*trunk, *other]) == 5
    assert num_present(store, one) == 0
    store.unpin(other[-1].key)
    assert store.stats().pinned_blocks == 3


def test_a_pin_is_all_or_nothing(store: DiskStore, blocks: Blocks) -> None:
    refs = put(store, blocks, 4)
    store.remove([refs[3].key])
    assert store.pin(keys(refs)) == [refs[3].key]
    assert store.stats().pinned_blocks == 0


def test_a_use_and_what_is_put_below_do_not_end_a_pin(store: DiskStore, blocks: Blocks) -> None:
    pinned = put(store, blocks, 3)
    store.pin(keys(pinned))
    below = blocks.below(pinned[-1], 2, start=9)
    store.put_group(blocks.writes(below))
    store.touch(keys(below)[::-1] + keys(pinned)[::-1])
    store.remove(keys(below))
    churn(store, blocks)
    assert num_present(store, pinned) == 3


def test_another_process_spares_what_this_one_pinned(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    pinned = put(store, blocks, 4, start=5)
    store.pin(keys(pinned))
    code = """
    with DiskStore.open(sys.argv[1], config=small()) as store:
        blocks = Blocks()
        blocks.chain(1)
        for _ in range(40):
            store.put_group(blocks.writes(blocks.chain(4)))
        say(store.stats().evictions, store.unpin(blocks.chain(4, start=5)[-1].key))
    """
    with Child(code, directory) as child:
        evictions, has_released = child.hear().split()
        assert child.end() == 0
    assert int(evictions) > 40
    assert has_released == "True"
    assert num_present(store, pinned) == 4
    assert store.stats().pinned_blocks == 0


# --- for how long ---------------------------------------------------------------------------------


def test_a_pin_with_a_time_ends_and_stops_counting(
    store: DiskStore, blocks: Blocks, clock: FakeClock
) -> None:
    pinned = put(store, blocks, 5)
    store.pin(keys(pinned), ttl_s=10.0)
    store.pin(keys(pinned[:2]), ttl_s=20.0)
    clock.now += 9.9
    churn(store, blocks)
    assert num_present(store, pinned) == 5
    clock.now += 0.1
    churn(store, blocks)
    assert num_present(store, pinned) == 2
    assert store.stats().pinned_blocks == 2


@pytest.mark.parametrize(
    ("first", "second"), [(10.0, 100.0), (100.0, 10.0), (None, 10.0), (10.0, None)]
)
def test_of_two_pins_of_one_sequence_the_later_end_counts(
    store: DiskStore,
    blocks: Blocks,
    clock: FakeClock,
    directory: Path,
    first: float | None,
    second: float | None,
) -> None:
    refs = put(store, blocks, 2)
    store.pin(keys(refs), ttl_s=first)
    store.pin(keys(refs), ttl_s=second)
    (row,) = [row for row in list_blocks(directory) if row["depth"] == 1]
    is_endless = first is None or second is None
    assert row["pinned_until"] == (math.inf if is_endless else clock.now + 100.0)
    clock.now += 1_000.0
    churn(store, blocks)
    assert num_present(store, refs) == (2 if is_endless else 0)


def test_a_pin_that_has_ended_is_not_counted_although_nobody_has_written_since(
    store: DiskStore, blocks: Blocks, clock: FakeClock
) -> None:
    refs = put(store, blocks, 5)
    store.pin(keys(refs), ttl_s=10.0)
    store.pin(keys(refs[:2]), ttl_s=20.0)
    counts = []
    for seconds in (9.0, 1.0, 10.0):
        clock.now += seconds
        counts += [store.stats().pinned_blocks] * 2
    assert counts == [5, 5, 2, 2, 0, 0]
    put(store, blocks, 1)  # forgets them
    assert store.stats().pinned_blocks == 0


ONE, OTHER = b"hold one", b"hold two"


@pytest.mark.parametrize("first", [None, 10.0, 1000.0])
def test_releasing_a_hold_leaves_the_others_with_their_own_end(
    store: DiskStore, blocks: Blocks, clock: FakeClock, directory: Path, first: float | None
) -> None:
    refs = put(store, blocks, 3)
    trunk, last = keys(refs[:2]), refs[-1].key
    store.pin(keys(refs), ttl_s=first, hold=ONE)
    ends = [row["pinned_until"] for row in list_blocks(directory)]
    store.pin(keys(refs), ttl_s=100.0, hold=OTHER)
    store.pin(trunk)  # changes no hold of what continues it, nor is changed by it
    assert store.release(last, OTHER)
    assert not store.release(last, OTHER)
    assert store.stats().pinned_blocks == 3
    assert store.unpin(trunk[-1])
    assert [row["pinned_until"] for row in list_blocks(directory)] == ends
    assert store.release(last, ONE)
    assert store.stats().pinned_blocks == 0
    assert not store.release(last, ONE)


def test_unpinning_ends_every_hold_and_a_later_one_is_not_released_by_theirs(
    store: DiskStore, blocks: Blocks, clock: FakeClock
) -> None:
    refs = put(store, blocks, 2)
    for hold in (ONE, OTHER):
        store.pin(keys(refs), hold=hold)
    assert store.unpin(refs[-1].key)
    assert store.stats().pinned_blocks == 0
    store.pin(keys(refs), ttl_s=5.0, hold=b"a third!")
    assert not store.release(refs[-1].key, ONE)
    assert store.stats().pinned_blocks == 2


def test_holds_beyond_those_that_are_told_apart_stay_until_they_are_unpinned(
    store: DiskStore, blocks: Blocks
) -> None:
    refs = put(store, blocks, 1)
    names = [b"hold %03d" % i for i in range(70)]
    for name in names:
        store.pin(keys(refs), hold=name)
    assert [store.release(refs[0].key, name) for name in names].count(True) == 64
    assert store.stats().pinned_blocks == 1
    assert store.unpin(refs[0].key)


def test_pins_outlive_the_process_and_its_being_killed(directory: Path) -> None:
    blocks = Blocks()
    pinned, timed = blocks.chain(4, start=1), blocks.chain(4, start=2)
    clock = FakeClock()

    def pin_and_die() -> int:
        store = DiskStore.open(directory, capacity_bytes=CAPACITY, config=small(), clock=clock)
        store.put_group(blocks.writes([*pinned, *timed]))
        store.pin(keys(pinned))
        store.pin(keys(timed), ttl_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_fork(pin_and_die) == -signal.SIGKILL
    assert problems_on_disk(directory) == []
    with DiskStore.open(directory, config=small(), clock=clock) as store:
        assert store.stats().pinned_blocks == 8
        churn(store, blocks)
        assert (num_present(store, pinned), num_present(store, timed)) == (4, 4)
        clock.now += 61.0
        churn(store, blocks)
        assert (num_present(store, pinned), num_present(store, timed)) == (4, 0)
    assert problems_on_disk(directory) == []


# --- how much -------------------------------------------------------------------------------------


def test_more_than_half_of_the_capacity_is_refused_and_changes_nothing(
    store: DiskStore, blocks: Blocks, clock: FakeClock
) -> None:
    most = CAPACITY // 2 // (5 * 4096)  # 20,000 bytes take five pages
    pinned = [put(store, blocks, 10) for _ in range(most // 10)]
    for refs in pinned:
        assert store.pin(keys(refs), ttl_s=100.0) == []
    more = put(store, blocks, 10)
    with pytest.raises(CapacityError, match=r"at most half may be pinned: raise disk_cache_size"):
        store.pin(keys(more))
    assert store.stats().pinned_blocks == 10 * len(pinned)
    assert store.pin(keys(more[: most % 10])) == []
    assert store.stats().pinned_blocks == most
    clock.now += 101.0
    assert store.pin(keys(more)) == []  # those that have ended do not count
    assert store.stats().pinned_blocks == 10


def test_half_full_of_pins_there_is_still_room_for_others(store: DiskStore, blocks: Blocks) -> None:
    pinned = [put(store, blocks, 5) for _ in range(10)]
    for refs in pinned:
        store.pin(keys(refs))
    for _ in range(60):
        refs = blocks.chain(4)
        assert set(store.put_group(blocks.writes(refs))) == {PutOutcome.STORED}
    assert all(num_present(store, refs) == 5 for refs in pinned)


def test_a_quota_does_not_evict_what_is_pinned(directory: Path, blocks: Blocks) -> None:
    config = small(namespace_quota="500KiB")
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=config) as store:
        pinned = put(store, blocks, 10)
        store.pin(keys(pinned))
        for _ in range(10):
            put(store, blocks, 8)
        assert num_present(store, pinned) == 10
        assert store.stats().used_bytes < 512 << 10
    assert problems_on_disk(directory) == []


# --- what others do with them ---------------------------------------------------------------------


def test_removing_and_clearing_spare_pinned_blocks(store: DiskStore, blocks: Blocks) -> None:
    pinned = put(store, blocks, 3)
    below = blocks.below(pinned[-1], 2, start=9)
    store.put_group(blocks.writes(below))
    store.pin(keys(pinned))
    assert store.remove([*keys(pinned), below[-1].key]) == Removal(1, 3)
    assert store.clear(pinned[0].parent) == Removal(1, 3)
    assert num_present(store, pinned) == 3
    assert store.unpin(pinned[-1].key)
    assert store.remove(keys(pinned)) == Removal(3, 0)


def test_operator_must_unpin_or_insist_to_remove_a_pinned_document(directory: Path) -> None:
    blocks = Blocks()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        pinned, other = put(store, blocks, 3), put(store, blocks, 2)
        store.pin(keys(pinned))
        store.pin(keys(other), ttl_s=1e-6)
    name = pinned[1].key.hex()
    assert summarize(directory)["pinned_blocks"] == 3
    (namespace,) = summarize(directory)["namespaces"]
    assert namespace["pinned_blocks"] == 3
    assert sum(row["is_pinned"] for row in list_blocks(directory)) == 3
    assert went(evict(directory, document=name)) == (0, 3)
    assert went(evict(directory, to_bytes=0, dry_run=True)) == (2, 3)
    assert went(evict(directory, namespace="test/tiny")) == (2, 3)
    assert summarize(directory)["blocks"] == 3
    assert unpin(directory, document=name, dry_run=True)["pins"] == 1
    assert unpin(directory, namespace="test/tiny", document=name)["pins"] == 1
    assert unpin(directory)["pins"] == 0
    assert summarize(directory)["pinned_blocks"] == 0
    with DiskStore.open(directory, config=small()) as store:
        store.pin(keys(pinned))
    assert went(evict(directory, document=name, with_pinned=True, dry_run=True)) == (3, 0)
    assert went(evict(directory, document=name, with_pinned=True)) == (3, 0)
    assert summarize(directory)["blocks"] == summarize(directory)["pinned_blocks"] == 0
    assert problems_on_disk(directory) == []


def went(found: dict) -> tuple[int, int]:
    return found["blocks"], found["pinned_blocks"]


def test_compacting_keeps_pins_and_an_export_does_not_carry_them(
    directory: Path, tmp_path: Path
) -> None:
    blocks = Blocks()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:
        pinned = put(store, blocks, 3)
        store.pin(keys(pinned))
    compact(directory)
    assert summarize(directory)["pinned_blocks"] == 3
    export_documents(directory, tmp_path / "file")
    import_documents(tmp_path / "other", tmp_path / "file")
    assert summarize(tmp_path / "other")["pinned_blocks"] == 0
    assert import_documents(directory, tmp_path / "file")["present"] == 3
    assert summarize(directory)["pinned_blocks"] == 3
    assert problems_on_disk(directory) == []


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [1, 3])
def test_bad_pinned_block_keeps_its_pin_until_it_is_put_anew(directory: Path, which: int) -> None:
    blocks = Blocks()
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:
        store.put_group(blocks.writes(refs))
        store.pin(keys(refs))
    damage_payload(directory, blocks.payload(refs[which]))
    with DiskStore.open(directory, config=small()) as store:
        with pytest.raises(CorruptBlockError):
            blocks.read(store, refs[which])
        churn(store, blocks)
        assert num_present(store, refs) == which
        store.put_group(blocks.writes(refs))
        churn(store, blocks)
        assert num_present(store, refs) == 4
    assert problems_on_disk(directory) == []


def test_bad_block_goes_with_its_pin(store: DiskStore, blocks: Blocks, directory: Path) -> None:
    refs = put(store, blocks, 3)
    store.pin(keys(refs))
    record = raw_records_of(store, directory, refs[2])
    assert store.repair([(refs[2], record)], rebuild=False)
    assert store.stats().bad_blocks == 1
    assert store.unpin(refs[2].key)
    assert store.stats().bad_blocks == 0
    assert num_present(store, refs) == 2


def raw_records_of(store: DiskStore, directory: Path, ref: BlockRef):
    from kvstore.disk import schema

    with store._env.read() as txn:
        return schema.decode_record(ref.key, txn.get(ref.key, db=store._env.index))


def test_rebuilding_keeps_pins_and_verify_finds_what_is_wrong_with_them(directory: Path) -> None:
    blocks = Blocks()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:
        trunk = put(store, blocks, 3)
        branch = blocks.below(trunk[1], 2, start=9)
        store.put_group(blocks.writes(branch))
        store.pin(keys(trunk))
        store.pin(keys([*trunk[:2], *branch]), ttl_s=1e6)
    assert verify(directory)["ok"]
    env = lmdb.open(str(directory), max_dbs=6)
    with env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn, create=False)
        cursor = txn.cursor(db=meta)
        assert cursor.set_range(b"pin/")
        assert cursor.delete()
    env.close()
    found = verify(directory, fix=True)
    assert [each["reason"] for each in found["corrupt"]] == ["pins"]
    assert found["fixed"] == 1
    assert verify(directory)["ok"]
    assert problems_on_disk(directory) == []
    assert summarize(directory)["pinned_blocks"] == 5


def test_a_directory_without_pins_is_as_it_was_before_there_were_any(directory: Path) -> None:
    """An older program reads it, and this one read the older one's."""
    blocks = Blocks()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:
        refs = put(store, blocks, 2)
        store.pin(keys(refs))
        store.unpin(refs[-1].key)
    lengths = {record["length"] for record in raw_records(directory).values()}
    with DiskStore.open(directory.with_name("other"), config=small()) as store:
        put(store, blocks, 2)
    assert lengths == {row["length"] for row in raw_records(directory.with_name("other")).values()}


def test_read_only_store_cannot_pin(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, config=small()) as store:
        refs = put(store, blocks, 1)
    with DiskStore.open(directory, config=small(disk_mode="ro")) as store:
        with pytest.raises(TierBrokenError, match="opened with disk_mode='ro'"):
            store.pin(keys(refs))
        assert not store.unpin(refs[0].key)


def test_pins_that_end_when_the_map_is_full_do_not_keep_it_full(
    directory: Path, clock: FakeClock
) -> None:
    """Releasing a pin rewrites the records of its whole sequence, in a transaction that would
    otherwise make room: with blocks smaller than their records nothing was stored any more."""
    blocks = Blocks(payload_bytes=300)
    with DiskStore.open(directory, capacity_bytes=2 << 20, config=small(), clock=clock) as store:
        for _ in range(4):
            assert store.pin(keys(put(store, blocks, 50)), ttl_s=10.0) == []
        for _ in range(35):
            store.put_group(blocks.writes(blocks.chain(40)))
        clock.now += 11.0
        for _ in range(10):
            newest = blocks.chain(40)
            store.put_group(blocks.writes(newest))
        assert num_present(store, newest) == 40
        assert store.stats().pinned_blocks == 0
    assert problems_on_disk(directory) == []
