"""A store tells others how it is doing, once a second."""

import pytest

from kvstore.block import BlockLayout
from kvstore.hashing import encode_tokens
from kvstore.reports.publication import snapshot_of
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, MemoryDisk
from kvstore.tiers.host import HostPool

LAYOUT = BlockLayout(1, 16, 1, 8, "float32")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def disk():
    return MemoryDisk()


@pytest.fixture
def store(clock, disk):
    device = HostPool(8, LAYOUT.block_bytes)
    store = BlockStore(LAYOUT, b"n" * 32, device, disk=disk, clock=clock)
    yield store
    store.close()


def settle(store) -> None:
    """Publishing is no transfer that is waited for: let the loop do what it was given before."""
    store.urge()
    assert store.run_until_idle(10)


def test_it_publishes_once_a_second_and_what_has_changed(store, clock, disk):
    seen = []
    store.publisher._publish = seen.append
    for step in (0.0, 0.5, 0.6, 0.5, 1.1):
        clock.advance(step)
        store.poll()
    assert len(seen) == 1  # nothing has changed since
    assert (seen[0]["namespace"], seen[0]["dirty_blocks"]) == ((b"n" * 32).hex(), 0)
    store.publisher.also = lambda: {"waiting": 2}
    clock.advance(1.0)
    store.poll()
    assert seen[1]["waiting"] == 2


def test_what_is_published_is_what_the_statistics_say(store, clock, disk):
    lookup = store.lookup(encode_tokens(range(40)))
    while not lookup.is_ready:
        store.poll()
    clock.advance(1.0)
    store.poll()
    store.close()
    published = dict(disk.published)
    assert published.pop("at") > 0
    assert published.pop("namespace") == (b"n" * 32).hex()
    assert published["looked_up_blocks"] == 2
    assert published.keys() == snapshot_of(store.stats()).keys()
    assert published["tiers"]["disk"]["misses"] == 2


def test_a_store_without_a_disk_publishes_nothing(clock):
    store = BlockStore(LAYOUT, b"n" * 32, HostPool(8, LAYOUT.block_bytes), clock=clock)
    seen = []
    store.publisher._publish = seen.append
    clock.advance(5.0)
    store.poll()
    assert seen == []
    store.close()
