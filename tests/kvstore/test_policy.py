import pytest

from kvstore.block import BlockRef
from kvstore.index import BlockIndex
from kvstore.policy import POLICIES, Prioritised
from kvstore.testing import FakeClock


class Cache:
    """Single blocks under one policy, as the store uses it: one use at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.index = BlockIndex()
        self.policy = POLICIES[name](self.index, capacity)
        self.capacity = capacity

    def use(self, name: int) -> bool:
        """Whether the block was there."""
        key = name.to_bytes(32, "big")
        slot = self.index.slots.get(key, -1)
        if slot >= 0:
            self.policy.take(slot)
            self.index.hits[slot] += 1
            self.policy.add(slot)
            return True
        if len(self.policy) == self.capacity:
            victim = next(self.policy.victims())
            self.policy.drop(victim)
            self.index.drop(victim)
        self.policy.add(self.index.add(BlockRef(key, bytes(32), b"", 0), b""))
        return False

    def holds(self, names) -> bool:
        return all(name.to_bytes(32, "big") in self.index.slots for name in names)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_names_every_unused_block_once(name):
    cache = Cache(name, 8)
    for block in [1, 2, 3, 1, 4, 1, 5, 2, 6, 7, 8, 9, 2, 10]:
        cache.use(block)
        victims = list(cache.policy.victims())
        assert sorted(victims) == sorted(cache.index.used_slots())
        assert len(victims) == len(cache.policy)
        assert list(cache.policy.victims()) == victims  # looking changes nothing
        assert all(slot in cache.policy for slot in victims)


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_in_use_is_no_victim(name):
    cache = Cache(name, 8)
    for block in range(4):
        cache.use(block)
    used = cache.index.slots[(2).to_bytes(32, "big")]
    cache.policy.take(used)
    assert used not in cache.policy
    assert used not in list(cache.policy.victims())
    assert len(cache.policy) == 3


def test_lru_evicts_the_least_recently_used():
    cache = Cache("lru", 3)
    for block in [1, 2, 3, 1, 4]:
        cache.use(block)
    assert cache.holds([1, 3, 4])


@pytest.mark.parametrize(("name", "survives"), [("lru", False), ("slru", True), ("s3-fifo", True)])
def test_a_scan_wipes_out_the_hot_set_of_lru_only(name, survives):
    cache = Cache(name, 20)
    for _ in range(3):
        for block in range(10):
            cache.use(block)
    for block in range(100, 200):
        cache.use(block)
    assert cache.holds(range(10)) is survives


def test_s3_fifo_remembers_what_left_its_small_queue():
    cache = Cache("s3-fifo", 10)
    for block in range(12):
        cache.use(block)
    assert not cache.holds([0])
    cache.use(0)
    for block in range(100, 120):
        cache.use(block)
    assert cache.holds([0])


def test_the_protected_segment_does_not_grow_beyond_its_share():
    cache = Cache("slru", 10)
    for _ in range(2):
        for block in range(10):
            cache.use(block)
    for block in range(100, 110):
        cache.use(block)
    assert sum(cache.holds([block]) for block in range(10)) == 8


@pytest.fixture
def prioritised():
    index, clock = BlockIndex(), FakeClock()
    policy = Prioritised(lambda: POLICIES["lru"](index, 8), clock)
    policy.clock = clock
    return policy


def test_a_lower_priority_goes_first(prioritised):
    for slot, priority in enumerate([5, 0, -1, 0]):
        prioritised.prefer(slot, priority, None)
        prioritised.add(slot)
    assert list(prioritised.victims()) == [2, 1, 3, 0]
    assert len(prioritised) == 4


def test_a_priority_may_be_given_to_an_unused_block(prioritised):
    for slot in range(3):
        prioritised.add(slot)
    prioritised.prefer(0, 1, None)
    assert list(prioritised.victims()) == [1, 2, 0]
    prioritised.prefer(0, 0, None)
    assert list(prioritised.victims()) == [1, 2, 0]
    prioritised.drop(1)
    assert list(prioritised.victims()) == [2, 0]


def test_a_priority_ends(prioritised):
    prioritised.prefer(0, 1, 10.0)
    prioritised.add(0)
    prioritised.add(1)
    assert list(prioritised.victims()) == [1, 0]
    prioritised.prefer(1, 2, 5.0)
    prioritised.prefer(1, 2, 100.0)  # the later wish counts
    prioritised.clock.advance(10.0)
    assert list(prioritised.victims()) == [0, 1]
    prioritised.clock.advance(100.0)
    assert sorted(prioritised.victims()) == [0, 1]
    assert len(prioritised) == 2


def test_a_priority_given_again_keeps_what_is_known_of_a_blocks_uses():
    """Each request that named the same priority used to make its blocks new ones of S3-FIFO."""
    index, clock = BlockIndex(), FakeClock()
    policy = Prioritised(lambda: POLICIES["s3-fifo"](index, 8), clock)
    often, once = [index.add(BlockRef(key * 32, bytes(32), b"", 0), b"") for key in (b"a", b"b")]
    policy.prefer(often, 1, None)
    policy.add(often)
    for _ in range(3):
        policy.take(often)
        policy.prefer(often, 1, None)
        policy.add(often)
    policy.prefer(once, 1, None)
    policy.add(once)
    assert list(policy.victims()) == [once, often]


def test_priorities_leave_nothing_behind(prioritised):
    """Requests name any number, and prefixes in use get it anew with every request."""
    for priority in range(1, 1000):
        prioritised.prefer(0, priority, 1000.0)
    assert len(prioritised._classes) == 2
    assert len(prioritised._ends) < 10
    prioritised.forget(0)
    assert len(prioritised._classes) == 1
    prioritised.prefer(0, 0, None)
    prioritised.add(0)
    prioritised.clock.advance(1000.0)
    assert list(prioritised.victims()) == [0]
