"""Tiers that keep account of blocks without having any: what a simulation puts into a real store.

The store itself, its index, policies, eviction, write-behind and promotion are the engine's. Only
what moves bytes is replaced: copies take no time, and the disk tier is a model of ``kvstore.disk``
that counts blocks instead of pages.
"""

import heapq
from collections import deque
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.config import DiskConfig
from kvstore.disk import DiskEntry, DiskStats
from kvstore.disk.pins import NAMELESS
from kvstore.errors import KVStoreError
from kvstore.tiers.base import BlockCopier, BlockPool, BlockRead, DiskTier, RemovedBlock, Rows
from kvstore.transfer import Done, PendingWrite, TransferLoop

T = TypeVar("T")

_GROUP_BLOCKS = 64  # written in one transaction


class InstantTransfer(TransferLoop):
    """A transfer loop without a loop: a job is done when it is submitted, and takes no time.

    Its outcome is applied in ``poll()``, as always, so the owner goes through the same states.
    """

    def __init__(
        self,
        device: BlockPool,
        copier: BlockCopier,
        *,
        host: Rows | None,
        disk: DiskTier | None,
        clock: Callable[[], float],
        **_: Any,
    ) -> None:
        # Not TransferLoop's: it starts a thread.
        self._disk = disk
        self._clock = clock
        self._completions = deque()
        self._num_pending = 0
        self._closing = False
        self.finished_at = 0.0
        self.is_model_busy = False

    def read(
        self,
        refs: Sequence[BlockRef],
        block_ids: Sequence[int],
        done: Done[list[KVStoreError | None]],
    ) -> None:
        outcomes: list[KVStoreError | None] = [None] * len(refs)
        self._submit(_result(outcomes), done)

    def promote(self, host_ids: Sequence[int], block_ids: Sequence[int], done: Done[None]) -> None:
        self._submit(_result(None), done)

    def demote(self, block_ids: Sequence[int], host_ids: Sequence[int], done: Done[None]) -> None:
        self._submit(_result(None), done)

    def write(self, writes: Sequence[PendingWrite], done: Done[list[PutOutcome]]) -> None:
        assert self._disk is not None
        blocks = [BlockWrite(each.ref, each.namespace, each.salt, b"") for each in writes]
        self._submit(self._disk.write(blocks), done)

    def wait(self, timeout_s: float) -> None:
        """Whatever was submitted has ended."""

    def hurry(self) -> None:
        """It takes no time as it is."""

    def close(self) -> None:
        self._closing = True

    def _submit(self, job: Coroutine[Any, Any, T], done: Done[T]) -> None:
        outcome: Any
        try:
            job.send(None)
        except StopIteration as end:
            outcome = end.value
        else:
            raise AssertionError("a simulated job waited")
        self._num_pending += 1
        self._completions.append((done, outcome, self._clock()))


async def _result(value: T) -> T:
    return value


class SimulatedDisk:
    """A disk tier of ``capacity_blocks`` that has the rules of the real one and no payloads.

    A block needs its parent. Leaves go first, least recently used first; among the blocks of one
    write the end of a chain goes before its beginning. Eviction begins at the high watermark, takes
    twice what comes in, and ends at the low one; the ancestors of what is written are spared.
    """

    def __init__(self, capacity_blocks: int, config: DiskConfig) -> None:
        self._high = max(1, int(config.disk_high_watermark * capacity_blocks))
        self._low = int(config.disk_low_watermark * capacity_blocks)
        self._is_evicting = False
        self._next_order = 0
        self._order: dict[bytes, int] = {}  # by key: everything on disk
        self._parent: dict[bytes, bytes] = {}
        self._num_children: dict[bytes, int] = {}
        self._leaves: list[tuple[int, bytes]] = []  # a heap; an entry with an old order is void
        self.num_written = self.num_evicted = 0
        self.is_checking = False

    def __len__(self) -> int:
        return len(self._order)

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        found = []
        for ref in refs:
            if ref.key not in self._order:
                break
            found.append(DiskEntry(ref.key, 0, "raw", 0))
        return found

    async def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        raise NotImplementedError("a simulation prefetches nothing")

    async def children(self, parent: bytes) -> list[BlockRef]:
        return []

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        return [None] * len(reads)

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        outcomes = []
        for start in range(0, len(writes), _GROUP_BLOCKS):
            outcomes += self._put([write.ref for write in writes[start : start + _GROUP_BLOCKS]])
        return outcomes

    async def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._order:
                self._renew(key, self._take_orders(1))

    async def clear(self, seed: bytes) -> Removal:
        raise NotImplementedError("a simulation never clears its disk")

    async def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        raise NotImplementedError("a simulation forgets nothing")

    async def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        raise NotImplementedError("a simulation pins nothing")

    async def release(self, key: bytes, hold: bytes) -> bool:
        raise NotImplementedError("a simulation pins nothing")

    async def unpin(self, key: bytes) -> bool:
        raise NotImplementedError("a simulation pins nothing")

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        """Nobody listens to a simulation."""

    def stats(self) -> DiskStats:
        raise NotImplementedError("a simulated disk has no bytes")

    async def publish(self, snapshot: Mapping[str, Any]) -> None:
        raise NotImplementedError("nobody watches a simulation")

    async def aclose(self) -> None:
        """Nothing to close."""

    def _put(self, refs: Sequence[BlockRef]) -> list[PutOutcome]:
        coming = {ref.key for ref in refs}
        new = sum(ref.key not in self._order for ref in refs)
        spared = self._ancestors(refs)
        if not self._make_room(new, spared):
            return [
                PutOutcome.PRESENT if ref.key in self._order else PutOutcome.FULL for ref in refs
            ]
        newest = self._take_orders(len(refs)) + len(refs) - 1
        outcomes = []
        for i, ref in enumerate(refs):
            if ref.key in self._order:
                outcomes.append(PutOutcome.PRESENT)
            elif ref.depth and ref.parent not in self._order:
                outcomes.append(PutOutcome.ORPHAN)
            else:
                self._parent[ref.key] = ref.parent
                self._num_children[ref.parent] = self._num_children.get(ref.parent, 0) + 1
                self._order[ref.key] = newest - i
                self.num_written += 1
                outcomes.append(PutOutcome.STORED)
        for key in coming:
            if key in self._order:
                self._renew(key, self._order[key])
        return outcomes

    def _make_room(self, count: int, spared: set[bytes]) -> bool:
        """As ``kvstore.disk.space`` does, in blocks."""
        used = len(self._order)
        over = max(used + count - self._high, 0)
        if over or self._is_evicting:
            excess = used + count - self._low
            wanted = max(min(excess, 2 * count), over)
            freed = self._evict(wanted, spared)
            if freed < over:
                return False
            self._is_evicting = excess > freed
        return True

    def _evict(self, count: int, spared: set[bytes]) -> int:
        freed, kept = 0, []
        while freed < count and self._leaves:
            order, key = heapq.heappop(self._leaves)
            if self._order.get(key) != order or self._num_children.get(key):
                continue
            if key in spared:
                kept.append((order, key))
                continue
            self._drop(key)
            freed += 1
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        self.num_evicted += freed
        return freed

    def _drop(self, key: bytes) -> None:
        del self._order[key]
        parent = self._parent.pop(key)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._order:
                self._renew(parent, self._order[parent])

    def _renew(self, key: bytes, order: int) -> None:
        """Give a block its place among the leaves, if it is one."""
        self._order[key] = order
        if not self._num_children.get(key):
            heapq.heappush(self._leaves, (order, key))

    def _take_orders(self, count: int) -> int:
        first = self._next_order
        self._next_order += count
        return first

    def _ancestors(self, refs: Sequence[BlockRef]) -> set[bytes]:
        spared: set[bytes] = set()
        for ref in refs:
            key: bytes | None = ref.parent
            while key in self._order and key not in spared:
                spared.add(key)
                key = self._parent.get(key)
        return spared
