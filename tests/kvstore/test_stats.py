"""What stats() says of tiers and requests."""

import dataclasses
import logging
from dataclasses import replace

import pytest

from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.hashing import encode_tokens
from kvstore.reports.events import AllBlocksCleared
from kvstore.reports.histogram import LastDay
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier

A, B, C, END = [1] * 4, [2] * 4, [3] * 4, [9]


def test_a_snapshot_is_frozen_and_reading_it_changes_nothing(make_engine):
    engine = make_engine(host_blocks=4, disk=MemoryDisk())
    engine.run(A + B + END)
    engine.store.flush(10.0)
    first = engine.store.stats()
    assert engine.store.stats() == first
    engine.run(A + B + END)
    assert first.tiers["device"].hits == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.looked_up_blocks = 0


def test_each_tier_counts_what_it_was_asked_for_and_did_not_have(make_engine):
    engine = make_engine(4, host_blocks=1, disk=MemoryDisk())
    engine.run(A + B + C + END)
    engine.store.flush(10.0)
    engine.store.reset()
    engine.run(A + B + END)
    engine.run(A + B + [8] * 4 + END)
    tiers = engine.store.stats().tiers
    hits, misses = (
        {name: getattr(t, what) for name, t in tiers.items()} for what in ("hits", "misses")
    )
    assert hits == {"device": 2, "host": 0, "disk": 2}
    assert misses == {"device": 3 + 2 + 1, "host": 3 + 2 + 1, "disk": 3 + 0 + 1}
    asked = engine.store.stats().looked_up_blocks
    assert asked == sum(hits.values()) + misses["disk"]


def test_a_tier_that_is_off_misses_nothing(make_engine):
    engine = make_engine()
    engine.run(A + END)
    tiers = engine.store.stats().tiers
    assert (tiers["device"].misses, tiers["host"].misses, tiers["disk"].misses) == (1, 0, 0)


def test_a_tier_that_breaks_says_so_once_in_the_log_and_always_in_stats(make_engine, caplog):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    engine.run(A + END)
    engine.store.flush(10.0)
    assert engine.store.stats().tiers["disk"].state == "ok"
    engine.store.reset()
    disk.is_broken = True
    with caplog.at_level(logging.INFO):
        for prompt in (A, B, C):
            engine.run(prompt + END)
            engine.store.flush(10.0)
    for _ in range(2):
        tier = engine.store.stats().tiers["disk"]
        assert (tier.state, tier.reason) == ("off", "the disk is gone")
    assert [record.getMessage() for record in caplog.records] == [
        "disk tier is off: the disk is gone"
    ]


def test_a_disk_that_fails_several_requests_at_once_is_lost_once(make_engine, caplog):
    disk, events = FaultyDisk(MemoryDisk()), []
    engine = make_engine(disk=disk)
    engine.store.events.subscribe(events.extend)
    engine.run(C + END)  # dirty, and due in two seconds
    disk.is_held = True
    lookups = [engine.store.lookup(encode_tokens(prompt + END)) for prompt in (A, B)]
    disk.is_broken, disk.is_held = True, False
    assert engine.store.run_until_idle(10.0)
    assert all(lookup.is_ready for lookup in lookups)
    assert [type(event) for event in events].count(AllBlocksCleared) == 1
    assert len(caplog.records) == 1
    assert engine.store.stats().dirty_blocks == 0
    assert engine.store.next_deadline() == float("inf")


def test_a_tier_that_was_not_asked_for_or_could_not_be_opened_says_why(make_engine):
    tiers = make_engine().store.stats().tiers
    assert (tiers["host"].state, tiers["host"].reason) == ("off", "host_cache is 0")
    assert (tiers["disk"].state, tiers["disk"].reason) == ("off", "disk_cache is not set")
    tier = make_engine(disk_off="the volume is read only").store.stats().tiers["disk"]
    assert (tier.state, tier.reason) == ("off", "the volume is read only")


def test_bytes_written_are_forgotten_after_a_day():
    clock = FakeClock()
    written = LastDay(clock)
    written.add(100)
    clock.advance(12 * 3600)
    written.add(20)
    assert written.total() == 120
    clock.advance(12 * 3600)
    assert written.total() == 20
    written.add(3)
    clock.advance(12 * 3600)
    assert written.total() == 3
    clock.advance(24 * 3600)
    assert written.total() == 0


def test_what_another_model_does_on_the_same_disk_changes_no_count_of_this_one(
    make_engine, tmp_path
):
    def make(name):
        config = DiskConfig(free_space_floor=0)
        disk = LmdbTier(DiskStore.open(tmp_path, capacity_bytes=4 << 20, config=config))
        return make_engine(namespace=name, disk=disk)

    one, other = make("one"), make("other")
    one.run(A + B + END)
    one.store.flush(10.0)
    before = one.store.stats()
    for salt in ("", "tenant"):
        other.run(A + B + END, salt)
        other.store.flush(10.0)
        other.store.reset(salt=salt)
        other.run(A + B + END, salt)
    other.store.clear_disk("", lambda kept: None)
    assert other.store.run_until_idle(10.0)  # then what memory holds is dirty again
    assert other.store.flush(10.0)
    after = one.store.stats()
    for tier in ("device", "host", "disk"):
        ours = {"used_blocks": 0, "used_bytes": 0}  # those of the directory
        assert replace(after.tiers[tier], **ours) == replace(before.tiers[tier], **ours)
    assert replace(after, tiers={}, oldest_dirty_age_s=0.0) == replace(
        before, tiers={}, oldest_dirty_age_s=0.0
    )
    assert other.store.stats().tiers["disk"].hits == 4


def test_a_tenant_finds_nothing_of_another_and_both_are_counted(make_engine):
    engine = make_engine(disk=MemoryDisk())
    engine.run(A + B + END, "one")
    engine.store.flush(10.0)
    engine.run(A + B + END, "other")
    assert [engine.store.stats().tiers[tier].hits for tier in ("device", "disk")] == [0, 0]
    assert engine.store.stats().looked_up_blocks == 4
