"""What a block's life on disk looks like to the tier above: put, found, read, evicted."""

from pathlib import Path

import pytest
from disk_case import (
    IDENTITY,
    NAMESPACE,
    Blocks,
    FakeClock,
    damage_payload,
    problems_on_disk,
    small,
)

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.disk import DiskStore
from kvstore.errors import BlockMissingError, CorruptBlockError, StoreClosedError

STORED, PRESENT, ORPHAN, FULL = PutOutcome


def test_block_comes_back_byte_identical(store: DiskStore, blocks: Blocks) -> None:
    refs = blocks.chain(5)
    assert store.put_group(blocks.writes(refs)) == [STORED] * 5
    assert [entry.key for entry in store.probe(refs)] == [ref.key for ref in refs]
    assert all(blocks.read(store, ref) == blocks.payload(ref) for ref in refs)


def test_block_comes_back_after_reopening_without_a_scan(directory: Path, blocks: Blocks) -> None:
    refs = blocks.chain(5)
    with DiskStore.open(directory, capacity_bytes=32 << 20) as store:
        store.put_group(blocks.writes(refs))
        before = store.stats()
    with DiskStore.open(directory) as store:
        after = store.stats()
        assert after.blocks == before.blocks == 5
        assert after.used_bytes == before.used_bytes
        assert after.capacity_bytes == 32 << 20
        assert blocks.read(store, refs[4]) == blocks.payload(refs[4])
    assert problems_on_disk(directory) == []


def test_probe_stops_at_the_first_hole(store: DiskStore, blocks: Blocks) -> None:
    refs = blocks.chain(6)
    store.put_group(blocks.writes(refs))
    store.remove([refs[3].key])
    assert len(store.probe(refs)) == 3


def test_probe_tells_sizes_on_disk_and_decoded(store: DiskStore, blocks: Blocks) -> None:
    refs = blocks.chain(1)
    store.put_group(blocks.writes(refs))
    (entry,) = store.probe(refs)
    assert (entry.nbytes, entry.payload_bytes, entry.codec) == (20_000, 20_000, "raw")


def test_block_without_its_parent_is_an_orphan(store: DiskStore, blocks: Blocks) -> None:
    refs = blocks.chain(3)
    assert store.put_group(blocks.writes(refs[1:])) == [ORPHAN, ORPHAN]
    assert store.stats().blocks == 0


def test_second_put_of_a_block_is_present_and_changes_nothing(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(3)
    store.put_group(blocks.writes(refs))
    before = store.stats()
    assert store.put_group(blocks.writes(refs)) == [PRESENT] * 3
    assert store.stats() == before


def test_block_twice_in_one_group_is_stored_once(store: DiskStore, blocks: Blocks) -> None:
    (ref,) = blocks.chain(1)
    store.put_group(blocks.writes([ref, ref]))
    assert store.stats().blocks == 1


def test_missing_block_is_an_error_to_read(store: DiskStore, blocks: Blocks) -> None:
    with pytest.raises(BlockMissingError):
        blocks.read(store, blocks.chain(1)[0])


def test_other_tokens_under_the_same_key_are_never_served(store: DiskStore, blocks: Blocks) -> None:
    (ref,) = blocks.chain(1)
    store.put_group(blocks.writes([ref]))
    forged = BlockRef(ref.key, ref.parent, ref.tokens[::-1], ref.depth)
    assert store.probe([forged]) == []
    with pytest.raises(CorruptBlockError) as caught:
        blocks.read(store, forged)
    assert caught.value.reason == "tokens"
    store.flush()
    assert blocks.read(store, ref) == blocks.payload(ref)  # nothing is wrong with the block itself


def test_wrong_destination_size_is_refused_and_the_block_survives(
    store: DiskStore, blocks: Blocks
) -> None:
    (ref,) = blocks.chain(1)
    store.put_group(blocks.writes([ref]))
    with pytest.raises(CorruptBlockError) as caught:
        store.read_into(ref, memoryview(bytearray(7)))
    assert caught.value.reason == "size"
    store.flush()
    assert blocks.read(store, ref) == blocks.payload(ref)


def test_salts_and_namespaces_are_counted_apart(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    other = Blocks(namespace=b"o" * 32)
    store.put_group(blocks.writes(blocks.chain(2)))
    store.put_group(blocks.writes(blocks.chain(3, salt="tenant"), salt=b"s" * 16))
    store.put_group(other.writes(other.chain(4)))
    assert store.stats().blocks == 9
    store.close()
    assert problems_on_disk(directory) == []


def test_children_lists_what_continues_a_block(store: DiskStore, blocks: Blocks) -> None:
    trunk = blocks.chain(1)
    branches = [blocks.below(trunk[0], 1, start)[0] for start in (100, 200, 300)]
    store.put_group(blocks.writes([*trunk, *branches]))
    assert sorted(ref.key for ref in store.children(trunk[0].key)) == sorted(
        ref.key for ref in branches
    )
    assert store.children(trunk[0].parent) == trunk
    assert len(store.children(trunk[0].key, limit=2)) == 2


def test_many_blocks_are_read_at_once_and_each_has_its_own_outcome(
    store: DiskStore, blocks: Blocks
) -> None:
    refs = blocks.chain(6)
    store.put_group(blocks.writes(refs))
    store.remove([refs[2].key])
    buffers = [bytearray(20_000) for _ in refs]
    buffers[4] = bytearray(7)
    outcomes = store.read_many(
        [(ref, memoryview(buffer)) for ref, buffer in zip(refs, buffers, strict=True)]
    )
    assert [type(outcome) for outcome in outcomes] == [
        type(None),
        type(None),
        BlockMissingError,
        type(None),
        CorruptBlockError,
        type(None),
    ]
    assert all(buffers[i] == blocks.payload(refs[i]) for i in (0, 1, 3, 5))


def test_removed_inner_block_is_a_hole_until_it_is_put_again(
    store: DiskStore, blocks: Blocks
) -> None:
    refs = blocks.chain(4)
    store.put_group(blocks.writes(refs))
    assert store.remove([refs[1].key]).num_blocks == 1
    assert len(store.probe(refs)) == 1
    assert store.stats().bad_blocks == 1
    assert store.put_group(blocks.writes(refs)) == [PRESENT, STORED, PRESENT, PRESENT]
    assert len(store.probe(refs)) == 4
    assert store.stats().bad_blocks == 0


def test_removing_a_whole_chain_leaves_nothing(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(6)
    store.put_group(blocks.writes(refs))
    store.remove([refs[2].key])
    assert store.remove([ref.key for ref in refs]).num_blocks == 5
    stats = store.stats()
    assert (stats.blocks, stats.bad_blocks, stats.used_bytes) == (0, 0, 0)
    store.close()
    assert problems_on_disk(directory) == []


def test_clear_drops_what_descends_from_a_seed_even_below_a_bad_block(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    mine, others = blocks.chain(5), blocks.chain(3, salt="other")
    store.put_group(blocks.writes(mine))
    store.put_group(blocks.writes(blocks.below(mine[1], 4, start=9)))
    store.put_group(blocks.writes(others))
    store.remove([mine[2].key])
    assert store.clear(mine[0].parent).num_blocks == 8
    assert store.clear(mine[0].parent).num_blocks == 0
    assert len(store.probe(others)) == 3
    store.close()
    assert problems_on_disk(directory) == []


# --- eviction -------------------------------------------------------------------------------------


def fill(
    store: DiskStore, blocks: Blocks, num_chains: int, length: int = 4
) -> list[list[BlockRef]]:
    chains = [blocks.chain(length) for _ in range(num_chains)]
    for chain in chains:
        store.put_group(blocks.writes(chain))
    return chains


def num_present(store: DiskStore, chain: list[BlockRef]) -> int:
    return len(store.probe(chain))


def test_least_recently_put_goes_first_and_the_file_stays_within_capacity(
    directory: Path, blocks: Blocks
) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()) as store:
        chains = fill(store, blocks, 100)
        present = [num_present(store, chain) for chain in chains]
        assert present[0] == 0
        assert present[-1] == 4
        gone = [i for i, count in enumerate(present) if count == 0]
        assert gone == list(range(len(gone)))
        stats = store.stats()
        assert stats.evictions == 400 - stats.blocks
    assert (directory / "data.mdb").stat().st_size <= 4 << 20
    assert stats.file_bytes <= 4 << 20
    assert problems_on_disk(directory) == []


def test_leaves_are_evicted_before_their_parents(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()) as store:
        chains = fill(store, blocks, 8, length=40)
        for chain in chains:
            count = num_present(store, chain)
            assert all(not store.probe([ref]) for ref in chain[count:])
        assert any(0 < num_present(store, chain) < 40 for chain in chains)


def test_touched_chain_outlives_younger_ones(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small(), clock=clock) as store:
        chains = fill(store, blocks, 20)
        clock.now += 61
        store.touch([ref.key for ref in reversed(chains[0])])
        fill(store, blocks, 30)
        assert num_present(store, chains[0]) == 4
        assert num_present(store, chains[1]) == 0


def test_touch_within_the_interval_is_not_recorded(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small(), clock=clock) as store:
        chains = fill(store, blocks, 20)
        clock.now += 59
        store.touch([ref.key for ref in reversed(chains[0])])
        fill(store, blocks, 30)
        assert num_present(store, chains[0]) == 0


def test_touch_is_recorded_after_the_clock_went_backwards(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small(), clock=clock) as store:
        chains = fill(store, blocks, 20)
        clock.now -= 1_000_000
        store.touch([ref.key for ref in reversed(chains[0])])
        fill(store, blocks, 30)
        assert num_present(store, chains[0]) == 4


def test_order_of_victims_survives_a_restart(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small(), clock=clock) as store:
        chains = fill(store, blocks, 20)
        clock.now += 61
        store.touch([ref.key for ref in reversed(chains[0])])
    with DiskStore.open(directory, config=small()) as store:
        fill(store, blocks, 30)
        assert num_present(store, chains[0]) == 4
        assert num_present(store, chains[1]) == 0


def test_group_never_evicts_itself_or_its_parents(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()) as store:
        refs = blocks.chain(400)
        outcomes = [
            outcome
            for start in range(0, 400, 20)
            for outcome in store.put_group(blocks.writes(refs[start : start + 20]))
        ]
        stored = outcomes.index(FULL)
        assert stored > 100
        assert set(outcomes[:stored]) == {STORED}
        assert STORED not in outcomes[stored:]
        assert num_present(store, refs) == stored
    assert problems_on_disk(directory) == []


def test_group_larger_than_the_cache_keeps_its_head(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()) as store:
        refs = blocks.chain(400)
        outcomes = store.put_group(blocks.writes(refs))
        stored = num_present(store, refs)
        assert stored > 100
        assert outcomes == [STORED] * stored + [FULL] * (400 - stored)


def test_block_too_large_for_the_cache_evicts_nothing(directory: Path, blocks: Blocks) -> None:
    large = Blocks(payload_bytes=5 << 20)
    with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()) as store:
        fill(store, blocks, 10)
        before = store.stats()
        assert store.put_group(large.writes(large.chain(1, start=1))) == [FULL]
        assert store.stats() == before


def test_quota_of_a_namespace_takes_from_that_namespace_only(
    directory: Path, blocks: Blocks
) -> None:
    other = Blocks(namespace=b"o" * 32)
    config = small(namespace_quota="1MiB")
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=config) as store:
        kept = fill(store, blocks, 5)
        fill(store, other, 100)
        assert all(num_present(store, chain) == 4 for chain in kept)
        assert 30 < store.stats().blocks - 20 <= (1 << 20) // 20_000
    assert problems_on_disk(directory) == []


def test_quota_of_a_salt_takes_from_that_salt_only(directory: Path, blocks: Blocks) -> None:
    config = small(salt_quota="1MiB")
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=config) as store:
        kept = fill(store, blocks, 5)
        for _ in range(100):
            store.put_group(blocks.writes(blocks.chain(4, salt="loud"), salt=b"l" * 16))
        assert all(num_present(store, chain) == 4 for chain in kept)
        assert 30 < store.stats().blocks - 20 <= (1 << 20) // 20_000
    assert problems_on_disk(directory) == []


# --- bad blocks -----------------------------------------------------------------------------------


def test_flipped_bit_is_a_miss_then_put_anew_and_its_children_come_back(
    directory: Path, blocks: Blocks
) -> None:
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    damage_payload(directory, blocks.payload(refs[1]))
    with DiskStore.open(directory) as store:
        with pytest.raises(CorruptBlockError) as caught:
            blocks.read(store, refs[1])
        assert caught.value.reason == "payload"
        store.flush()
        assert num_present(store, refs) == 1
        assert store.stats().corrupt == {"payload": 1}
        assert store.put_group(blocks.writes(refs)) == [PRESENT, STORED, PRESENT, PRESENT]
        assert all(blocks.read(store, ref) == blocks.payload(ref) for ref in refs)
    assert problems_on_disk(directory) == []


def test_bad_block_is_stored_in_the_very_group_that_brings_it_again(
    directory: Path, blocks: Blocks
) -> None:
    (ref,) = blocks.chain(1)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes([ref]))
    damage_payload(directory, blocks.payload(ref))
    with DiskStore.open(directory) as store:
        with pytest.raises(CorruptBlockError):
            blocks.read(store, ref)
        assert store.put_group(blocks.writes([ref])) == [STORED]
        assert blocks.read(store, ref) == blocks.payload(ref)


def test_damaged_record_is_a_miss_and_its_children_come_back_with_it(
    directory: Path, blocks: Blocks
) -> None:
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    file = directory / "data.mdb"
    data = file.read_bytes()
    with file.open("r+b") as opened:  # every copy of the tokens: pages are copied on write
        at = data.find(refs[1].tokens)
        while at >= 0:
            opened.seek(at)
            opened.write(bytes(4))
            at = data.find(refs[1].tokens, at + 1)
    with DiskStore.open(directory) as store:
        assert num_present(store, refs) == 1
        assert store.stats().corrupt == {"record": 1}
        assert store.put_group(blocks.writes(refs)) == [PRESENT, STORED, PRESENT, PRESENT]
        assert num_present(store, refs) == 4
    assert problems_on_disk(directory) == []


# --- settings and state ---------------------------------------------------------------------------


def test_closed_store_refuses(store: DiskStore, blocks: Blocks) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.probe(blocks.chain(1))
    with pytest.raises(StoreClosedError):
        store.put_group(blocks.writes(blocks.chain(1)))
    assert store.stats().state == "off"


def test_read_only_store_reads_and_never_writes(directory: Path, blocks: Blocks) -> None:
    refs = blocks.chain(3)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs[:2]))
    with DiskStore.open(directory, config=small(disk_mode="ro")) as store:
        assert num_present(store, refs) == 2
        assert store.put_group(blocks.writes(refs[2:])) == [FULL]
        assert store.remove([refs[0].key]).num_blocks == 0
        assert store.stats().state == "read_only"


def test_payload_may_be_any_buffer(store: DiskStore, blocks: Blocks) -> None:
    refs = blocks.chain(2)
    payload = bytearray(blocks.payload(refs[0]))
    view = memoryview(payload).cast("H")
    store.put_group([BlockWrite(refs[0], NAMESPACE, b"", view)])
    store.put_group([BlockWrite(refs[1], NAMESPACE, b"", payload)])
    assert blocks.read(store, refs[0]) == blocks.read(store, refs[1]) == bytes(payload)


def test_namespace_registered_twice_is_there_once(store: DiskStore, directory: Path) -> None:
    from kvstore.disk.offline.summary import summarize

    store.register_namespace(NAMESPACE, IDENTITY)
    store.register_namespace(NAMESPACE, IDENTITY)
    (row,) = summarize(directory)["namespaces"]
    assert {name: row[name] for name in IDENTITY} == IDENTITY
