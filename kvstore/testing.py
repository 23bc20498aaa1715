"""Stand-ins for tiers and time, for tests of the store and of what is built on it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.disk import DiskEntry, DiskStats
from kvstore.errors import BlockMissingError, KVStoreError, OutOfBlocksError, TierBrokenError
from kvstore.hashing import encode_tokens
from kvstore.lease import Lease, Lookup, LookupState
from kvstore.store import BlockStore
from kvstore.tiers.base import BlockRead, DiskTier, RemovedBlock
from kvstore.tiers.host import HostPool


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
    _owners: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)  # namespace, salt
    _watcher: Callable[[Sequence[RemovedBlock]], None] = lambda removed: None

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        found = []
        for ref in refs:
            held, payload = self.blocks.get(ref.key, (None, b""))
            if held != ref:
                break
            found.append(DiskEntry(ref.key, len(payload), "raw", len(payload)))
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
        self._owners[ref.key] = (write.namespace, write.salt)
        return PutOutcome.STORED

    async def children(self, parent: bytes) -> list[BlockRef]:
        return [ref for ref, _ in self.blocks.values() if ref.parent == parent]

    async def touch(self, keys: Sequence[bytes]) -> None:
        pass

    async def clear(self, seed: bytes) -> int:
        children = [key for key, (ref, _) in self.blocks.items() if ref.parent == seed]
        below = [await self.clear(key) for key in children]
        for key in children:
            del self.blocks[key]
        self._watcher([RemovedBlock(*self._owners[key], key) for key in children])
        return len(children) + sum(below)

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        self._watcher = watcher

    def stats(self) -> DiskStats:
        used = sum(len(payload) for _, payload in self.blocks.values())
        return DiskStats(
            blocks=len(self.blocks),
            tokens=sum(len(ref.tokens) // 4 for ref, _ in self.blocks.values()),
            used_bytes=used,
            file_bytes=used,
            capacity_bytes=0,
            bad_blocks=0,
            corrupt={},
            evictions=0,
            lock_wait_s=0.0,
            state="ok",
            reason=None,
        )

    async def aclose(self) -> None:
        self.is_closed = True


class FaultyDisk:
    """A disk tier around another that fails, delays and limits on demand.

    fail_reads    called with each block; an error it returns takes the place of the bytes
    is_broken     every operation raises ``TierBrokenError``
    is_held       operations wait until it is false again: a slow disk whose end a test decides
    delay_s       added to every operation
    bytes_per_s   limits reads and writes
    sleep         passes the time of delays; one that only moves a fake clock makes tests exact
    """

    def __init__(self, inner: DiskTier) -> None:
        self.inner = inner
        self.fail_reads: Callable[[BlockRef], KVStoreError | None] = lambda ref: None
        self.is_broken = False
        self.is_held = False
        self.delay_s = 0.0
        self.bytes_per_s = float("inf")
        self.sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

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

    async def children(self, parent: bytes) -> list[BlockRef]:
        await self._pass(0)
        return await self.inner.children(parent)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._pass(0)
        await self.inner.touch(keys)

    async def clear(self, seed: bytes) -> int:
        await self._pass(0)
        return await self.inner.clear(seed)

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        self.inner.watch_removals(watcher)

    def stats(self) -> DiskStats:
        return self.inner.stats()

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _pass(self, num_bytes: int) -> None:
        while self.is_held:  # noqa: ASYNC110 - set from another thread than the loop's
            await asyncio.sleep(0.001)
        if self.is_broken:
            raise TierBrokenError("the disk is gone", tier="disk")
        pause = self.delay_s + num_bytes / self.bytes_per_s
        if pause > 0:
            await self.sleep(pause)


class FakeEngine:
    """Plays the engine's part on a store in host memory: no model, but bytes that can be checked.

    Each position of a block holds a digest of all tokens up to it, as K and V depend on them. Every
    position that a lease claims to have cached is compared with that.
    """

    def __init__(self, store: BlockStore) -> None:
        assert isinstance(store.device, HostPool)
        self.store = store
        self._block_size = store.layout.block_size
        runs = store.layout.num_layers * 2
        # [num_blocks, layers and K or V, position, bytes]
        self._rows = store.device.rows.reshape(store.device.capacity, runs, self._block_size, -1)

    def start(self, token_ids: Sequence[int], salt: str = "") -> Lease:
        """Look up and reserve until the lease is ready; waits for transfers.

        Raises ``OutOfBlocksError`` when waiting does not help.
        """
        lookup = self.look_up(token_ids, salt)
        while True:
            lease = self.reserve(lookup, len(token_ids))
            while not lease.is_ready:
                self.store.run_until_idle(1.0)
            if not lease.is_provisional:
                self.check_cached(lease, token_ids)
                return lease
            self.store.release(lease)

    def look_up(self, token_ids: Sequence[int], salt: str = "", **options: Any) -> Lookup:
        lookup = self.store.lookup(encode_tokens(token_ids), salt, **options)
        while not lookup.is_ready:
            self.store.run_until_idle(1.0)
        return lookup

    def look_up_memory(self, token_ids: Sequence[int]) -> Lookup:
        """A lookup that takes an unanswered probe for a miss."""
        lookup = self.store.lookup(encode_tokens(token_ids))
        lookup.state = LookupState.READY
        return lookup

    def reserve(self, lookup: Lookup, num_tokens: int) -> Lease:
        while True:
            try:
                return self.store.reserve(lookup, num_tokens)
            except OutOfBlocksError as error:
                if error.available_blocks < error.needed_blocks:
                    raise
                self.store.run_until_idle(1.0)
                self.store.flush(1.0)

    def compute(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """Fill the positions the lease has not cached, and commit."""
        for at in range(lease.num_cached_tokens(self._block_size), len(token_ids)):
            self._position(lease, at)[:] = self._content(token_ids, at)
        self.store.commit(lease, encode_tokens(token_ids), len(token_ids))

    def run(self, token_ids: Sequence[int], salt: str = "") -> Lookup:
        """One whole request; returns its lookup, whose sources tell what was cached where."""
        lease = self.start(token_ids, salt)
        self.compute(lease, token_ids)
        self.store.release(lease)
        return lease.lookup

    def check_cached(self, lease: Lease, token_ids: Sequence[int]) -> None:
        for at in range(lease.num_cached_tokens(self._block_size)):
            served = self._position(lease, at)
            assert (served == self._content(token_ids, at)).all(), "a wrong block was served"

    def _position(self, lease: Lease, at: int) -> npt.NDArray[np.uint8]:
        """The bytes of one position, in all layers."""
        block, offset = divmod(at, self._block_size)
        return self._rows[lease.block_ids[block], :, offset]

    def _content(self, token_ids: Sequence[int], at: int) -> npt.NDArray[np.uint8]:
        digest = sha256(encode_tokens(token_ids[: at + 1])).digest()
        return np.resize(np.frombuffer(digest, np.uint8), self._rows.shape[-1])
