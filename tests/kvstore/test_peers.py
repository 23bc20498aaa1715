"""Twenty behaviours that a prefix cache must have; each is one that some system got wrong.

Prompts are runs of whole blocks of four tokens, and END is the token a request always computes.
"""

import multiprocessing
import re
import sys

import pytest

from kvstore.block import BlockLayout, BlockWrite, PutOutcome
from kvstore.config import StoreConfig
from kvstore.disk import DiskStore
from kvstore.errors import CorruptBlockError, OutOfBlocksError
from kvstore.hashing import chain_keys, chain_refs, chain_seed, encode_tokens, namespace_id
from kvstore.reports.events import BlockRemoved, BlockStored
from kvstore.store import BlockStore
from kvstore.testing import FakeEngine, FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier
from kvstore.tiers.host import HostPool

A, B, C, D = ([token] * 4 for token in (1, 2, 3, 4))
END = [9]


def found(engine, *parts, salt=""):
    """Tiers in which each block of a prefix is found, without counting as a use."""
    tokens = [token for part in parts for token in part] + END
    return [source.value for source in engine.look_up(tokens, salt, peek=True).sources]


def forget_memory(engine):
    engine.store.flush()
    engine.store.reset()


def _keys(queue):
    seed = chain_seed(namespace_id({"model": "m", "revision": 3}), "tenant")
    queue.put(chain_keys(seed, encode_tokens(A + B), 16))


def test_peers_01_equal_content_has_equal_keys_in_any_process_and_after_a_restart(make_engine):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_keys, args=(queue,))
    child.start()
    there = queue.get(timeout=60)
    child.join()
    queue.close()
    _keys(here := _List())
    assert here == [there]
    disk = MemoryDisk()
    make_engine(disk=disk).run(A + B + END)
    assert found(make_engine(disk=disk), A, B) == []  # not written yet, not guessed either
    first = make_engine(disk=disk)
    first.run(A + B + END)
    first.store.close()
    assert found(make_engine(disk=disk), A, B) == ["disk", "disk"]


class _List(list):
    put = list.append


def test_peers_02_a_changed_token_changes_its_block_and_all_later_ones(make_engine):
    engine = make_engine()
    engine.run(A + B + C + END)
    assert found(engine, A, [2, 2, 2, 7], C) == ["device"]
    assert found(engine, B) == []  # an equal block under another parent
    assert found(engine, [7] * 4, B, C) == []


def test_peers_03_the_match_is_the_longest_contiguous_prefix(make_engine):
    engine = make_engine()
    engine.run(A + B + C + END)
    index = engine.store.index
    engine.store._evictor.drop_device(index.find(engine.look_up(A + B + C + END).ref(1)))
    lookup = engine.look_up(A + B + C + END)
    assert len(lookup.sources) == 1
    lease = engine.store.reserve(lookup, 13)
    assert lease.num_cached == 1
    engine.store.release(lease)


def test_peers_04_the_last_token_is_computed_even_when_all_is_cached(make_engine):
    engine = make_engine(config=StoreConfig(min_partial_tokens=1))
    engine.run(A + B + END)
    lease = engine.start(A + B)
    assert lease.num_cached_tokens(4) == 7
    engine.compute(lease, A + B)
    engine.store.release(lease)


def test_peers_05_salts_and_identities_never_share(make_engine):
    disk = MemoryDisk()
    engine = make_engine(disk=disk)
    engine.run(A + END, salt="one")
    assert found(engine, A) == found(engine, A, salt="two") == []
    engine.store.flush()
    adapter = make_engine(disk=disk, namespace="model with an adapter")
    assert found(adapter, A, salt="one") == []


def test_peers_06_a_hit_block_cannot_be_evicted_for_the_same_request(make_engine):
    engine = make_engine(5)
    engine.run(A + B + END)
    engine.run(C + END)
    tokens = A + B + D + [5] * 4 + END  # needs all five blocks, two of them its own prefix
    lease = engine.start(tokens)
    assert lease.num_cached == 2
    engine.compute(lease, tokens)
    engine.store.release(lease)
    assert found(engine, A, B, D, [5] * 4) == ["device"] * 4


def test_peers_07_too_little_space_beside_the_hits_fails_without_a_trace(make_engine):
    engine = make_engine(4)
    engine.run(A + B + END)
    before = list(engine.store.policy.victims())
    with pytest.raises(OutOfBlocksError) as raised:
        engine.store.reserve(engine.look_up(A + B + C + D + [5] * 4), 20)
    error = raised.value
    assert (error.needed_blocks, error.available_blocks, error.capacity_blocks) == (3, 2, 4)
    assert "3 device blocks are needed, 2 of 4 are free or may be evicted" in str(error)
    assert list(engine.store.policy.victims()) == before
    assert found(engine, A, B) == ["device", "device"]


def test_peers_08_lru_between_requests_and_tail_before_head_within_one(make_engine):
    engine = make_engine(6)
    engine.run(A + B + END)
    engine.run(C + D + END)
    engine.run([5] * 4 + [6] * 4 + END)  # needs one block more than is free
    assert found(engine, A, B) == ["device"]
    assert found(engine, C, D) == ["device", "device"]


def test_peers_09_a_reused_block_has_lost_its_key_before_it_is_written(make_engine):
    engine = make_engine(3)
    engine.run(A + B + END)
    lease = engine.start(C + D + END)  # its blocks are not filled yet
    assert found(engine, A, B) == []
    engine.store.release(lease)


def test_peers_10_reference_counts_return_to_zero_however_a_request_ends(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(8, disk=disk)
    store = engine.store
    store.release(engine.start(A + B + END))  # aborted before it computed anything
    engine.run(A + B + END)  # finished
    forget_memory(engine)
    failure = CorruptBlockError("flipped", reason="checksum")
    disk.fail_reads = lambda ref: failure if ref.depth == 1 else None
    engine.run(A + B + END)  # met an error
    disk.fail_reads = lambda ref: None
    disk.is_held = True
    lookup = engine.look_up_memory(C + END)
    store.release(store.reserve(lookup, 5))  # preempted
    disk.is_held = False
    store.run_until_idle(10.0)
    assert all(store.index.refcount[slot] == 0 for slot in store.index.used_slots())
    assert store.device.num_free + len(store.policy) == store.device.capacity


def test_peers_11_a_reset_skips_blocks_in_use_and_clears_the_tiers_it_claims_to(make_engine):
    engine = make_engine(host_blocks=8, disk=MemoryDisk())
    lease = engine.start(A + END)
    engine.compute(lease, A + END)
    engine.run(B + END)
    engine.store.flush()
    assert engine.store.reset() == 1
    assert found(engine, B) == ["disk"]
    cleared = []
    engine.store.clear_disk("", cleared.append)
    engine.store.run_until_idle(10.0)
    assert cleared == [0]
    assert found(engine, B) == []
    assert found(engine, A) == ["device"]
    engine.store.release(lease)
    assert engine.store.reset() == 0
    assert found(engine, A) == []


def test_peers_12_without_lookups_and_commits_nothing_is_found(make_engine):
    """What the engine does with caching off; that its answers are equal is tested there."""
    engine = make_engine()
    for _ in range(2):
        lease = engine.store.reserve(engine.store.lookup(b""), 9)
        assert lease.num_cached == 0
        engine.store.release(lease)
    assert engine.store.stats().looked_up_blocks == 0
    assert engine.store.device.num_free == engine.store.device.capacity


def test_peers_13_blocks_on_their_way_are_not_readable_and_shared_by_later_requests(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(8, disk=disk)
    store = engine.store
    engine.run(A + B + END)
    disk.is_held = True
    store.urge()
    store.poll()  # being stored
    assert disk.inner.blocks == {}
    disk.is_held = False
    forget_memory(engine)
    lookup, second = engine.look_up(A + B + END), engine.look_up(A + B + END)
    disk.is_held = True
    leases = [store.reserve(each, 9) for each in (lookup, second)]
    assert not any(lease.is_ready for lease in leases)
    assert leases[0].block_ids[:2] == leases[1].block_ids[:2]
    store.release(leases[0])
    with pytest.raises(OutOfBlocksError):  # nor are they evictable
        store.reserve(store.lookup(b""), 7 * 4)
    disk.is_held = False
    store.run_until_idle(10.0)
    assert disk.inner.num_reads == 2
    engine.check_cached(leases[1], A + B + END)
    store.release(leases[1])


def test_peers_14_source_and_destination_of_a_copy_are_left_alone_until_it_is_done(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, disk=disk)
    store = engine.store
    engine.run(A + B + END)
    disk.is_held = True
    store.urge()
    store.poll()
    with pytest.raises(OutOfBlocksError):  # the blocks being stored are no room
        store.reserve(store.lookup(b""), 12)
    disk.is_held = False
    store.run_until_idle(10.0)
    reader = engine.start(A + B + END)
    with pytest.raises(OutOfBlocksError):  # nor are those that somebody reads
        store.reserve(store.lookup(b""), 8)
    engine.check_cached(reader, A + B + END)
    store.release(reader)


def test_peers_15_a_failed_copy_costs_exactly_its_blocks(make_engine):
    disk = FaultyDisk(MemoryDisk(capacity=2))
    engine = make_engine(8, disk=disk)
    engine.run(A + B + C + END)
    forget_memory(engine)
    assert found(engine, A, B, C) == ["disk", "disk"]  # the third found no room, and has no entry
    disk.fail_reads = lambda ref: (
        CorruptBlockError("flipped", reason="checksum") if ref.depth == 1 else None
    )
    lease = engine.start(A + B + C + END)  # would never return if a failed load were tried again
    assert lease.num_cached == 1
    assert lease.lookup.given_up == {lease.lookup.keys[1]}
    engine.compute(lease, A + B + C + END)
    engine.store.release(lease)
    assert found(engine, A, B, C) == ["device"] * 3


def test_peers_16_an_eviction_is_met_in_full_or_changes_nothing(make_engine):
    engine = make_engine(6, host_blocks=2, disk=MemoryDisk())
    for prompt in (A, B):
        engine.run(prompt + END)
    lease = engine.start(C + D + END)
    resident = sorted(engine.store.index.used_slots())
    engine.store.run_until_idle(10.0)
    with pytest.raises(OutOfBlocksError):
        engine.store.reserve(engine.store.lookup(b""), 16)
    assert engine.store.num_pending == 0  # no copy was started for it, either
    engine.store.run_until_idle(10.0)
    assert sorted(engine.store.index.used_slots()) == resident
    engine.store.release(lease)
    tiny = make_engine(4, disk=MemoryDisk())
    tiny.run(A + B + C + END)  # a batch being stored does not evict itself
    tiny.store.flush()
    tiny.store.reset()
    assert found(tiny, A, B, C) == ["disk"] * 3


def _write_same_blocks(path, namespace, count):
    disk = DiskStore.open(path)
    refs = chain_refs(chain_seed(namespace), encode_tokens(range(4 * count)), 16)
    for ref in refs:
        (outcome,) = disk.put_group([BlockWrite(ref, namespace, b"", ref.key * 64)])
        assert outcome in (PutOutcome.STORED, PutOutcome.PRESENT)
    disk.close()


def test_peers_17_concurrent_writers_of_a_key_end_with_one_valid_value(tmp_path):
    """That a crash in the middle of a write is never seen is the subject of the crash suite."""
    namespace, count = namespace_id({"model": "shared"}), 20
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=_write_same_blocks, args=(tmp_path / "cache", namespace, count))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    disk = DiskStore.open(tmp_path / "cache")
    refs = chain_refs(chain_seed(namespace), encode_tokens(range(4 * count)), 16)
    assert len(disk.probe(refs)) == disk.stats().blocks == count
    for ref in refs:
        payload = bytearray(len(ref.key) * 64)
        disk.read_into(ref, memoryview(payload))
        assert payload == ref.key * 64
    disk.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "float16"},
        {"layout": 2},
        {"block_size": 8},
        {"tensor_parallel": 2},
        {"weights": "other"},
        {"rope": {"factor": 2.0}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_peers_18_what_was_written_under_another_identity_is_a_miss(tmp_path, changed):
    identity = {
        "dtype": "float32",
        "layout": 1,
        "block_size": 4,
        "tensor_parallel": 1,
        "weights": "these",
        "rope": {"factor": 1.0},
    }
    directory = tmp_path / "cache"
    first = engine_on_disk(directory, identity)
    first.run(A + B + END)
    first.store.close()
    for other, expected in ((identity | changed, []), (identity, ["disk", "disk"])):
        engine = engine_on_disk(directory, other)
        assert found(engine, A, B) == expected
        engine.store.close()


def engine_on_disk(directory, identity, block_size=4, **options):
    layout = BlockLayout(1, block_size, 1, 8, "float32")
    return FakeEngine(
        BlockStore(
            layout,
            namespace_id(identity),
            HostPool(4, layout.block_bytes),
            disk=LmdbTier(DiskStore.open(directory)),
            config=StoreConfig(load_policy="always"),
            **options,
        )
    )


def test_peers_19_blocks_come_back_from_every_tier_byte_for_byte(tmp_path):
    """FakeEngine compares every cached block with the bytes its tokens stand for."""
    engine = engine_on_disk(tmp_path / "cache", {"model": "m"}, host_blocks=6)
    engine.run(A + B + END)
    engine.run(C + D + [5] * 4 + END)
    from_host = engine.run(A + B + END).sources
    engine.run(C + D + [5] * 4 + END)
    forget_memory(engine)
    from_disk = engine.run(A + B + END).sources
    assert (from_host, from_disk) == (["host", "host"], ["disk", "disk"])
    engine.store.close()


def test_peers_20_counters_add_up(make_engine):
    events = []
    engine = make_engine(6, host_blocks=3, disk=MemoryDisk())
    engine.store.events.subscribe(events.extend)
    for prompt in (A, B, C, A, D, B, A):
        engine.run(prompt + [5] * 4 + END)
    engine.store.flush()
    stats = engine.store.stats()
    hits = sum(tier.hits for tier in stats.tiers.values())
    assert stats.looked_up_blocks == 14 >= hits > 0
    resident = {}
    changes = [event for event in events if isinstance(event, BlockStored | BlockRemoved)]
    for event in changes:
        for key in event.block_hashes:
            copy = (event.medium, key)
            change = 1 if isinstance(event, BlockStored) else -1
            resident[copy] = resident.get(copy, 0) + change
            assert resident[copy] in (0, 1), "a copy was stored or removed twice"
    index = engine.store.index
    slots = list(index.used_slots())
    for tier, copies in (("device", index.device), ("host", index.host)):
        held = {index.key[slot] for slot in slots if copies[slot] >= 0}
        assert {
            key for (medium, key), count in resident.items() if medium == tier and count
        } == held


def test_all_twenty_behaviours_are_tested():
    names = re.findall(r"test_peers_(\d\d)_", " ".join(vars(sys.modules[__name__])))
    assert sorted(names) == [f"{number:02}" for number in range(1, 21)]
