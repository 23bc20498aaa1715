"""A trace kept in memory, to be run through one simulated cache after another."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvstore.planning.request_batch import Ids, Ints, RequestBatch
from kvstore.planning.sampling import BlockSampler


class Spool:
    """Batches of a sample, 16 bytes a block reference.

    totals   block references of the sample, and their tokens, once ``batches`` has been called
    """

    def __init__(self) -> None:
        self._batches: list[tuple[RequestBatch, Ints]] = []
        self._known: Ids | None = None  # distinct blocks, sorted; a block's place is its number
        self.totals = (0, 0)

    def add(self, batch: RequestBatch, sampler: BlockSampler) -> None:
        tokens = batch.tokens_of_block()
        sampled, is_in = sampler.of(batch)
        self._batches.append((sampled, tokens[is_in]))

    def batches(self, sampler: BlockSampler) -> Iterator[tuple[RequestBatch, Ints]]:
        """Each batch with its blocks numbered from 0, and the tokens of each block reference.

        Of the blocks that are still in the sample: its rate may have fallen since they came.
        """
        if self._known is None:
            self._batches = [_thinned(*each, sampler) for each in self._batches]
            self._known = np.unique(np.concatenate([batch.blocks for batch, _ in self._batches]))
            self.totals = (
                sum(len(batch.blocks) for batch, _ in self._batches),
                sum(int(tokens.sum()) for _, tokens in self._batches),
            )
        for batch, tokens in self._batches:
            yield (
                replace(batch, blocks=np.searchsorted(self._known, batch.blocks).astype(np.uint64)),
                tokens,
            )


def _thinned(batch: RequestBatch, tokens: Ints, sampler: BlockSampler) -> tuple[RequestBatch, Ints]:
    sampled, is_in = sampler.of(batch)
    return sampled, tokens[is_in]
