"""Blocks that are on the device before anybody asks for them."""

import pytest

from kvstore.block import TierName
from kvstore.hashing import encode_tokens
from kvstore.testing import FaultyDisk, MemoryDisk

A, B, END = [1, 2, 3, 4], [5, 6, 7, 8], [0]


def bring_back(engine, host_blocks, has_disk):
    """A document that is no more on the device; its keys."""
    engine.run(A + B + END)
    keys = engine.look_up(A + B + END, peek=True).keys
    if has_disk:
        engine.store.flush(10.0)
    if host_blocks:
        for number in range(10, 18):
            engine.run([number] * 8 + END)
    else:
        engine.store.reset()
    return keys


@pytest.mark.parametrize(("host_blocks", "has_disk"), [(16, False), (0, True), (1, True)])
@pytest.mark.parametrize("by_key", [True, False])
def test_a_prefix_comes_from_every_tier(make_engine, host_blocks, has_disk, by_key):
    disk = MemoryDisk() if has_disk else None
    engine = make_engine(8, host_blocks=host_blocks, disk=disk)
    keys = bring_back(engine, host_blocks, has_disk)
    assert TierName.DEVICE not in engine.look_up(A + B + END, peek=True).sources
    if by_key:
        engine.store.prefetch(keys)
    else:
        engine.store.prefetch_tokens(encode_tokens(A + B))
    engine.store.run_until_idle(10.0)
    assert engine.look_up(A + B + END, peek=True).sources == [TierName.DEVICE] * 2
    assert engine.store.leases == set()
    engine.run(A + B + END)  # and its bytes are right


@pytest.mark.parametrize("by_key", [True, False])
def test_prefetching_is_no_request_and_counts_no_hits(make_engine, by_key):
    engine = make_engine(disk=MemoryDisk())
    keys = bring_back(engine, 0, True)
    before = engine.store.stats()
    if by_key:
        engine.store.prefetch(keys)
    else:
        engine.store.prefetch_tokens(encode_tokens(A + B))
    engine.store.run_until_idle(10.0)
    after = engine.store.stats()
    assert after.promoted_blocks == {"disk": 2}
    assert after.looked_up_blocks == before.looked_up_blocks
    for name, tier in after.tiers.items():
        counts = before.tiers[name].hits, before.tiers[name].misses
        assert (tier.hits, tier.misses) == counts


def test_keys_of_another_salt_or_place_bring_nothing(make_engine):
    engine = make_engine(disk=MemoryDisk())
    keys = bring_back(engine, 0, True)
    for wrong, salt in ((keys, "tenant"), (keys[1:], ""), (keys[::-1], ""), ([b"?" * 32], "")):
        engine.store.prefetch(wrong, salt)
        engine.store.run_until_idle(10.0)
        assert engine.store.stats().tiers["device"].used_blocks == 0
    engine.store.prefetch([*keys, b"?" * 32])
    engine.store.run_until_idle(10.0)
    assert engine.store.stats().tiers["device"].used_blocks == 2


def test_prefetching_takes_no_block_that_somebody_uses(make_engine):
    engine = make_engine(3, disk=MemoryDisk())
    keys = bring_back(engine, 0, True)
    lease = engine.start([9] * 8)
    engine.store.prefetch(keys)
    engine.store.run_until_idle(10.0)
    assert engine.store.stats().tiers["device"].used_blocks == 2
    engine.store.release(lease)


def test_prefetching_a_broken_disk_is_no_error(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    keys = bring_back(engine, 0, True)
    disk.is_broken = True
    engine.store.prefetch(keys)
    engine.store.run_until_idle(10.0)
    assert engine.store.stats().tiers["device"].used_blocks == 0
