"""The events a store gives: every copy that comes or goes, and what requests ask for."""

from collections import Counter

import pytest

from kvstore.block import TierName
from kvstore.config import StoreConfig
from kvstore.disk import DiskStore
from kvstore.errors import ConfigError, CorruptBlockError, TierBrokenError
from kvstore.reports.event_file import EventFile, read_events
from kvstore.reports.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    RequestMatched,
)
from kvstore.testing import FaultyDisk, MemoryDisk
from kvstore.tiers.disk import LmdbTier
from kvstore.tiers.host import HostCopier, HostPool

A, B, C, END = [1] * 4, [2] * 4, [3] * 4, [9]
FILL = [7] * 4 + [8] * 4 + [6] * 4 + END  # all blocks of a device of four


class Listener:
    """The events of an engine's store from now on."""

    def __init__(self, engine):
        self._store, self._events = engine.store, []
        self._store.events.subscribe(self._events.extend)

    def of(self, kind, **fields):
        if not self._store.is_closed:
            self._store.run_until_idle(10.0)
        return [
            event
            for event in self._events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def held(self):
        """Copies by tier that were stored and not removed; each at most once."""
        copies = Counter()
        for event in self.of(BlockStored | BlockRemoved):
            for key in event.block_hashes:
                copies[event.medium, key] += 1 if isinstance(event, BlockStored) else -1
                assert copies[event.medium, key] in (0, 1)
        return {copy for copy, count in copies.items() if count}


def test_computed_blocks_are_stored_on_the_device_and_then_on_disk(make_engine):
    engine = make_engine(disk=MemoryDisk())
    events = Listener(engine)
    lookup = engine.run(A + B + END)
    engine.store.flush(10.0)
    seen = [(each.medium, each.block_hashes, each.token_ids) for each in events.of(BlockStored)]
    assert seen == [("device", lookup.keys, A + B), ("disk", lookup.keys, A + B)]


def test_a_demotion_is_seen_in_both_tiers(make_engine):
    engine = make_engine(4, host_blocks=8)
    engine.run(A + B + END)
    events = Listener(engine)
    engine.run(FILL)
    (stored,) = events.of(BlockStored, medium="host")
    (removed,) = events.of(BlockRemoved, medium="device")
    assert sorted(stored.block_hashes) == sorted(removed.block_hashes)
    both = events.of(BlockStored | BlockRemoved)
    assert both.index(stored) < both.index(removed)


def test_a_promoted_block_is_stored_again_and_a_failed_load_never_was(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    keys = engine.run(A + B + END).keys
    engine.store.flush(10.0)
    engine.store.reset()
    events = Listener(engine)
    disk.fail_reads = lambda ref: CorruptBlockError("bad", reason="x") if ref.depth else None
    lease = engine.start(A + B + END)
    engine.store.release(lease)
    engine.store.poll()
    assert events.held() == {("device", keys[0])}


def test_what_was_stored_and_not_removed_is_what_is_there(make_engine):
    engine = make_engine(6, host_blocks=3, disk=MemoryDisk())
    events = Listener(engine)
    for prompt in (A, B, C, A + B, B + C, A + C, C, A):
        engine.run(prompt + [5] * 4 + END)
    engine.store.run_until_idle(10.0)
    index = engine.store.index
    expected = {
        (tier, key)
        for tier, copies in (("device", index.device), ("host", index.host))
        for key, slot in index.slots.items()
        if copies[slot] >= 0
    }
    assert {copy for copy in events.held() if copy[0] != "disk"} == expected


def test_a_request_is_recorded_with_all_it_asked_for(make_engine):
    engine = make_engine()
    engine.run(A + END)
    events = Listener(engine)
    lookup = engine.run(A + B + END)
    (event,) = events.of(RequestMatched)
    assert event.block_hashes == lookup.keys
    assert (event.num_tokens, event.found_blocks) == (9, {"device": 1})


def test_a_look_is_not_a_request(make_engine):
    engine = make_engine()
    events = Listener(engine)
    engine.look_up(A + B, peek=True)
    assert events.of(Event) == []


def test_salts_never_meet_in_one_event(make_engine):
    engine = make_engine()
    events = Listener(engine)
    for salt in ("one", "two", ""):
        engine.run(A + B + END, salt)
    assert len({event.salt for event in events.of(BlockStored)}) == 3
    assert len({key for each in events.of(BlockStored) for key in each.block_hashes}) == 6
    assert all(event.salt not in (b"one", b"two") for event in events.of(Event))


def test_a_reset_says_what_left_and_that_nothing_is_left(make_engine):
    engine = make_engine(host_blocks=4)
    events = Listener(engine)
    engine.run(A + B + END)
    engine.run(A + B + END, "tenant")
    engine.store.reset(salt="tenant")
    engine.store.poll()
    assert len(events.held()) == 2
    assert [event.medium for event in events.of(AllBlocksCleared)] == ["device", "host"]
    assert all(event.is_one_salt and event.salt for event in events.of(AllBlocksCleared))


def test_a_reset_that_leaves_something_does_not_say_that_all_is_gone(make_engine):
    engine = make_engine()
    events = Listener(engine)
    lease = engine.start(A + END)
    engine.compute(lease, A + END)
    assert engine.store.reset() == 1
    engine.store.release(lease)
    engine.store.poll()
    assert events.of(AllBlocksCleared) == []


def test_a_disk_that_is_cleared_or_breaks_holds_nothing(make_engine):
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    engine.run(A + END)
    engine.store.flush(10.0)
    events = Listener(engine)
    engine.store.clear_disk("", lambda kept: None)
    engine.store.run_until_idle(10.0)
    assert events.of(AllBlocksCleared, medium="disk", is_one_salt=True)
    disk.is_broken = True
    engine.look_up(B + END)
    engine.store.poll()
    assert events.of(AllBlocksCleared, medium="disk", is_one_salt=False)


def test_events_come_with_the_poll_that_applies_them(make_engine):
    engine = make_engine()
    events = []
    engine.store.events.subscribe(events.extend)
    lease = engine.start(A + END)
    engine.compute(lease, A + END)
    assert events == []
    engine.store.poll()
    assert [type(event) for event in events] == [RequestMatched, BlockStored]
    engine.store.release(lease)


def test_a_store_writes_its_events_to_the_file_of_its_config(make_engine, tmp_path):
    path = tmp_path / "events"
    for _ in range(2):
        engine = make_engine(config=StoreConfig(event_file=path))
        engine.run(A + B + END)
        engine.store.close(10.0)
    events = list(read_events(path))
    assert [type(event) for event in events] == [RequestMatched, BlockStored] * 2
    assert events[1].token_ids == A + B


def test_an_event_file_that_cannot_be_written_is_an_error_at_once(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="event_file"):
        make_engine(config=StoreConfig(event_file=tmp_path / "no" / "such"))


def test_a_sink_that_fails_costs_no_request(make_engine):
    engine = make_engine()

    def sink(events):
        raise TierBrokenError("the listener is gone", tier="remote")

    engine.store.events.subscribe(sink)
    engine.run(A + B + END)
    assert engine.run(A + B + END).sources == [TierName.DEVICE] * 2


def fill_disk(engine, num_prompts):
    for number in range(num_prompts):
        engine.run([number * 64 + i // 4 for i in range(256)] + END)
        engine.store.flush(10.0)


def test_what_disk_evicts_is_removed_and_what_it_holds_is_what_stayed(make_engine, tmp_path):
    disk = DiskStore.open(tmp_path / "cache", capacity_bytes=1 << 20)
    engine = make_engine(70, disk=LmdbTier(disk))
    events = Listener(engine)
    fill_disk(engine, 60)
    tier = engine.store.stats().tiers["disk"]
    assert tier.evicted_blocks > 0
    assert tier.removed_blocks == tier.evicted_blocks
    assert len([copy for copy in events.held() if copy[0] == "disk"]) == tier.used_blocks


def test_another_model_s_blocks_that_disk_evicts_are_none_of_this_stream(make_engine, tmp_path):
    first, second = (
        make_engine(
            70,
            disk=LmdbTier(DiskStore.open(tmp_path / "cache", capacity_bytes=1 << 20)),
            namespace=name,
        )
        for name in ("one", "two")
    )
    fill_disk(first, 5)
    events = Listener(second)
    fill_disk(second, 60)
    stored = {key for each in events.of(BlockStored, medium="disk") for key in each.block_hashes}
    removed = {key for each in events.of(BlockRemoved, medium="disk") for key in each.block_hashes}
    assert removed <= stored
    assert second.store.stats().tiers["disk"].evicted_blocks == len(removed) + 5 * 64


def test_clearing_a_salt_on_disk_removes_its_blocks_one_by_one(make_engine, tmp_path):
    engine = make_engine(disk=LmdbTier(DiskStore.open(tmp_path / "cache")))
    events = Listener(engine)
    for salt in ("", "tenant"):
        engine.run(A + B + END, salt)
    engine.store.flush(10.0)
    engine.store.clear_disk("tenant", lambda kept: None)
    (removed,) = events.of(BlockRemoved, medium="disk")
    (cleared,) = events.of(AllBlocksCleared, medium="disk")
    assert len(removed.block_hashes) == 2
    assert removed.salt == cleared.salt != b""
    assert len([copy for copy in events.held() if copy[0] == "disk"]) == 2


def test_a_store_that_is_refused_leaves_its_event_file_to_the_next(tmp_path, make_engine):
    class FarPool:
        capacity = 4  # a device that needs staging

    path = tmp_path / "events"
    with pytest.raises(ConfigError, match="cannot be mapped"):
        make_engine(
            device=FarPool(),
            copier=HostCopier(HostPool(4, 64)),
            disk=MemoryDisk(),
            config=StoreConfig(event_file=path, staging_bytes=1 << 62),
        )
    EventFile(path).close()
