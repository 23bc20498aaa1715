"""Disk tiers for tests: one in a dictionary, and one that fails, delays and limits on demand."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.disk import DiskEntry, DiskStats
from kvstore.disk.pins import NAMELESS
from kvstore.errors import (
    BlockMissingError,
    CapacityError,
    CorruptBlockError,
    KVStoreError,
    TierBrokenError,
)
from kvstore.tiers.base import BlockRead, DiskTier, RemovedBlock


@dataclass
class MemoryDisk:
    """A disk tier in a dictionary, with the rules of the real one: a block needs its parent, and
    one whose bytes changed is a miss until it is written again.

    ``capacity`` in blocks; beyond it puts answer ``FULL``. The transfer loop changes it while its
    owner looks at it: ``stats`` and ``pinned`` go through copies.
    """

    capacity: int = 1 << 30
    blocks: dict[bytes, tuple[BlockRef, bytes]] = field(default_factory=dict)
    num_reads: int = 0
    pins: dict[bytes, dict[bytes, float]] = field(default_factory=dict)  # last block: hold: end
    clock: Callable[[], float] = time.time
    is_closed: bool = False
    is_checking: bool = False
    published: Mapping[str, Any] = field(default_factory=dict)
    _checksums: dict[bytes, int] = field(default_factory=dict)
    _owners: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)  # namespace, salt
    _watcher: Callable[[Sequence[RemovedBlock]], None] = lambda removed: None

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        found: list[DiskEntry] = []
        for ref in () if self.is_checking else refs:
            held, payload = self.blocks.get(ref.key, (None, b""))
            if held != ref or ref.key not in self._checksums:
                break
            found.append(DiskEntry(ref.key, len(payload), "raw", len(payload)))
        return found

    async def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        found: list[BlockRef] = []
        for key in keys:
            ref, _ = self.blocks.get(key, (None, b""))
            if ref is None or ref.parent != parent or key not in self._checksums:
                break
            found.append(ref)
            parent = key
        return found

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        return [self._read(read) for read in reads]

    def _read(self, read: BlockRead) -> KVStoreError | None:
        self.num_reads += 1
        key = read.ref.key
        if self.is_checking or key not in self.blocks or key not in self._checksums:
            return BlockMissingError("the block is not on disk")
        payload = self.blocks[key][1]
        if crc32(payload) != self._checksums[key]:
            del self._checksums[key]
            return CorruptBlockError("the bytes have changed", reason="checksum")
        read.dst[:] = payload
        return None

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        return [self._write(write) for write in writes]

    def _write(self, write: BlockWrite) -> PutOutcome:
        ref = write.ref
        if self.is_checking:
            return PutOutcome.FULL
        if ref.key in self.blocks and ref.key in self._checksums:
            return PutOutcome.PRESENT
        if ref.depth and ref.parent not in self.blocks:
            return PutOutcome.ORPHAN
        if len(self.blocks) >= self.capacity:
            return PutOutcome.FULL
        self.blocks[ref.key] = (ref, bytes(write.payload))
        self._checksums[ref.key] = crc32(write.payload)
        self._owners[ref.key] = (write.namespace, write.salt)
        return PutOutcome.STORED

    async def children(self, parent: bytes) -> list[BlockRef]:
        return [ref for ref, _ in self.blocks.values() if ref.parent == parent]

    async def touch(self, keys: Sequence[bytes]) -> None:
        pass

    async def clear(self, seed: bytes) -> Removal:
        children = [key for key, (ref, _) in self.blocks.items() if ref.parent == seed]
        below = [await self.clear(key) for key in children]
        kept = self.pinned().intersection(children)
        gone = [key for key in children if key not in kept]
        for key in gone:
            del self.blocks[key]
        self._watcher([RemovedBlock(*self._owners[key], key) for key in gone])
        return Removal(
            len(gone) + sum(each.num_blocks for each in below),
            len(kept) + sum(each.num_pinned for each in below),
        )

    async def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        below = [ref for ref in await self.children(end) if ref.tokens.startswith(beginning)]
        for ref in below:
            below += await self.children(ref.key)
        own = [ref.key for ref in below[::-1]]
        own += [key for key in reversed(keys) if key in self.blocks]
        gone = []
        for key in own:
            is_needed = key in spared or key in self.pinned()
            if not is_needed and not await self.children(key):
                del self.blocks[key]
                gone.append(key)
        self._watcher([RemovedBlock(*self._owners[key], key) for key in gone])
        return len(gone)

    async def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        missing = [key for key in keys if key not in self.blocks or key not in self._checksums]
        if not missing:
            before, holds = self.pins, self.pins.get(keys[-1], {})
            until = max(self.clock() + (ttl_s or math.inf), holds.get(hold, 0.0))
            self.pins = before | {keys[-1]: holds | {hold: until}}
            if len(self.pinned()) > self.capacity // 2:
                self.pins = before
                raise CapacityError("pins would hold more than half of the disk")
        return missing

    async def release(self, key: bytes, hold: bytes) -> bool:
        until = self.pins.get(key, {}).pop(hold, 0.0)
        if not self.pins.get(key):
            self.pins.pop(key, None)
        return until > self.clock()

    async def unpin(self, key: bytes) -> bool:
        return max(self.pins.pop(key, {}).values(), default=0.0) > self.clock()

    def pinned(self) -> set[bytes]:
        """Blocks that a pin protects now."""
        found: set[bytes] = set()
        for key, holds in list(self.pins.items()):
            until = max(list(holds.values()), default=0.0)
            while until > self.clock() and (held := self.blocks.get(key)) is not None:
                found.add(key)
                key = held[0].parent
        return found

    def good(self) -> dict[bytes, tuple[BlockRef, bytes]]:
        """Blocks whose bytes are those that were written: what may be served."""
        return {
            key: (ref, payload)
            for key, (ref, payload) in list(self.blocks.items())
            if crc32(payload) == self._checksums.get(key)
        }

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        self._watcher = watcher

    def stats(self) -> DiskStats:
        blocks = list(self.blocks.values())
        used = sum(len(payload) for _, payload in blocks)
        return DiskStats(
            blocks=len(blocks),
            tokens=sum(len(ref.tokens) // 4 for ref, _ in blocks),
            used_bytes=used,
            file_bytes=used,
            capacity_bytes=0,
            pinned_blocks=len(self.pinned()),
            bad_blocks=0,
            corrupt={},
            evictions=0,
            lock_wait_s=0.0,
            state="ok",
            reason=None,
        )

    async def publish(self, snapshot: Mapping[str, Any]) -> None:
        self.published = snapshot

    async def aclose(self) -> None:
        self.is_closed = True


class FaultyDisk:
    """A disk tier around another that fails, delays and limits on demand.

    fail_reads    called with each block; an error it returns takes the place of the bytes
    is_broken     every operation raises ``TierBrokenError``
    is_held       operations wait until it is false again: a slow disk whose end a test decides
    held          the same for operations of these names alone: others pass them by
    meanwhile     called on the loop with the blocks of a read or a write, just before it happens
    delay_s       added to every operation
    bytes_per_s   limits reads and writes
    sleep         passes the time of delays; one that only moves a fake clock makes tests exact
    """

    def __init__(self, inner: DiskTier) -> None:
        self.inner = inner
        self.fail_reads: Callable[[BlockRef], KVStoreError | None] = lambda ref: None
        self.is_broken = False
        self.is_held = False
        self.held: frozenset[str] = frozenset()
        self.meanwhile: Callable[[Sequence[BlockRef]], None] = lambda refs: None
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    @property
    def is_checking(self) -> bool:
        return self.inner.is_checking

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        await self._pass("probe", 0)
        return await self.inner.probe(refs)

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        await self._pass("read", sum(len(read.dst) for read in reads))
        self.meanwhile([read.ref for read in reads])
        failures = [self.fail_reads(read.ref) for read in reads]
        outcomes = iter(
            await self.inner.read(
                [read for read, failed in zip(reads, failures, strict=True) if failed is None]
            )
        )
        return [failed if failed is not None else next(outcomes) for failed in failures]

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        await self._pass("write", sum(len(write.payload) for write in writes))
        self.meanwhile([write.ref for write in writes])
        return await self.inner.write(writes)

    async def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        await self._pass("find", 0)
        return await self.inner.find(parent, keys)

    async def children(self, parent: bytes) -> list[BlockRef]:
        await self._pass("children", 0)
        return await self.inner.children(parent)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._pass("touch", 0)
        await self.inner.touch(keys)

    async def clear(self, seed: bytes) -> Removal:
        await self._pass("clear", 0)
        return await self.inner.clear(seed)

    async def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        await self._pass("forget", 0)
        return await self.inner.forget(keys, end, beginning, spared)

    async def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        await self._pass("pin", 0)
        return await self.inner.pin(keys, ttl_s, hold)

    async def release(self, key: bytes, hold: bytes) -> bool:
        await self._pass("release", 0)
        return await self.inner.release(key, hold)

    async def unpin(self, key: bytes) -> bool:
        await self._pass("unpin", 0)
        return await self.inner.unpin(key)

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        self.inner.watch_removals(watcher)

    def stats(self) -> DiskStats:
        return self.inner.stats()

    async def publish(self, snapshot: Mapping[str, Any]) -> None:
        await self.inner.publish(snapshot)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _pass(self, name: str, num_bytes: int) -> None:
        while self.is_held or name in self.held:  # noqa: ASYNC110 - set from another thread than the loop's
            await asyncio.sleep(0.001)
        if self.is_broken:
            raise TierBrokenError("the disk is gone", tier="disk")
        pause = self.delay_s + num_bytes / self.bytes_per_s
        if pause > 0:
            await self.sleep(pause)
