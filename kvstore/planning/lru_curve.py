"""The hit ratio of an LRU cache by its size, for every size at once, from one pass over a trace."""

from dataclasses import dataclass

import numpy as np

from kvstore.planning.request_batch import Floats, Ints, RequestBatch
from kvstore.planning.sampling import BlockSampler, groups_of
from kvstore.planning.stack_distance import COLD, StackDistances

_GROUPS = 32  # independent parts of a sample, whose spread tells its error
_PER_OCTAVE = 8  # resolution of the groups' own curves
_STUDENT_95 = 2.04  # with one degree of freedom less than groups
_WEIGHTS = 2  # what is summed for each distance: blocks and tokens


@dataclass(frozen=True, slots=True)
class Misses:
    """What a cache of some size leaves to be computed.

    blocks, tokens   of all requests together
    error_blocks     half of the 95 % interval of ``blocks``, 0 without sampling
    error_tokens     the same of ``tokens``
    """

    blocks: float
    tokens: float
    error_blocks: float = 0.0
    error_tokens: float = 0.0


class LruCurve:
    """Feed it a trace's batches in order, then ask for any capacity.

    num_blocks, num_tokens   block references, and the tokens they hold
    """

    def __init__(self, sampler: BlockSampler | None = None) -> None:
        self.sampler = sampler or BlockSampler()
        self.distances = StackDistances()
        self.num_blocks = self.num_tokens = 0
        self.num_unique = 0.0  # distinct blocks, estimated when sampling
        self._sums = np.zeros((_WEIGHTS, 1024))  # by distance within the sample
        self._cold = np.zeros(_WEIGHTS)
        octaves = COLD.bit_length() + 1
        self._group_sums = np.zeros((_WEIGHTS, _GROUPS, octaves * _PER_OCTAVE))

    def add(self, batch: RequestBatch) -> Ints | None:
        """Count a batch. Returns int64 [n], the capacity each block reference needs for a hit less
        one, at least ``COLD`` for none; None when only a sample was looked at."""
        tokens = batch.tokens_of_block()
        self.num_blocks += len(tokens)
        self.num_tokens += int(tokens.sum())
        sampled, is_in = self.sampler.of(batch)
        above = self.distances.of(sampled)
        weights = np.stack([np.ones(len(above)), tokens[is_in]])
        self._count(above, weights)
        self._count_groups(sampled, above, weights)
        if self.sampler.most_blocks is not None:
            while self.distances.num_blocks > self.sampler.most_blocks:
                self._halve()
        return above if self.sampler.rate == 1 else None

    def misses(self, capacity_blocks: int | None) -> Misses:
        """What a cache of that many blocks misses; None for one that never evicts.

        Under sampling it is the misses that are scaled up. Scaling hits instead would let it decide
        the result whether the few blocks that every request hits are in the sample.
        """
        rate = self.sampler.rate
        if capacity_blocks is None:
            missed = self._cold
        else:
            fits = int((capacity_blocks - 1) * rate) + 1
            missed = self._cold + self._sums[:, fits:].sum(axis=1)
        blocks, tokens = (missed / rate).tolist()
        errors = (0.0, 0.0) if rate == 1 else self._errors(capacity_blocks)
        return Misses(min(blocks, self.num_blocks), min(tokens, self.num_tokens), *errors)

    def _count(self, above: Ints, weights: Floats) -> None:
        is_warm = above < COLD
        self.num_unique += (len(above) - np.count_nonzero(is_warm)) / self.sampler.rate
        self._cold += weights[:, ~is_warm].sum(axis=1)
        warm = above[is_warm]
        if not len(warm):
            return
        longest = int(warm.max()) + 1
        if longest > self._sums.shape[1]:
            grown = np.zeros((_WEIGHTS, 2 * longest))
            grown[:, : self._sums.shape[1]] = self._sums
            self._sums = grown
        for sums, each in zip(self._sums, weights[:, is_warm], strict=True):
            sums[:longest] += np.bincount(warm, each, longest)

    def _count_groups(self, sampled: RequestBatch, above: Ints, weights: Floats) -> None:
        if self.sampler.rate == 1 and self.sampler.most_blocks is None:
            return
        group = groups_of(sampled.blocks, _GROUPS)
        shape = self._group_sums.shape[1:]
        bucket = np.minimum(_bucket(1 + above / self.sampler.rate), shape[1] - 2)
        bucket[above >= COLD] = shape[1] - 1
        cell = group * shape[1] + bucket
        for sums, each in zip(self._group_sums, weights, strict=True):
            sums += np.bincount(cell, each, shape[0] * shape[1]).reshape(shape)

    def _errors(self, capacity_blocks: int | None) -> tuple[float, float]:
        """Half of the 95 % intervals of missed blocks and tokens.

        Two sources, independent of each other: which blocks are in the sample, seen in how much its
        groups differ; and how many of those above a block are, which moves the capacity that a
        point of the curve stands for.
        """
        rate, last = self.sampler.rate, self._group_sums.shape[2] - 1
        at = low = high = last - 1
        if capacity_blocks is not None:
            spread = min(0.9, _STUDENT_95 * np.sqrt((1 - rate) / max(capacity_blocks * rate, 1.0)))
            edges = capacity_blocks * np.array([1, 1 - spread, 1 + spread])
            at, low, high = np.minimum(_bucket(edges), last - 1).tolist()
        errors = []
        for sums in self._group_sums:
            missed = sums[:, at + 1 :].sum(axis=1)
            chosen = _STUDENT_95 * np.sqrt((1 - rate) * _GROUPS) * missed.std(ddof=1)
            moved = sums[:, low + 1 : high + 1].sum() / 2
            errors.append(float(np.hypot(chosen, moved) / rate))
        return errors[0], errors[1]

    def _halve(self) -> None:
        """Half of the blocks leave the sample; what was counted stands for half as many."""
        self.sampler.halve()
        self.distances.keep_only(self.sampler.contains(self.distances.ids))
        self._cold /= 2
        self._group_sums /= 2
        # Distances halve, rounded up: 0 stays 0, and 2k - 1 and 2k become k.
        sums = self._sums / 2
        self._sums = np.zeros_like(sums)
        self._sums[:, 0] = sums[:, 0]
        odd, even = sums[:, 1::2], sums[:, 2::2]
        self._sums[:, 1 : 1 + odd.shape[1]] += odd
        self._sums[:, 1 : 1 + even.shape[1]] += even


def _bucket(capacity: Floats) -> Ints:
    """Number of the group curves' interval that a capacity of at least 1 lies in."""
    octaves: Floats = np.log2(np.maximum(capacity, 1))
    return np.floor(octaves * _PER_OCTAVE).astype(np.int64)
