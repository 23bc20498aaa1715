"""Which blocks running prefills are about to make.

Whoever needs one of them waits for it, instead of computing it a second time.
"""

from collections import Counter
from collections.abc import Sequence as Keys

from engine.scheduling.sequence import Sequence


class BlocksBeingComputed:
    """Owned by the step thread."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def begin(self, sequence: Sequence) -> None:
        """A sequence with a lease computes the blocks of its lookup that the lease lacks."""
        assert sequence.lease is not None
        assert sequence.lookup is not None
        sequence.num_announced = len(sequence.lease.slots)
        self._counts.update(sequence.lookup.keys[sequence.num_announced :])

    def end(self, sequence: Sequence, end: int | None) -> Keys[bytes]:
        """The blocks of its keys before ``end`` are computed; with None it computes none any more.
        Returns the keys of these that were not told before: who waits for them may go on."""
        assert sequence.lookup is not None
        keys = sequence.lookup.keys[sequence.num_announced : end]
        sequence.num_announced += len(keys)
        for key in keys:
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]
        return keys

    def last_of_run(self, keys: Keys[bytes], start: int) -> bytes | None:
        """The last of the blocks from ``start`` on that are all being computed; None for none."""
        end = start
        while end < len(keys) and keys[end] in self._counts:
            end += 1
        return keys[end - 1] if end > start else None
