"""The disk tier for the transfer loop: a ``DiskStore`` behind its named threads."""

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.disk import DiskEntry, DiskStats, DiskStore
from kvstore.disk.pins import NAMELESS
from kvstore.errors import KVStoreError
from kvstore.tiers.base import BlockRead, RemovedBlock

T = TypeVar("T")

_BLOCKS_A_READ_TASK = 16  # large enough to hide a thread hand-over, small enough to share out


class LmdbTier:
    """Reads on a few threads, all changes on one: an LMDB write transaction must begin and commit
    on the same thread, and two writers would only wait for each other."""

    def __init__(self, disk: DiskStore, *, num_readers: int = 2) -> None:
        self._disk = disk
        self._readers = ThreadPoolExecutor(num_readers, "kv-disk-read")
        self._writer = ThreadPoolExecutor(1, "kv-disk-write")
        self._watcher: Callable[[Sequence[RemovedBlock]], None] | None = None

    @property
    def is_checking(self) -> bool:
        return self._disk.is_checking

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        return await self._run(self._readers, self._disk.probe, refs)

    async def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        return await self._run(self._readers, self._disk.find, parent, keys)

    async def children(self, parent: bytes) -> list[BlockRef]:
        return await self._run(self._readers, self._disk.children, parent)

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        parts = [
            reads[start : start + _BLOCKS_A_READ_TASK]
            for start in range(0, len(reads), _BLOCKS_A_READ_TASK)
        ]
        done = await asyncio.gather(
            *(self._run(self._readers, self._read_sync, part) for part in parts),
            return_exceptions=True,  # until the last of them has left the memory that it fills
        )
        outcomes: list[KVStoreError | None] = []
        for part in done:
            if isinstance(part, BaseException):
                raise part
            outcomes += part
        return outcomes

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        return await self._change(self._disk.put_group, writes)

    async def touch(self, keys: Sequence[bytes]) -> None:
        await self._change(self._disk.touch, keys)

    async def clear(self, seed: bytes) -> Removal:
        return await self._change(self._disk.clear, seed)

    async def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        return await self._change(self._disk.forget, keys, end, beginning, spared)

    async def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        return await self._change(lambda: self._disk.pin(keys, ttl_s=ttl_s, hold=hold))

    async def release(self, key: bytes, hold: bytes) -> bool:
        return await self._change(self._disk.release, key, hold)

    async def unpin(self, key: bytes) -> bool:
        return await self._change(self._disk.unpin, key)

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        self._disk.take_removed()
        self._watcher = watcher

    def stats(self) -> DiskStats:
        return self._disk.stats()

    async def publish(self, snapshot: Mapping[str, Any]) -> None:
        await self._run(self._readers, self._disk.publish, snapshot)

    async def aclose(self) -> None:
        """Waits for what is under way, then closes the environment, flushed or not."""
        try:
            await self._run(self._writer, self._disk.flush)
        finally:
            self._readers.shutdown(wait=True)
            self._writer.shutdown(wait=True)
            self._disk.close()

    async def _change(self, change: Callable[..., T], *arguments: object) -> T:
        """Run a change on the writer's thread, and report what it removed."""

        def run() -> tuple[T, list[RemovedBlock]]:
            outcome = change(*arguments)
            if self._watcher is None:
                return outcome, []
            return outcome, [RemovedBlock(*removed) for removed in self._disk.take_removed()]

        outcome, removed = await self._run(self._writer, run)
        if removed and self._watcher is not None:
            self._watcher(removed)
        return outcome

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    def _read_sync(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        try:
            return self._disk.read_many([(read.ref, read.dst) for read in reads])
        except KVStoreError as error:  # closed meanwhile
            return [error for _ in reads]
