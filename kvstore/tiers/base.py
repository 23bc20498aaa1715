"""What the store asks of its tiers.

    pool     a memory tier: ids in [0, capacity) and the bytes behind them
    copier   moves whole blocks between the device pool and host memory
    disk     an asynchronous store of blocks by key

The protocols are narrow on purpose: a wrapper that delays, limits or breaks a tier implements the
same few methods.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.disk import DiskEntry, DiskStats
from kvstore.disk.pins import NAMELESS
from kvstore.errors import KVStoreError

Rows = npt.NDArray[np.uint8]  # [num_rows, block_bytes] in host memory


class BlockPool(Protocol):
    """A memory tier of ``capacity`` blocks. Only the owner thread takes and gives back ids."""

    capacity: int

    @property
    def num_free(self) -> int: ...

    def free_ids(self) -> set[int]:
        """For ``check()``."""

    def allocate(self, count: int) -> list[int]:
        """``count`` ids in ascending order; the caller has made sure that so many are free."""

    def free(self, block_id: int) -> None: ...

    def payload(self, block_id: int) -> memoryview | None:
        """The block's bytes, writable; None where the processor cannot address them."""


@dataclass(frozen=True, slots=True)
class CopierStats:
    """Host memory that copies use. ``pageable_bytes`` were meant to be page-locked; ``reason`` says
    why they are not, and is empty when all is well."""

    page_locked_bytes: int = 0
    pageable_bytes: int = 0
    reason: str = ""


class BlockCopier(Protocol):
    """Copies blocks between the device pool and rows in host memory.

    The coroutines run on the transfer loop. When one returns or raises, no copy of its blocks is
    under way any more. Cancelling one leaves its copy running: the ids stay taken.
    """

    def adopt(self, rows: Rows) -> None:
        """Owner thread, once for each array before its first copy: page-lock it if that helps.

        ``rows`` stays the caller's, and stays alive until ``close``.
        """

    def fence(self) -> Any:
        """Owner thread: a mark after all device work submitted so far. Does not wait for it."""

    async def copy_out(
        self, block_ids: Sequence[int], rows: Rows, row_ids: Sequence[int], fence: Any
    ) -> None:
        """Device blocks into host rows after ``fence``; returns when the bytes are there."""

    async def copy_in(
        self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int], fence: Any
    ) -> None:
        """Host rows into device blocks after ``fence``; returns when the bytes are there."""

    def copy_within(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        """Owner thread: whole device blocks into others, in order with the device's own work.

        No destination is a source or named twice. On a CPU the bytes are there on return; on CUDA
        the copy is enqueued on the current stream.
        """

    def stats(self) -> CopierStats: ...

    def close(self) -> None:
        """Waits for copies under way, then undoes ``adopt``. The owner of the transfer loop calls
        it after the loop has ended."""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to be read: ``dst`` is caller-owned, writable, exactly one block long."""

    ref: BlockRef
    dst: memoryview


@dataclass(frozen=True, slots=True)
class RemovedBlock:
    """A block that has left the disk tier, of any namespace."""

    namespace: bytes
    salt: bytes
    key: bytes


class DiskTier(Protocol):
    """The disk tier as the transfer loop sees it.

    Cancelling an await leaves the operation running: borrowed memory stays borrowed until the
    worker thread has returned.
    """

    @property
    def is_checking(self) -> bool:
        """Whether its file is being checked before it serves anything: keep what it is to take.
        Any thread."""

    async def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        """Entries of the longest run of ``refs``, from the first on, that disk holds."""

    async def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        """The longest run of blocks with these keys that disk holds, the first below ``parent``."""

    async def children(self, parent: bytes) -> list[BlockRef]:
        """Some of the blocks that hang on a block or seed."""

    async def read(self, reads: Sequence[BlockRead]) -> list[KVStoreError | None]:
        """Fill every ``dst`` with checked bytes; what went wrong stands in its place."""

    async def write(self, writes: Sequence[BlockWrite]) -> list[PutOutcome]:
        """Put blocks, parents before children, in one transaction. Raises ``TierBrokenError``."""

    async def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use, leaf first and root last."""

    async def clear(self, seed: bytes) -> Removal:
        """Drop every block that descends from ``seed`` and is not pinned.

        Raises ``TierBrokenError`` when it cannot be written.
        """

    async def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        """Drop a sequence, root first, and what continues ``end``, its last key or the seed, with
        tokens that begin so, except what is spared or pinned, what else continues the sequence, and
        what leads to either; how many went. Raises ``TierBrokenError`` when it cannot be written.
        """

    async def pin(
        self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        """Keep a sequence, root first, from leaving to make room, for ``ttl_s`` seconds or until
        ``unpin``; all of it or nothing: the keys that are missing. The later end of two counts.
        ``hold`` is a name of 8 bytes for ``release``.

        Raises ``CapacityError`` when pins would hold more than half of the tier,
        ``TierBrokenError`` when it cannot be written.
        """

    async def release(self, key: bytes, hold: bytes) -> bool:
        """Give back one hold of the sequence that ends here; whether it was there. Others stay."""

    async def unpin(self, key: bytes) -> bool:
        """Release the pin of the sequence that ends here, whoever set it; whether there was one."""

    def watch_removals(self, watcher: Callable[[Sequence[RemovedBlock]], None]) -> None:
        """Tell ``watcher`` which blocks this tier's own operations removed. It is called on the
        loop's thread, before the operation returns and after those before it have."""

    def stats(self) -> DiskStats: ...

    async def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Let other processes read how this one is doing."""

    async def aclose(self) -> None: ...
