"""The sequences that wait to be admitted, in the order in which they may be.

Ten thousand may wait: whatever a step does here costs the same for one.
"""

import heapq
import math
from collections.abc import Iterable, Iterator

from engine.sequence import Sequence

FRONT = -math.inf


class WaitingQueue:
    """Every member has one place:

    ranked   by rank, then by arrival; a member at rank ``FRONT`` stands before all others
    filed    under the key of a block, until ``wake`` is called with it; it may be ranked, too
    aside    neither: whoever put it there brings it back

    A place is given up lazily: what the heap and the files say of a member counts only while its
    ticket is the same.
    """

    def __init__(self) -> None:
        self._tickets: dict[Sequence, int] = {}
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._files: dict[bytes, list[tuple[int, Sequence]]] = {}
        self._last_ticket = 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._tickets)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._tickets

    def put(self, sequence: Sequence, rank: float = 0.0, key: bytes | None = None) -> None:
        """Rank a sequence, also one that has another place. With ``key`` it is filed as well."""
        ticket = self._move(sequence)
        heapq.heappush(self._heap, (rank, sequence.arrival, ticket, sequence))
        if key is not None:
            self._files.setdefault(key, []).append((ticket, sequence))

    def park(self, sequence: Sequence, key: bytes) -> None:
        """Not to be admitted before somebody has computed the block of ``key``, or given it up."""
        self._files.setdefault(key, []).append((self._move(sequence), sequence))

    def set_aside(self, sequence: Sequence) -> None:
        self._move(sequence)

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
        woken = []
        if self._files:
            for key in keys:
                for ticket, sequence in self._files.pop(key, ()):
                    if self._tickets.get(sequence) == ticket:
                        self._move(sequence)
                        woken.append(sequence)
        return woken

    def remove(self, sequence: Sequence) -> None:
        del self._tickets[sequence]

    def _move(self, sequence: Sequence) -> int:
        """A new ticket: no older place of the sequence counts any more."""
        if sequence.arrival < 0:
            sequence.arrival = self._num_arrived
            self._num_arrived += 1
        self._last_ticket += 1
        self._tickets[sequence] = self._last_ticket
        return self._last_ticket
