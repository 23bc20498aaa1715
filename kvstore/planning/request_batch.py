"""Requests of a trace, many at a time: whatever looks at a trace does so in arrays.

A batch is what readers and the generator yield and what distances, sampling and simulation take, so
that a hundred million block references pass through without an object for each.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TARGET_BLOCKS = 1 << 17  # of a batch: the cost of a batch is spread thin, and it fits a cache

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Ids = NDArray[np.uint64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Consecutive requests.

    blocks         uint64 [n], identity of each input block, request after request
    offsets        int64 [r + 1]: request i has ``blocks[offsets[i] : offsets[i + 1]]``
    num_tokens     int64 [r], of the whole prompt
    arrival_s      float64 [r], never decreasing within a trace
    block_tokens   positions of a full block
    """

    blocks: Ids
    offsets: Ints
    num_tokens: Ints
    arrival_s: Floats
    block_tokens: int

    def __len__(self) -> int:
        """Requests."""
        return len(self.num_tokens)

    def request_of_block(self) -> Ints:
        """int64 [n]: number of the request within the batch that a block reference belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def depths(self) -> Ints:
        """int64 [n]: a block's number within its request."""
        return np.arange(len(self.blocks)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    def tokens_of_block(self) -> Ints:
        """int64 [n]: prompt tokens that a block holds; the last one of a request may be partial."""
        ends = self.num_tokens[self.request_of_block()]
        left: Ints = ends - self.depths() * self.block_tokens
        return np.minimum(np.maximum(left, 0), self.block_tokens)

    def per_request(self, values: Ints) -> Ints:
        """int64 [r]: sums of values [n] over each request; 0 for one without blocks."""
        sums = np.concatenate(([0], np.cumsum(values)))
        return np.diff(sums[self.offsets])

    def prompts(self) -> Iterator[tuple[Ids, int, float]]:
        """Blocks, tokens and arrival of each request."""
        for i in range(len(self)):
            blocks = self.blocks[self.offsets[i] : self.offsets[i + 1]]
            yield blocks, int(self.num_tokens[i]), float(self.arrival_s[i])


class RequestBatcher:
    """Collects requests one by one and makes batches of them."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._begin()

    def add(self, blocks: list[int], num_tokens: int, arrival_s: float) -> RequestBatch | None:
        """Returns a batch when enough requests have come together.

        Raises ``TypeError`` or ``OverflowError``, unchanged, for a block that is no unsigned 64-bit
        integer.
        """
        self._blocks.fromlist(blocks)
        self._ends.append(len(self._blocks))
        self._num_tokens.append(num_tokens)
        self._arrival_s.append(arrival_s)
        return self.flush() if len(self._blocks) + len(self._ends) > TARGET_BLOCKS else None

    def flush(self) -> RequestBatch | None:
        """A batch of the requests so far, None without any."""
        if not self._num_tokens:
            return None
        batch = RequestBatch(
            np.frombuffer(self._blocks, np.uint64) if self._blocks else np.empty(0, np.uint64),
            np.frombuffer(self._ends, np.int64),
            np.frombuffer(self._num_tokens, np.int64),
            np.frombuffer(self._arrival_s, np.float64),
            self._block_tokens,
        )
        self._begin()  # the arrays are the batch's now
        return batch

    def _begin(self) -> None:
        self._blocks, self._ends = array("Q"), array("q", [0])
        self._num_tokens, self._arrival_s = array("q"), array("d")
