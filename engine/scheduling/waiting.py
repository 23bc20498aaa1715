"""The sequences that wait to be admitted, in the order in which they may be.

Ten thousand may wait: whatever a step does here costs the same for one.
"""

import heapq
import math
from collections.abc import Iterable

from engine.scheduling.sequence import Sequence

FRONT = -math.inf


class WaitingQueue:
    """Every member has one place:

    ranked   by rank, then by arrival; a member at rank ``FRONT`` stands before all others
    filed    under the key of a block, until ``wake`` is called with it; it may be ranked, too
    aside    neither: whoever put it there brings it back

    Ranks are given up lazily: an entry of the heap counts only while its member has the same
    ticket.
    """

    def __init__(self) -> None:
        self._tickets: dict[Sequence, int] = {}
        self._keys: dict[Sequence, bytes] = {}  # of those that are filed
        self._files: dict[bytes, dict[Sequence, None]] = {}
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._last_ticket = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._tickets

    def put(self, sequence: Sequence, rank: float = 0.0, key: bytes | None = None) -> None:
        """Rank a sequence, also one that has another place. With ``key`` it is filed as well."""
        self.set_aside(sequence)
        entry = (rank, sequence.arrival, self._tickets[sequence], sequence)
        heapq.heappush(self._heap, entry)
        if key is not None:
            self._file(sequence, key)

    def park(self, sequence: Sequence, key: bytes) -> None:
        """Not to be admitted before somebody has computed the block of ``key``, or given it up."""
        self.set_aside(sequence)
        self._file(sequence, key)

    def set_aside(self, sequence: Sequence) -> None:
        if sequence.arrival < 0:
            sequence.arrival = self._num_arrived
            self._num_arrived += 1
        self._unfile(sequence)
        self._last_ticket += 1
        self._tickets[sequence] = self._last_ticket

    def first(self) -> Sequence | None:
        """The ranked member that comes first."""
        while self._heap:
            _, _, ticket, sequence = self._heap[0]
            if self._tickets.get(sequence) == ticket:
                return sequence
            heapq.heappop(self._heap)
        return None

    def wake(self, keys: Iterable[bytes]) -> list[Sequence]:
        """Members filed under these keys, each put aside."""
        if not self._files:
            return []
        woken = [sequence for key in keys for sequence in self._files.get(key, ())]
        for sequence in woken:
            self.set_aside(sequence)
        return woken

    def remove(self, sequence: Sequence) -> None:
        self._unfile(sequence)
        del self._tickets[sequence]

    def _file(self, sequence: Sequence, key: bytes) -> None:
        self._keys[sequence] = key
        self._files.setdefault(key, {})[sequence] = None

    def _unfile(self, sequence: Sequence) -> None:
        key = self._keys.pop(sequence, None)
        if key is not None:
            del self._files[key][sequence]
            if not self._files[key]:
                del self._files[key]
