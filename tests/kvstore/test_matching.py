"""What is reused of a prefix: whole blocks, then the head of one more."""

import pytest

from kvstore.block import TierName
from kvstore.config import StoreConfig
from kvstore.testing import FaultyDisk, MemoryDisk

A, B = [1, 2, 3, 4], [5, 6, 7, 8]  # one block each
END = [0]
FILL = [[number] * 4 for number in range(30, 40)]
HEADS = StoreConfig(min_partial_tokens=2)


def found(lease):
    return {tier.value: count for tier, count in lease.cached_tokens(4).items()}


def reuse(engine, tokens):
    """What a request finds; served bytes are compared on the way."""
    lease = engine.start(tokens)
    cached = found(lease)
    engine.compute(lease, tokens)
    engine.store.release(lease)
    return cached


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        ([*A, 5, 6, 9, 9, *END], {"device": 6}),
        ([*A, 5, 6, 7, *END], {"device": 7}),  # the prompt ends inside the block
        ([*A, 5, 9, 9, 9, *END], {"device": 4}),  # one token is less than min_partial_tokens
        ([1, 2, 9, 9, *END], {"device": 2}),  # of a root, too
        ([9, 9, 9, 9, 5, 6, 7, 8, *END], {}),  # an equal block below another parent
    ],
)
def test_the_head_of_the_next_block_is_copied(make_engine, prompt, cached):
    engine = make_engine(config=HEADS)
    engine.run(A + B + END)
    assert reuse(engine, prompt) == cached
    assert reuse(engine, A + B + END) == {"device": 8}  # its own bytes are what they were


def test_of_several_blocks_the_one_with_the_longest_head_is_taken(make_engine):
    engine = make_engine(config=HEADS)
    for middle in ([5, 6, 0, 0], [5, 6, 7, 0], [5, 0, 0, 0]):
        engine.run(A + middle + END)
    assert reuse(engine, [*A, 5, 6, 7, 7, *END]) == {"device": 7}


def test_a_head_comes_from_host(make_engine):
    engine = make_engine(8, host_blocks=8, config=HEADS)
    engine.run(A + B + END)
    for other in FILL:
        engine.run(other + END)
    assert TierName.DEVICE not in engine.look_up(A + B + END).sources
    assert reuse(engine, [*A, 5, 6, 9, 9, *END]) == {"host": 6}


def test_a_policy_to_load_nothing_takes_no_head_from_a_slower_tier(make_engine):
    config = StoreConfig(min_partial_tokens=1, load_policy="never")
    engine = make_engine(8, host_blocks=8, config=config)
    engine.run(A + B + END)
    for other in FILL:
        engine.run(other + END)
    engine.run(A + END)  # computed again: A is on the device, and what continues it on the host
    assert reuse(engine, [*A, 5, 6, 9, 9, *END]) == {"device": 4}


@pytest.mark.parametrize(("middle", "from_disk"), [([5, 6, 9, 9], 6), ([5, 9, 9, 9], 4)])
def test_a_head_is_read_from_disk_when_it_saves_half_a_block(make_engine, middle, from_disk):
    engine = make_engine(disk=MemoryDisk(), config=StoreConfig(min_partial_tokens=1))
    engine.run(A + B + END)
    engine.store.flush(10.0)
    engine.store.reset()
    assert reuse(engine, A + middle + END) == {"disk": from_disk}


def test_eight_tokens_are_the_least_that_is_copied_by_default():
    assert StoreConfig().min_partial_tokens == 8


def test_a_block_under_the_same_key_with_other_tokens_is_no_match(make_engine):
    """A collision of hashes costs a miss, never a wrong answer."""
    engine = make_engine(config=HEADS)
    lookup = engine.run(A + B + END)
    index = engine.store.index
    index.tokens[index.slots[lookup.keys[1]]] = b"\7" * 16
    assert engine.look_up(A + B + END).sources == [TierName.DEVICE]
    lease = engine.start(A + B + END)
    assert lease.num_cached == 1
    engine.compute(lease, A + B + END)
    assert len(lease.slots) == 1  # the second block stays private
    engine.store.release(lease)


def test_a_block_that_is_still_loading_is_not_merged_with(make_engine):
    """The loser of a race stays private, since the winner's bytes are not there yet."""

    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(disk=disk)
    engine.run(A + B + END)
    engine.store.flush(10.0)
    engine.store.reset()
    disk.is_held = False
    waiting = engine.look_up(A + B + END)
    computing = engine.look_up(A + B + END)
    computing.given_up.update(computing.keys)
    disk.is_held = True
    loading = engine.store.reserve(waiting, 9)
    lease = engine.store.reserve(computing, 9)
    assert lease.num_cached == 0
    engine.compute(lease, A + B + END)
    assert lease.slots == []
    disk.is_held = False
    engine.store.run_until_idle(10.0)
    engine.check_cached(loading, A + B + END)
    for each in (loading, lease):
        engine.store.release(each)
    assert engine.store.stats().merged_blocks == 0
