"""Reuse in units of several blocks: what deterministic mode asks of the store."""

import pytest

from kvstore.config import StoreConfig
from kvstore.errors import CorruptBlockError
from kvstore.testing import FaultyDisk, MemoryDisk

A, B, C, D, E = ([token] * 4 for token in range(1, 6))  # one block each
END = [9]
PAIRS = StoreConfig(reuse_unit_blocks=2, min_partial_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [(A + END, 0), (A + B + END, 2), (A + B + C + END, 2), (A + B + C + D + END, 4)],
)
def test_a_prefix_is_reused_in_whole_units(make_engine, prompt, num_cached):
    engine = make_engine(config=PAIRS)
    engine.run(A + B + C + D + E + END)
    lease = engine.start(prompt)
    assert lease.num_cached == num_cached
    assert lease.num_cached_tokens(4) == 4 * num_cached
    engine.store.release(lease)


def test_a_block_that_cannot_be_read_gives_up_its_whole_unit_and_heals(make_engine):
    """The other block of its unit is computed again too, and merged with the copy that was read:
    kept apart, it would bar the way to a new copy of the broken one."""
    disk = FaultyDisk(MemoryDisk())
    first = make_engine(disk=disk, config=PAIRS)
    first.run(A + B + C + D + END)
    first.store.close()
    second = make_engine(disk=disk, config=PAIRS)
    broken = second.look_up(A + B + C + D + END).keys[3]
    error = CorruptBlockError("flipped", reason="checksum")
    disk.fail_reads = lambda ref: error if ref.key == broken else None
    lease = second.start(A + B + C + D + END)
    assert lease.num_cached == 2
    second.compute(lease, A + B + C + D + END)
    second.store.release(lease)
    again = second.start(A + B + C + D + END)
    assert again.num_cached == 4
    second.store.release(again)
