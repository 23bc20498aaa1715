"""Write-behind: dirty blocks are written to disk before anybody needs their room.

As an operating system cleans dirty pages: by age (disk does not hold a block after
``dirty_max_age_s``) and by fill (memory beyond the high watermark, until the low one), oldest
first. A prompt's blocks become dirty root first, and are written in that order, so that a parent
is on disk before its children. While disk checks its file they are kept, as far as there is room.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvstore.backing import Backing
from kvstore.block import PutOutcome, TierName
from kvstore.errors import KVStoreError
from kvstore.index import NONE, VALID
from kvstore.memory import Memory
from kvstore.reports.histogram import Histogram, LastDay
from kvstore.transfer import PendingWrite, TransferLoop

_MAX_REWRITES = 8  # of one block whose parent went from disk meanwhile
_CHECKING_PAUSE_S = 0.1  # between looks whether disk has checked its file


@dataclass(frozen=True, slots=True)
class WriteCounters:
    """Blocks and bytes since the store was opened."""

    written_blocks: int = 0
    written_bytes: int = 0
    already_on_disk: int = 0
    unwritten_blocks: int = 0  # disk had no room, failed, or the block's parent is lost


class WriteBehind:
    """Decides which dirty blocks are written when. Owner thread only."""

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        transfer: TransferLoop,
    ) -> None:
        self._index = memory.index
        self._device = memory.device
        self._host = memory.host
        self._backing = backing
        self._transfer = transfer
        self._config = memory.config
        self._namespace = memory.namespace
        self._block_bytes = memory.layout.block_bytes
        self._clock = memory.clock
        self._events = memory.events
        self._urgent_before = -math.inf  # blocks dirty since then or longer are waited for
        self._filling = False  # between the high watermark and the low one
        self._num_in_flight = 0
        self._rewrites: dict[bytes, int] = {}
        self.counters = WriteCounters()
        self.seconds = Histogram()  # of writes, their waiting included
        self.bytes_last_day = LastDay(memory.clock)

    @property
    def is_idle(self) -> bool:
        return self._num_in_flight == 0 and not self._index.dirty

    def add(self, slot: int) -> None:
        """A block that disk does not hold, and memory does. Parents are added before their
        children."""
        if self._backing.is_written and slot not in self._index.dirty:
            self._index.dirty_since[slot] = self._index.touched_s[slot] = self._clock()
            self._index.dirty.append(slot)

    def touch(self, slots: Sequence[int]) -> None:
        """Tell disk of a use of a sequence's blocks, leaf first, where it was not told lately.

        Writing a block tells disk of it, too.
        """
        if not slots or not self._backing.is_written:
            return
        index, now = self._index, self._clock()
        stale_before = now - self._config.touch_interval_s
        stale = [
            slot
            for slot in reversed(slots)
            if index.touched_s[slot] < stale_before and index.is_written[slot]
        ]
        for slot in stale:
            index.touched_s[slot] = now
        if stale:
            self._transfer.touch([index.key[slot] for slot in stale])

    def needs_writing(self, slot: int) -> bool:
        """Whether a block is to be written before it goes. Not while disk checks its file, which
        may take minutes: it is lost then, if its room is needed."""
        return slot in self._index.dirty and not self._backing.is_checking

    def urge(self, slots: Iterable[int]) -> None:
        """Somebody waits for the room of these dirty blocks: write them, and older ones, now."""
        since = self._index.dirty_since
        self._urgent_before = max([self._urgent_before, *(since[slot] for slot in slots)])

    def urge_all(self) -> None:
        """Write every dirty block now, also what becomes dirty before this is idle."""
        self._urgent_before = math.inf

    def may_have_parent(self, slot: int) -> bool:
        """Whether disk may hold what this block continues.

        It does when it holds the block. What is still to be written may turn out to have it; what
        disk refused has not. Of a disk that is never written, nothing is known.
        """
        index, backing = self._index, self._backing
        is_coming = slot in index.dirty or index.transfers[slot] > 0
        may_hold = bool(index.is_written[slot]) or is_coming
        return backing.is_read_only or (backing.is_written and may_hold)

    def oldest_age_s(self) -> float:
        """Age of the oldest dirty block, 0.0 when everything is clean."""
        oldest = next(iter(self._index.dirty), NONE)
        return 0.0 if oldest == NONE else self._clock() - self._index.dirty_since[oldest]

    def next_deadline(self) -> float:
        """Clock time at which ``pump`` has something to do, infinity for never."""
        oldest = next(iter(self._index.dirty), NONE)
        if oldest == NONE or self._num_in_flight:
            return math.inf  # the completion wakes the owner
        if self._backing.is_checking:
            return self._clock() + _CHECKING_PAUSE_S
        since = self._index.dirty_since[oldest]
        if since <= self._urgent_before or self._filling:
            return since
        return since + self._max_age_s()

    def pump(self) -> None:
        """Start writing the next group if one is due."""
        if not self._index.dirty:
            if not self._num_in_flight:
                self._urgent_before = -math.inf
                self._rewrites.clear()  # of blocks that left memory meanwhile
            return
        if self._num_in_flight or self._backing.is_checking:
            return
        self._watch_fill()
        group = self._next_group()
        if group:
            self._write(group)

    def _max_age_s(self) -> float:
        ages = {"write_through": 0.0, "write_back": math.inf}
        return ages.get(self._config.write_policy, self._config.dirty_max_age_s)

    def _watch_fill(self) -> None:
        pool = self._host or self._device
        num_dirty, capacity = len(self._index.dirty), pool.capacity
        if self._config.write_policy == "write_back":
            return
        if capacity - pool.num_free >= self._config.high_watermark * capacity:
            self._filling = num_dirty > self._config.low_watermark * capacity
        elif num_dirty <= self._config.low_watermark * capacity:
            self._filling = False

    def _next_group(self) -> list[int]:
        """Due blocks, oldest first, at most one transaction's worth."""
        due_since = max(self._urgent_before, self._clock() - self._max_age_s())
        if self._filling:
            due_since = math.inf
        most = max(1, self._config.group_commit_bytes // self._block_bytes)
        group: list[int] = []
        for slot in self._index.dirty:
            if len(group) == most or self._index.dirty_since[slot] > due_since:
                break
            group.append(slot)
        return group

    def _write(self, slots: list[int]) -> None:
        index, began_at = self._index, self._clock()
        writes = []
        for slot in slots:
            index.dirty.remove(slot)
            index.transfers[slot] += 1
            if index.device[slot] != NONE and index.loading[slot] == VALID:
                source: int | memoryview = index.device[slot]
            else:
                assert self._host is not None, "a dirty block has a copy in memory"
                assert index.host[slot] != NONE, "a dirty block has a copy in memory"
                source = self._host.payload(index.host[slot])
            writes.append(PendingWrite(index.ref(slot), self._namespace, index.salt[slot], source))
        self._num_in_flight = len(slots)

        def done(outcome: list[PutOutcome] | KVStoreError) -> None:
            self._num_in_flight = 0
            self.seconds.observe(self._transfer.finished_at - began_at)
            for slot in slots:
                index.transfers[slot] -= 1
            if isinstance(outcome, KVStoreError):
                self._count(unwritten_blocks=len(slots))
                self._backing.lose(outcome)
                return
            for slot, result in zip(slots, outcome, strict=True):
                self._settle(slot, result)

        self._transfer.write(writes, done)

    def _settle(self, slot: int, outcome: PutOutcome) -> None:
        match outcome:
            case PutOutcome.STORED:
                self._index.is_written[slot] = 1
                self._count(written_blocks=1, written_bytes=self._block_bytes)
                self.bytes_last_day.add(self._block_bytes)
                self._events.stored(TierName.DISK, slot)
            case PutOutcome.PRESENT:
                self._index.is_written[slot] = 1
                self._count(already_on_disk=1)
            case PutOutcome.FULL:
                self._count(unwritten_blocks=1)
            case PutOutcome.ORPHAN:
                self._write_after_parent(slot)
                return
        self._rewrites.pop(self._index.key[slot], None)

    def _write_after_parent(self, slot: int) -> None:
        """Another process evicted the parent from disk: write it again, then this block.

        Gives the block up when memory does not hold the parent either, or only waits for it: what
        it waits for is the copy that has gone. It is recomputed one day.
        """
        index = self._index
        key = index.key[slot]
        parent = index.slots.get(index.parent_key[slot], NONE)
        rewrites = self._rewrites[key] = self._rewrites.get(key, 0) + 1
        if not index.has_bytes(parent) or rewrites > _MAX_REWRITES:
            del self._rewrites[key]
            self._count(unwritten_blocks=1)
            return
        self.add(parent)
        self.add(slot)
        self.urge((parent, slot))

    def _count(self, **more: int) -> None:
        changed = {name: getattr(self.counters, name) + count for name, count in more.items()}
        self.counters = replace(self.counters, **changed)
