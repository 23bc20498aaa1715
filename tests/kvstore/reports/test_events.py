import pytest

from kvstore.block import TierName
from kvstore.hashing import chain_refs, chain_seed, encode_tokens
from kvstore.index import BlockIndex
from kvstore.reports.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventLog,
    RequestMatched,
)

DEVICE, HOST, DISK = TierName.DEVICE, TierName.HOST, TierName.DISK
NAMESPACE = b"n" * 32


class Log:
    """An event log on an index, and what its sink has got."""

    def __init__(self):
        self.index = BlockIndex()
        self.log = EventLog(self.index, namespace=NAMESPACE, block_size=2, clock=lambda: 7.0)
        self.batches = []
        self.unsubscribe = self.log.subscribe(self.batches.append)

    def add(self, *tokens, salt=b""):
        """Slots of the blocks of a sequence."""
        seed = chain_seed(NAMESPACE, salt.decode())
        refs = chain_refs(seed, encode_tokens(tokens), 8)
        return [self.index.add(ref, salt) for ref in refs]

    def events(self):
        self.log.flush()
        return [event for batch in self.batches for event in batch]


@pytest.fixture
def log():
    return Log()


def test_blocks_of_one_sequence_are_one_event(log):
    slots = log.add(1, 2, 3, 4, 5, 6)
    for slot in slots:
        log.log.stored(DEVICE, slot)
    keys = [log.index.key[slot] for slot in slots]
    assert log.events() == [
        BlockStored(
            ts=7.0,
            namespace=NAMESPACE,
            block_hashes=keys,
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4, 5, 6],
            block_size=2,
            medium="device",
        )
    ]


def test_a_run_that_does_not_begin_at_the_root_names_its_parent(log):
    slots = log.add(1, 2, 3, 4)
    log.log.stored(HOST, slots[1])
    (event,) = log.events()
    assert event.parent_block_hash == log.index.key[slots[0]]
    assert (event.token_ids, event.medium) == ([3, 4], "host")


def test_blocks_that_do_not_follow_each_other_are_events_of_their_own(log):
    first, second = log.add(1, 2), log.add(3, 4)
    for slot in first + second:
        log.log.stored(DEVICE, slot)
    assert [event.token_ids for event in log.events()] == [[1, 2], [3, 4]]


def test_tiers_and_salts_are_events_of_their_own(log):
    plain, salted = log.add(1, 2), log.add(1, 2, salt=b"tenant")
    for tier, slot in ((DEVICE, plain[0]), (HOST, plain[0]), (DEVICE, salted[0])):
        log.log.stored(tier, slot)
        log.log.removed(tier, slot)
    seen = [(type(event), event.medium, event.salt) for event in log.events()]
    assert seen == [
        (kind, medium, salt)
        for medium, salt in (("device", b""), ("host", b""), ("device", b"tenant"))
        for kind in (BlockStored, BlockRemoved)
    ]


def test_blocks_removed_together_are_one_event_whatever_their_order(log):
    slots = [*log.add(1, 2, 3, 4), *log.add(5, 6)][::-1]
    for slot in slots:
        log.log.removed(DEVICE, slot)
    (event,) = log.events()
    assert event.block_hashes == [log.index.key[slot] for slot in slots]


def test_what_two_tenants_lose_together_is_an_event_of_each(log):
    slots = [*log.add(1, 2), *log.add(1, 2, salt=b"tenant"), *log.add(3, 4)]
    for slot in slots:
        log.log.removed(DEVICE, slot)
    seen = [(event.salt, event.block_hashes) for event in log.events()]
    assert seen == [(log.index.salt[slot], [log.index.key[slot]]) for slot in slots]


def test_order_is_kept(log):
    (slot,) = log.add(1, 2)
    for change in (log.log.stored, log.log.removed, log.log.stored):
        change(DEVICE, slot)
    log.log.cleared(DEVICE)
    kinds = [type(event) for event in log.events()]
    assert kinds == [BlockStored, BlockRemoved, BlockStored, AllBlocksCleared]


def test_a_request_says_what_it_looked_up_and_what_was_there(log):
    keys = [bytes([i]) * 32 for i in range(4)]
    log.log.matched(keys, [DEVICE, DISK, DISK], num_tokens=9, salt=b"s")
    assert log.events() == [
        RequestMatched(
            ts=7.0,
            namespace=NAMESPACE,
            salt=b"s",
            block_hashes=keys,
            num_tokens=9,
            block_size=2,
            found_blocks={"device": 1, "disk": 2},
        )
    ]


def test_clearing_names_the_salt_it_is_about(log):
    log.log.cleared(DISK)
    log.log.cleared(HOST, salt=b"")
    assert [(event.medium, event.is_one_salt) for event in log.events()] == [
        ("disk", False),
        ("host", True),
    ]


def test_nothing_is_handed_over_twice_and_nothing_when_nothing_happened(log):
    log.log.stored(DEVICE, log.add(1, 2)[0])
    assert len(log.events()) == len(log.events()) == 1
    assert len(log.batches) == 1


def test_a_sink_that_raises_is_dropped_and_the_others_go_on(log, caplog):
    def broken(events):
        raise RuntimeError("no more disk")

    log.log.subscribe(broken)
    (slot,) = log.add(1, 2)
    log.log.stored(DEVICE, slot)
    log.events()
    log.log.removed(DEVICE, slot)
    assert len(log.events()) == 2
    assert len(caplog.records) == 1


def test_a_new_sink_gets_only_what_comes_after(log):
    (slot,) = log.add(1, 2)
    log.log.stored(DEVICE, slot)
    late = []
    log.log.subscribe(late.extend)
    log.log.removed(DEVICE, slot)
    log.events()
    assert [type(event) for event in late] == [BlockRemoved]


def test_an_ended_subscription_gets_nothing_more(log):
    log.unsubscribe()
    log.unsubscribe()
    log.log.stored(DEVICE, log.add(1, 2)[0])
    assert log.events() == []


def test_counts_are_kept_without_sinks(log):
    log.unsubscribe()
    slots = log.add(1, 2, 3, 4)
    for slot in slots:
        log.log.stored(DEVICE, slot)
    log.log.removed(DEVICE, slots[1])
    assert log.log.stored_blocks == {"device": 2}
    assert log.log.removed_blocks == {"device": 1}


def test_without_sinks_nothing_is_built(log):
    log.unsubscribe()
    log.index = None  # whatever looks at a block would fail
    for _ in range(3):
        log.log.stored(DEVICE, 0)
        log.log.removed(DEVICE, 0)
    log.log.matched([b"k"], [DEVICE], num_tokens=3, salt=b"")
    assert log.events() == []
