"""Stand-ins for tiers and time, for tests of the store and of what is built on it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.disk import DiskEntry, DiskStats
from kvstore.errors import BlockMissingError, CorruptBlockError, KVStoreError, TierBrokenError
from kvstore.tiers.base import BlockRead, DiskTier


class FakeClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class MemoryDisk:
    """A disk tier in a dictionary, with the rules of the real one: a block needs its parent.

    ``capacity`` in blocks; beyond it puts answer ``FULL``.
    """

    capacity: int = 1 << 30
    blocks: dict[bytes, tuple[BlockRef, bytes]] = field(default_factory=dict)
    num_reads: int = 0
    is_closed: bool = False

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        found = []
        for ref in refs:
            if ref.key not in self.blocks or self.blocks[ref.key][0] != ref:
                break
            found.append(DiskEntry(ref.key, len(self.blocks[ref.key][1]), "raw"))
        return found

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        return [self._read(read) for read in reads]

    def _read(self, read: BlockRead) -> KVStoreError | None:
        self.num_reads += 1
        if read.ref.key not in self.blocks:
            return BlockMissingError("the block is not on disk")
        read.dst[:] = self.blocks[read.ref.key][1]
        return None

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        return [self._write(write) for write in writes]

    def _write(self, write: BlockWrite) -> PutOutcome:
        ref = write.ref
        if ref.key in self.blocks:
            return PutOutcome.PRESENT
        if ref.depth and ref.parent not in self.blocks:
            return PutOutcome.ORPHAN
        if len(self.blocks) >= self.capacity:
            return PutOutcome.FULL
        self.blocks[ref.key] = (ref, bytes(write.payload))
        return PutOutcome.STORED

    async def touch(self, keys: Sequence[bytes]) -> None:
        pass

    async def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self.blocks.pop(key, None) is not None for key in keys)

    def stats(self) -> DiskStats:
        raise AttributeError("filled in below")

    async def aclose(self) -> None:
        self.is_closed = True


class FaultyDisk:
    """A disk tier around another that fails, delays and limits on demand.

    fail_reads    called with each block; an error it returns takes the place of the bytes
    is_broken     every operation raises ``TierBrokenError``
    gate          cleared, it holds operations back until it is set again (a slow disk whose end the
                  test decides)
    """

    def __init__(self, inner: DiskTier) -> None:
        self.inner = inner
        self.fail_reads: Callable[[BlockRef], KVStoreError | None] = lambda ref: None
        self.is_broken = False
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        await self._pass(0)
        return await self.inner.probe(refs)

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        await self._pass(sum(len(read.dst) for read in reads))
        failures = [self.fail_reads(read.ref) for read in reads]
        outcomes = iter(
            await self.inner.read(
                [read for read, failed in zip(reads, failures, strict=True) if failed is None]
            )
        )
        return [failed if failed is not None else next(outcomes) for failed in failures]

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        await self._pass(sum(len(write.payload) for write in writes))
        return await self.inner.write(writes)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._pass(0)
        await self.inner.touch(keys)

    async def remove(self, keys: Sequence[bytes]) -> int:
        await self._pass(0)
        return await self.inner.remove(keys)

    def stats(self) -> DiskStats:
        return self.inner.stats()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _pass(self, num_bytes: int) -> None:
        if self.is_broken:
            raise TierBrokenError("the disk is gone", tier="disk")
        pause = self.delay_s + num_bytes / self.bytes_per_s
        if pause > 0:
            await asyncio.sleep(pause)


__all__ = ["CorruptBlockError", "FakeClock", "FaultyDisk", "MemoryDisk"]
