"""The transfer side: one asyncio loop in its own thread that moves blocks between tiers.

The owner thread submits a job and a callback; the loop runs the job and posts the outcome; the
owner applies the callbacks in ``poll()``. The loop never touches the index, and the owner never
waits for a transfer. A job owns the memory it was given until its callback has been applied.

While the model runs, writes go in slices: on a CPU, copying beside a forward that uses all cores
costs the forward several times the copying, since its threads wait for the slowest of them.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncio_throttle import Throttler

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.disk import DiskEntry
from kvstore.errors import KVStoreError, StoreClosedError, TierBrokenError
from kvstore.tiers.base import BlockCopier, BlockPool, BlockRead, DiskTier, Rows
from kvstore.tiers.host import HostPool

logger = logging.getLogger(__name__)

T = TypeVar("T")
Done = Callable[[T | KVStoreError], None]

_SLICE_BYTES = 1 << 20  # written at once while the model runs: about a millisecond of copying
_DUTY = 0.25  # share of the time that such slices may take


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A block to be written: ``source`` is a device block id, or borrowed bytes in host memory."""

    ref: BlockRef
    namespace: bytes
    salt: bytes
    source: int | memoryview


@dataclass(frozen=True, slots=True)
class Probed:
    """What disk holds of a prefix, and some of the children of the last block it holds."""

    entries: list[DiskEntry]
    below: list[BlockRef]


class TransferLoop:
    """Moves blocks for one owner. Created, called and closed by the owner thread.

    device, copier   where hot blocks are and how they are copied
    host             the host pool's rows, None without a host tier
    disk             the disk tier, None without one
    staging          rows between device and disk where the processor cannot address the device
    on_completion    called from the loop's thread whenever ``poll()`` has something to do
    """

    def __init__(
        self,
        device: BlockPool,
        copier: BlockCopier,
        *,
        host: Rows | None,
        disk: DiskTier | None,
        staging: HostPool | None,
        block_bytes: int,
        write_bytes_per_s: float,
        on_completion: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._copier = copier
        self._host = host
        self._disk = disk
        self._staging = staging
        self._on_completion = on_completion
        self._clock = clock
        self._completions: deque[tuple[Done[Any], Any, float]] = deque()
        self._posted = threading.Condition()
        self.finished_at = 0.0  # clock time at which the job ended whose callback is applied
        self.is_model_busy = False  # set by the owner, read by the loop: writes take slices
        self._num_pending = 0
        self._num_promoting = 0  # loop thread: loads under way; cleaning yields to them
        self._closing = False
        for rows in (host, staging.rows if staging else None):
            if rows is not None:
                copier.adopt(rows)
        self._loop = asyncio.new_event_loop()
        # The throttle counts starts within a period: whole blocks, and what makes them exact.
        blocks_per_s = min(write_bytes_per_s / block_bytes, float(sys.maxsize))
        rate = max(1, round(blocks_per_s))
        self._throttle = Throttler(rate_limit=rate, period=rate / blocks_per_s)
        self._slice_blocks = max(1, _SLICE_BYTES // block_bytes)
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._staging_room = asyncio.Condition()
        # Half of it at a time, so that a load need not wait for the end of a write.
        self._most_staged = staging.capacity // 2 if staging else sys.maxsize
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Jobs whose callback has not been applied yet."""
        return self._num_pending

    def poll(self) -> int:
        """Apply what has finished; returns how many jobs that were."""
        count = 0
        while self._completions:
            done, outcome, self.finished_at = self._completions.popleft()
            self._num_pending -= 1
            count += 1
            done(outcome)
        return count

    def has_completions(self) -> bool:
        return bool(self._completions)

    def wait(self, timeout_s: float) -> None:
        """Until ``poll()`` has something to do, or the time has run out."""
        with self._posted:
            if not self._completions:
                self._posted.wait(timeout_s)

    def run(self, job: Coroutine[Any, Any, T], done: Done[T]) -> None:
        """A job of the caller's."""
        self._submit(job, done)

    def probe(self, refs: Sequence[BlockRef], below: bool, done: Done[Probed]) -> None:
        """Find the longest run of ``refs`` on disk, and with ``below`` what hangs on its end."""
        self._submit(self._probe(refs, below), done)

    def find(self, parent: bytes, keys: Sequence[bytes], done: Done[list[BlockRef]]) -> None:
        """What disk holds of blocks that follow each other below ``parent``."""
        assert self._disk is not None
        self._submit(self._disk.find(parent, keys), done)

    def read(
        self,
        refs: Sequence[BlockRef],
        block_ids: Sequence[int],
        done: Done[list[KVStoreError | None]],
    ) -> None:
        """Disk into device blocks."""
        self._submit(self._read(refs, block_ids, self._copier.fence()), done)

    def promote(self, host_ids: Sequence[int], block_ids: Sequence[int], done: Done[None]) -> None:
        """Host into device blocks."""
        self._submit(self._promote(host_ids, block_ids, self._copier.fence()), done)

    def demote(self, block_ids: Sequence[int], host_ids: Sequence[int], done: Done[None]) -> None:
        """Device into host blocks."""
        assert self._host is not None
        fence = self._copier.fence()
        self._submit(self._copier.copy_out(block_ids, self._host, host_ids, fence), done)

    def write(
        self,
        writes: Sequence[PendingWrite],
        done: Done[list[PutOutcome]],
    ) -> None:
        """Blocks to disk, parents before children."""
        self._submit(self._write(writes, self._copier.fence()), done)

    def touch(self, keys: Sequence[bytes]) -> None:
        assert self._disk is not None
        self._submit(self._disk.touch(keys), _ignore)

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Let other processes read it. Not a transfer: nobody waits for it."""
        if self._disk is not None and not self._closing:
            asyncio.run_coroutine_threadsafe(self._publish(self._disk, snapshot), self._loop)

    @staticmethod
    async def _publish(disk: DiskTier, snapshot: Mapping[str, Any]) -> None:
        with suppress(KVStoreError, OSError):  # closed or gone: others see that, too
            await disk.publish(snapshot)

    def clear(self, seed: bytes, done: Done[Removal]) -> None:
        assert self._disk is not None
        self._submit(self._disk.clear(seed), done)

    def forget(
        self,
        keys: Sequence[bytes],
        end: bytes,
        beginning: bytes,
        spared: Container[bytes],
        done: Done[int],
    ) -> None:
        assert self._disk is not None
        self._submit(self._disk.forget(keys, end, beginning, spared), done)

    def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes, done: Done[list[bytes]]
    ) -> None:
        assert self._disk is not None
        self._submit(self._disk.pin(keys, ttl_s, hold), done)

    def release(self, key: bytes, hold: bytes, done: Done[bool]) -> None:
        """Give back one hold of a pin."""
        assert self._disk is not None
        self._submit(self._disk.release(key, hold), done)

    def unpin(self, key: bytes, done: Done[bool]) -> None:
        assert self._disk is not None
        self._submit(self._disk.unpin(key), done)

    def hurry(self) -> None:
        """From now on writes are not throttled: the process is about to end."""
        self._loop.call_soon_threadsafe(setattr, self._throttle, "rate_limit", sys.maxsize)

    def close(self) -> None:
        """Waits for the jobs under way (without applying callbacks), then ends the threads.

        A disk tier that cannot be closed in order is said in the log.
        """
        if self._closing:
            return
        self._closing = True
        try:
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        except KVStoreError as error:
            logger.warning("the disk tier was not closed in order: %s", error)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._copier.close()
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _submit(self, job: Coroutine[Any, Any, T], done: Done[T]) -> None:
        if self._closing:
            job.close()
            raise StoreClosedError("the store is closed")
        self._num_pending += 1
        asyncio.run_coroutine_threadsafe(self._finish(job, done), self._loop)

    async def _finish(self, job: Coroutine[Any, Any, T], done: Done[T]) -> None:
        outcome: T | KVStoreError
        try:
            outcome = await job
        except KVStoreError as error:
            outcome = error
        except Exception as error:
            logger.exception("a transfer failed")
            outcome = TierBrokenError(f"a transfer failed: {error}", tier="transfer")
            outcome.__cause__ = error
        self._completions.append((done, outcome, self._clock()))
        with self._posted:
            self._posted.notify_all()
        if self._on_completion is not None:
            self._on_completion()

    async def _probe(self, refs: Sequence[BlockRef], below: bool) -> Probed:
        assert self._disk is not None
        entries = await self._disk.probe(refs)
        if not below:
            return Probed(entries, [])
        end = refs[len(entries) - 1].key if entries else refs[0].parent
        return Probed(entries, await self._disk.children(end))

    async def _promote(self, host_ids: Sequence[int], block_ids: Sequence[int], fence: Any) -> None:
        assert self._host is not None
        with self._promoting():
            await self._copier.copy_in(self._host, host_ids, block_ids, fence)

    async def _read(
        self, refs: Sequence[BlockRef], block_ids: Sequence[int], fence: Any
    ) -> list[KVStoreError | None]:
        assert self._disk is not None
        with self._promoting():
            if self._staging is None:
                rows = [self._payload(block) for block in block_ids]
                return await self._disk.read(list(map(BlockRead, refs, rows)))
            outcomes: list[KVStoreError | None] = []
            for start in range(0, len(refs), self._most_staged):
                part = slice(start, start + self._most_staged)
                outcomes += await self._read_staged(refs[part], block_ids[part], fence)
            return outcomes

    async def _read_staged(
        self, refs: Sequence[BlockRef], block_ids: Sequence[int], fence: Any
    ) -> list[KVStoreError | None]:
        assert self._disk is not None
        async with self._staged(len(refs)) as (staging, row_ids):
            rows = [staging.payload(row) for row in row_ids]
            outcomes = await self._disk.read(list(map(BlockRead, refs, rows)))
            good = [i for i, outcome in enumerate(outcomes) if outcome is None]
            await self._copier.copy_in(
                staging.rows,
                [row_ids[i] for i in good],
                [block_ids[i] for i in good],
                fence,
            )
            return outcomes

    async def _write(self, writes: Sequence[PendingWrite], fence: Any) -> list[PutOutcome]:
        """One transaction where the staging holds it; slices with pauses while the model runs."""
        outcomes: list[PutOutcome] = []
        while len(outcomes) < len(writes):
            await self._quiet.wait()
            is_paced = self.is_model_busy
            count = min(self._slice_blocks if is_paced else len(writes), self._most_staged)
            part = writes[len(outcomes) : len(outcomes) + count]
            for _ in part:
                async with self._throttle:
                    pass
            started = self._loop.time()
            outcomes += await self._write_now(part, fence)
            if is_paced and len(outcomes) < len(writes):
                await asyncio.sleep((self._loop.time() - started) * (1 / _DUTY - 1))
        return outcomes

    async def _write_now(self, writes: Sequence[PendingWrite], fence: Any) -> list[PutOutcome]:
        assert self._disk is not None
        on_device = [write for write in writes if isinstance(write.source, int)]
        if self._staging is None or not on_device:
            return await self._disk.write([self._as_write(write) for write in writes])
        async with self._staged(len(on_device)) as (staging, row_ids):
            block_ids = [write.source for write in writes if isinstance(write.source, int)]
            await self._copier.copy_out(block_ids, staging.rows, row_ids, fence)
            payloads = iter([staging.payload(row) for row in row_ids])
            return await self._disk.write(
                [
                    self._as_write(write, next(payloads) if isinstance(write.source, int) else None)
                    for write in writes
                ]
            )

    def _as_write(self, write: PendingWrite, payload: memoryview | None = None) -> BlockWrite:
        if payload is None:
            source = write.source
            payload = self._payload(source) if isinstance(source, int) else source
        return BlockWrite(write.ref, write.namespace, write.salt, payload)

    def _payload(self, block_id: int) -> memoryview:
        payload = self._device.payload(block_id)
        assert payload is not None, "the device is not addressable and there is no staging"
        return payload

    @contextmanager
    def _promoting(self) -> Iterator[None]:
        """Holds back writes to disk: a promotion has a request waiting for it."""
        self._num_promoting += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_promoting -= 1
            if self._num_promoting == 0:
                self._quiet.set()

    @asynccontextmanager
    async def _staged(self, count: int) -> AsyncIterator[tuple[HostPool, list[int]]]:
        """``count`` staging rows, waited for until other jobs have given theirs back."""
        assert self._staging is not None
        async with self._staging_room:
            await self._staging_room.wait_for(
                lambda: self._staging is not None and self._staging.num_free >= count
            )
            row_ids = self._staging.allocate(count)
        try:
            yield self._staging, row_ids
        finally:
            async with self._staging_room:
                for row in row_ids:
                    self._staging.free(row)
                self._staging_room.notify_all()

    async def _shut_down(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*others, return_exceptions=True)  # theirs to report
        if self._disk is not None:
            await self._disk.aclose()


def _ignore(outcome: object) -> None:
    """For jobs whose failure costs nothing: a lost touch makes a block look older."""
