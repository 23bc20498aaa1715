"""How large an LRU cache must be for a reference to hit: the whole curve from one pass.

The cache is a stack, the most recently used block on top. A cache of C blocks holds the top C, so
a block hits in every cache larger than the number of blocks above it: its stack distance (Mattson,
Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", 1970). Rules of a prefix
cache:

- A request is matched against the stack as it was before the request.
- Only its longest cached prefix counts. So what a block needs is the largest distance among the
  blocks up to it.
- Then its blocks are touched last to first: the head is the most recent. A request longer than a
  cache leaves its head there.

When each block always follows the same one, as with keys that hash the prefix, a touch of a block
touches everything before it a moment later. Parents then lie above their children, every cache
holds whole prefixes, and the second rule changes nothing; it matters for traces of other ids.

Structure: touches are numbered. A table, sorted by block, has the last touch of each; ``_alive``
has the same touches sorted. What lies above a block at a batch's start is a binary search in there;
what changed during the batch is counted by ``dominance``. So a batch costs a few sorts of itself
and one copy of the table: memory is 24 bytes a distinct block, and nothing is kept of the trace.
"""

import numpy as np

from kvstore.planning.dominance import count_larger_before
from kvstore.planning.request_batch import Flags, Ids, Ints, RequestBatch

COLD = 1 << 40  # distance of a block that no cache holds: its first reference


class StackDistances:
    """Feed it a trace's batches in order."""

    def __init__(self) -> None:
        self._ids = np.empty(0, np.uint64)  # sorted
        self._last_touch = np.empty(0, np.int64)  # of each
        self._alive = np.empty(0, np.int64)  # the same touches, sorted
        self._num_touches = 0
        self.num_behind_hole = 0  # references that lay in a smaller cache than a block before them

    @property
    def num_blocks(self) -> int:
        """Distinct blocks so far."""
        return len(self._ids)

    def of(self, batch: RequestBatch) -> Ints:
        """int64 [n]: for each block reference, the blocks above its prefix; at least ``COLD`` where
        no cache hits."""
        blocks, request = batch.blocks, batch.request_of_block()
        by_block = np.argsort(blocks, kind="stable")
        is_again = np.zeros(len(blocks), bool)  # a further occurrence within one request
        same_block = blocks[by_block[1:]] == blocks[by_block[:-1]]
        is_again[by_block[1:]] = same_block & (request[by_block[1:]] == request[by_block[:-1]])
        by_block = by_block[~is_again[by_block]]

        touched_before = np.concatenate(([0], np.cumsum(~is_again)))  # within the batch
        starts, ends = touched_before[batch.offsets[:-1]], touched_before[batch.offsets[1:]]
        touch = starts[request] + ends[request] - 1 - touched_before[:-1]  # last to first
        above = np.zeros(len(blocks), np.int64)
        above[by_block] = self._above(blocks[by_block], touch[by_block], starts[request[by_block]])
        self._num_touches += int(touched_before[-1])
        longest = _along_prefix(above, request)
        self.num_behind_hole += int(np.count_nonzero((longest > above) & ~is_again))
        return longest

    def keep_only(self, is_kept: Flags) -> None:
        """Forget the blocks of the table (see ``ids``) that are not kept."""
        self._ids, self._last_touch = self._ids[is_kept], self._last_touch[is_kept]
        self._alive = np.sort(self._last_touch)

    @property
    def ids(self) -> Ids:
        """The blocks of the table, sorted. Borrowed until the next batch."""
        return self._ids

    def _above(self, blocks: Ids, touch: Ints, start: Ints) -> Ints:
        """Blocks above each reference when its request begins.

        All [m], sorted by block, then by time: references, the number of each one's touch within
        the batch, and that of its request's first touch.
        """
        base, num_alive = self._num_touches, len(self._alive)
        is_first = np.ones(len(blocks), bool)  # of its block in this batch
        is_first[1:] = blocks[1:] != blocks[:-1]
        place = np.searchsorted(self._ids, blocks[is_first])
        is_known = np.zeros(len(place), bool)
        inside = place < len(self._ids)
        is_known[inside] = self._ids[place[inside]] == blocks[is_first][inside]

        # Number of the touch before this one: below ``base`` from an earlier batch, -1 for none.
        previous = np.empty(len(blocks), np.int64)
        previous[1:] = base + touch[:-1]
        first_previous = np.full(len(place), -1)
        first_previous[is_known] = self._last_touch[place[is_known]]
        previous[is_first] = first_previous

        # At T, the start of the request, those above are the blocks whose last touch lies in
        # (previous, T): all that were alive above it at the batch's start, and all touches since,
        # but for those that died because their block was touched again.
        is_warm = previous >= 0
        older = np.argsort(previous[is_warm])
        ranks = np.empty(len(older), np.int64)
        ranks[older] = np.arange(len(older))
        in_time = np.argsort(touch[is_warm])
        warm_touches = np.zeros(len(blocks) + 1, np.int64)
        warm_touches[touch[is_warm] + 1] = 1
        warm_before = np.cumsum(warm_touches)
        died = np.empty(len(older), np.int64)
        died[in_time] = count_larger_before(ranks[in_time], warm_before[start[is_warm][in_time]])
        is_old = previous[is_warm] < base
        sorted_old = previous[is_warm][older][: np.count_nonzero(is_old)]
        place_alive = np.searchsorted(self._alive, sorted_old)
        alive_above = np.empty(len(older), np.int64)
        alive_above[older[: len(sorted_old)]] = num_alive - 1 - place_alive
        alive_above[~is_old] = base - 1 - previous[is_warm][~is_old]  # cancels touches before it
        above = np.full(len(blocks), COLD)
        above[is_warm] = alive_above + start[is_warm] - died

        is_last = np.ones(len(blocks), bool)
        is_last[:-1] = is_first[1:]
        self._renew(blocks[is_first], base + touch[is_last], place, is_known, place_alive)
        return above

    def _renew(
        self, blocks: Ids, last_touch: Ints, place: Ints, is_known: Flags, died: Ints
    ) -> None:
        """Enter a batch's distinct blocks: the new ones at their places, the known ones anew."""
        self._last_touch[place[is_known]] = last_touch[is_known]
        self._ids = np.insert(self._ids, place[~is_known], blocks[~is_known])
        self._last_touch = np.insert(self._last_touch, place[~is_known], last_touch[~is_known])
        self._alive = np.concatenate((np.delete(self._alive, died), np.sort(last_touch)))


def _along_prefix(above: Ints, request: Ints) -> Ints:
    """The largest distance among the blocks of a request up to each."""
    level = request * (2 * COLD)  # so that one request's never reach into the next
    return np.maximum.accumulate(above + level) - level
