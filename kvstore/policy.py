"""Who is given up first: orders over the device blocks that nobody uses.

A policy is told when a block falls out of use, comes back into use and leaves the device, and names
victims in order. It sees metadata only and moves no bytes. ``POLICIES`` is the table of them.

Whatever the policy says, the store evicts leaves before their parents. A block falls out of use
after its children and is used at least as often, so the orders below hardly ever disagree.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Protocol

from kvstore.index import BlockIndex
from kvstore.order import LinkedOrder


class VictimPolicy(Protocol):
    """An order over unused blocks, by slot of the index. Owner thread only."""

    def __len__(self) -> int:
        """Unused blocks."""

    def __contains__(self, slot: int) -> bool: ...

    def add(self, slot: int) -> None:
        """Nobody uses the block any more: it may be a victim from now on."""

    def take(self, slot: int) -> None:
        """Somebody uses an unused block again."""

    def drop(self, slot: int) -> None:
        """An unused block was evicted."""

    def forget(self, slot: int) -> None:
        """A block, used or not, or not even known here, is none of this order's business now."""

    def victims(self) -> Iterator[int]:
        """Unused blocks, the first to go first. Looking at them changes nothing."""


class Lru:
    """Least recently used first."""

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        self._order = LinkedOrder()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, slot: int) -> bool:
        return slot in self._order

    def add(self, slot: int) -> None:
        self._order.reserve(slot + 1)
        self._order.append(slot)

    def take(self, slot: int) -> None:
        self._order.remove(slot)

    def drop(self, slot: int) -> None:
        self._order.remove(slot)

    def forget(self, slot: int) -> None:
        self._order.discard(slot)

    def victims(self) -> Iterator[int]:
        return iter(self._order)


class SegmentedLru:
    """Blocks that were found again are protected from blocks that were not (SLRU).

    A document that is read once passes through the probationary segment and leaves the hot set
    alone. The protected segment takes up to four fifths of the device; what it pushes out gets
    another round of probation. Karedla, Love and Wherry, "Caching strategies to improve disk system
    performance", 1994.
    """

    _PROTECTED_SHARE = 0.8

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        self._index = index
        self._most_protected = int(capacity * self._PROTECTED_SHARE)
        self._probation, self._protected = LinkedOrder(), LinkedOrder()

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, slot: int) -> bool:
        return slot in self._probation or slot in self._protected

    def add(self, slot: int) -> None:
        for order in (self._probation, self._protected):
            order.reserve(slot + 1)
        if self._index.hits[slot] == 0:
            self._probation.append(slot)
            return
        self._protected.append(slot)
        if len(self._protected) > self._most_protected:
            oldest = next(iter(self._protected))
            self._protected.remove(oldest)
            self._probation.append(oldest)

    def take(self, slot: int) -> None:
        (self._protected if slot in self._protected else self._probation).remove(slot)

    def drop(self, slot: int) -> None:
        self.take(slot)

    def forget(self, slot: int) -> None:
        self._probation.discard(slot)
        self._protected.discard(slot)

    def victims(self) -> Iterator[int]:
        return chain(self._probation, self._protected)


class S3Fifo:
    """Three queues instead of an order of uses (S3-FIFO).

    New blocks enter a small queue, a tenth of the device, and leave from it unless they are used
    again; used ones go on to the main queue, where each use buys another round, up to three. A key
    that left the small queue is remembered for a while and enters the main one if it returns.
    Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.

    Blocks keep their place while they are in use; victims() passes over them.
    """

    _SMALL_SHARE = 0.1
    _MOST_USES = 3

    def __init__(self, index: BlockIndex, capacity: int) -> None:
        self._index = index
        self._small_capacity = max(1, int(capacity * self._SMALL_SHARE))
        self._capacity = capacity
        self._small, self._main = LinkedOrder(), LinkedOrder()
        self._uses = array("b")
        self._in_use = array("b")
        self._ghosts: dict[bytes, None] = {}
        self._num_unused = 0

    def __len__(self) -> int:
        return self._num_unused

    def __contains__(self, slot: int) -> bool:
        is_queued = slot in self._small or slot in self._main
        return is_queued and not self._in_use[slot]

    def add(self, slot: int) -> None:
        self._num_unused += 1
        if slot in self._small or slot in self._main:
            self._in_use[slot] = 0
            return
        for order in (self._small, self._main):
            order.reserve(slot + 1)
        missing = slot + 1 - len(self._uses)
        self._uses.extend([0] * missing)
        self._in_use.extend([0] * missing)
        self._uses[slot] = self._in_use[slot] = 0
        key = self._index.key[slot]
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.append(slot)
        else:
            self._small.append(slot)

    def take(self, slot: int) -> None:
        self._num_unused -= 1
        self._in_use[slot] = 1
        self._uses[slot] = min(self._uses[slot] + 1, self._MOST_USES)

    def drop(self, slot: int) -> None:
        """Blocks passed over on the way to this victim move on: to main, or to another round."""
        self._num_unused -= 1
        order = self._small if slot in self._small else self._main
        for older in order:
            if older == slot:
                break
            order.remove(older)
            if order is self._main:
                self._uses[older] -= self._uses[older] > 0
            self._main.append(older)
        order.remove(slot)
        if order is self._small:
            self._ghosts[self._index.key[slot]] = None
            if len(self._ghosts) > self._capacity:
                del self._ghosts[next(iter(self._ghosts))]

    def forget(self, slot: int) -> None:
        self._num_unused -= slot in self
        self._small.discard(slot)
        self._main.discard(slot)

    def victims(self) -> Iterator[int]:
        small_first = len(self._small) >= self._small_capacity
        queues = (self._small, self._main) if small_first else (self._main, self._small)
        passed_over = []
        for order in queues:
            least = 1 if order is self._small else 0
            for slot in order:
                if self._in_use[slot]:
                    continue
                if self._uses[slot] > least:
                    passed_over.append(slot)
                else:
                    yield slot
        yield from sorted(passed_over, key=self._uses.__getitem__)


POLICIES: dict[str, Callable[[BlockIndex, int], VictimPolicy]] = {
    "lru": Lru,
    "slru": SegmentedLru,
    "s3-fifo": S3Fifo,
}


class Prioritised:
    """A policy a priority class: blocks of a lower class go first, whatever their uses.

    A block's priority may end after a while; it is then an ordinary block of class 0.
    """

    _MOST_ENDS = 2  # noted for each block that has one: it may be given a new one any time

    def __init__(self, make: Callable[[], VictimPolicy], clock: Callable[[], float]) -> None:
        self._make = make
        self._clock = clock
        self._classes: dict[int, VictimPolicy] = {0: make()}  # 0, and those that have a block
        self._priority: dict[int, int] = {}  # by slot, where it is not 0
        self._num_blocks: Counter[int] = Counter()  # by priority, where it is not 0
        self._ends: list[tuple[float, int, int]] = []  # (time, number, slot)
        self._current: dict[int, int] = {}  # number of the end that counts, by slot
        self._numbers = count()

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __contains__(self, slot: int) -> bool:
        return slot in self._class_of(slot)

    def prefer(self, slot: int, priority: int, ttl_s: float | None) -> None:
        """Give a block in use, or about to be, a priority for ``ttl_s`` seconds or for good."""
        self._move(slot, priority)
        self._current.pop(slot, None)
        if priority and ttl_s is not None:
            if len(self._ends) >= self._MOST_ENDS * (1 + len(self._current)):
                self._ends = [end for end in self._ends if self._current.get(end[2]) == end[1]]
                heapq.heapify(self._ends)
            number = self._current[slot] = next(self._numbers)
            heapq.heappush(self._ends, (self._clock() + ttl_s, number, slot))

    def add(self, slot: int) -> None:
        self._class_of(slot).add(slot)

    def take(self, slot: int) -> None:
        self._class_of(slot).take(slot)

    def drop(self, slot: int) -> None:
        self._class_of(slot).drop(slot)
        self._end(slot)

    def forget(self, slot: int) -> None:
        self._class_of(slot).forget(slot)
        self._end(slot)

    def victims(self) -> Iterator[int]:
        self._expire()
        if len(self._classes) == 1:
            return self._classes[0].victims()
        ordered = (self._classes[priority] for priority in sorted(self._classes))
        return chain.from_iterable(policy.victims() for policy in ordered)

    def _class_of(self, slot: int) -> VictimPolicy:
        return self._classes[self._priority.get(slot, 0)]

    def _expire(self) -> None:
        while self._ends and self._ends[0][0] <= self._clock():
            _, number, slot = heapq.heappop(self._ends)
            if self._current.get(slot) == number:
                del self._current[slot]
                self._move(slot, 0)

    def _move(self, slot: int, priority: int) -> None:
        if priority == self._priority.get(slot, 0):
            return  # it keeps its place: what the policy knows of its uses would be lost
        is_unused = slot in self
        self._class_of(slot).forget(slot)
        self._file(slot, priority)
        if is_unused:
            self._class_of(slot).add(slot)

    def _end(self, slot: int) -> None:
        self._file(slot, 0)
        self._current.pop(slot, None)

    def _file(self, slot: int, priority: int) -> None:
        """Note a block's class. One goes with its last block: requests may name any number."""
        before = self._priority.pop(slot, 0)
        if before:
            self._num_blocks[before] -= 1
            if not self._num_blocks[before]:
                del self._num_blocks[before], self._classes[before]
        if priority:
            self._priority[slot] = priority
            self._num_blocks[priority] += 1
            if priority not in self._classes:
                self._classes[priority] = self._make()
