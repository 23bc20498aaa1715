"""A sample of blocks that behaves like the whole trace on a smaller scale (SHARDS).

A block belongs to the sample when a hash of its identity lies below a threshold, so it does in
every request or in none; with a share R of the blocks, distances shrink by R. Waldspurger, Park,
Garthwaite and Ahmad, "Efficient MRC construction with SHARDS", FAST 2015.

The unit is the block, not the document. In a trace of prefix keys a block lies above its children
in every LRU stack, so its own distance is that of its whole prefix, and a sample of blocks keeps
the prefix rule although it leaves out most of the blocks before it. A sample of whole documents
would keep it for other traces as well, but its error is out of all proportion: of the published
conversation trace all requests begin with the same block, which makes it one document.

With a most number of blocks, the rate halves whenever the sample exceeds it: memory is bounded
whatever the length of the trace, and a trace that fits is not sampled at all.
"""

from dataclasses import replace

import numpy as np

from kvstore.errors import ConfigError
from kvstore.planning.request_batch import Flags, Ids, Ints, RequestBatch

_FULL = 1 << 64


class BlockSampler:
    """Which blocks are in the sample.

    rate          share of the blocks, in (0, 1]; only ever halved
    most_blocks   distinct blocks that the sample may have, None for any number
    """

    def __init__(self, rate: float = 1.0, most_blocks: int | None = None) -> None:
        if not 0 < rate <= 1:
            raise ConfigError(f"sample: expected a share of blocks in (0, 1], got {rate}")
        if most_blocks is not None and most_blocks < 1:
            raise ConfigError(f"sample_blocks: expected at least 1, got {most_blocks}")
        self.rate = rate
        self.most_blocks = most_blocks

    def contains(self, blocks: Ids) -> Flags:
        """bool [n]: which of these are in the sample."""
        if self.rate == 1:
            return np.ones(len(blocks), bool)
        return mixed(blocks) < np.uint64(int(self.rate * _FULL))

    def of(self, batch: RequestBatch) -> tuple[RequestBatch, Flags]:
        """The batch with only the blocks of the sample, and which of its blocks those are.

        Requests stay, also without blocks. Depths and tokens of blocks are those of the whole
        batch: the smaller one does not know them.
        """
        is_in = self.contains(batch.blocks)
        if self.rate == 1:
            return batch, is_in
        kept = np.concatenate(([0], np.cumsum(is_in)))
        return replace(batch, blocks=batch.blocks[is_in], offsets=kept[batch.offsets]), is_in

    def halve(self) -> None:
        self.rate /= 2


def mixed(blocks: Ids) -> Ids:
    """A hash of each block's identity, every bit of which depends on every bit of it.

    The finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014).
    """
    hashed = blocks + np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashed ^ (hashed >> np.uint64(31))


def groups_of(blocks: Ids, count: int) -> Ints:
    """A group in [0, count) for each block, independent of being sampled; count is a power of 2."""
    return (mixed(blocks) & np.uint64(count - 1)).astype(np.int64)
