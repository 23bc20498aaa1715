"""How full the cache may be: watermarks, quotas, and what happens when the volume is full.

Pages are counted as liblmdb counts them, so its rounding is in. Pages that a transaction frees can
be used by the one after the next at the earliest, and only when no reader is older; the part above
the high watermark is the slack for that.

    0 ────────────── low ─── high ─── limit - reserve ── limit = min(capacity, map)
    admit freely          │ evict twice what comes in, until low is reached
                          └ never admit above this without evicting

When the volume is at its floor, or says ENOSPC, the map is cut to the pages the file has: the tier
recycles them, and tries to grow again after 30 s, doubling to 10 min.
"""

import logging
import os
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from kvstore.config import DiskConfig, parse_size
from kvstore.disk.environment import Environment
from kvstore.disk.ledger import Ledger, Prepared

logger = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 30.0, 600.0
_GROWN_PAGES = 1024


class Room(Enum):
    ENOUGH = auto()  # put now
    EVICTED = auto()  # commit what was evicted and ask again: its pages are not usable yet
    NONE = auto()  # abort: there is too little to evict


class Space:
    """Policy of one writer. All methods belong to its thread."""

    def __init__(
        self, env: Environment, config: DiskConfig, monotonic: Callable[[], float]
    ) -> None:
        self._env = env
        self._high = config.disk_high_watermark
        self._low = config.disk_low_watermark
        self._floor = config.free_space_floor
        self._namespace_quota = _optional_size(config.namespace_quota, "namespace_quota")
        self._salt_quota = _optional_size(config.salt_quota, "salt_quota")
        self._monotonic = monotonic
        self._is_evicting = False
        self._maturing_pages = 0  # freed by the last transaction
        self._retry_at: float | None = None
        self._retry_s = FIRST_RETRY_S
        self._cut_pages = 0  # the file's size when it could not grow
        self.reason: str | None = None

    # --- room in the map --------------------------------------------------------------------------

    def limit_pages(self) -> int:
        env = self._env
        return min(env.map_bytes(env.capacity_bytes) // env.page_size, env.map_pages)

    def needed_pages(self, ledger: Ledger, batch: Sequence[Prepared]) -> int:
        """Pages a batch adds, plus those it copies before it changes them."""
        blocks = sum(ledger.block_pages(block.nbytes) for block in batch)
        return blocks + _copied_pages(ledger, len(batch))

    def make_room(
        self, ledger: Ledger, batch: Sequence[Prepared], protect: Collection[bytes]
    ) -> Room:
        """Evict what the batch needs: leaves, least recently used first, sparing ``protect``."""
        need, limit = self.needed_pages(ledger, batch), self.limit_pages()
        used, _ = ledger.pages_used()
        high, low = int(self._high * limit), int(self._low * limit)
        if need > high:
            return Room.NONE
        over = max(used + need - high, 0)
        if over or self._is_evicting:
            excess = used + need - low
            wanted = max(min(excess, 2 * need), over)
            freed = ledger.evict(wanted, protect) if wanted > 0 else 0
            if freed < over:
                return Room.NONE
            self._is_evicting = excess > freed
        if used + need + self._maturing_pages > limit - _reserve(limit):
            return Room.EVICTED
        return Room.ENOUGH

    def relieve(self, ledger: Ledger, need: int, protect: Collection[bytes]) -> bool:
        """After a full map that the accounts did not foresee: evict some more.

        False when the cache is already below its low watermark: then it is not full, a reader holds
        freed pages, and evicting more would only empty it.
        """
        used, _ = ledger.pages_used()
        if used <= int(self._low * self.limit_pages()):
            return False
        return ledger.evict(need, protect) > 0

    def over_quota(
        self, ledger: Ledger, batch: Sequence[Prepared], protect: Collection[bytes]
    ) -> set[bytes]:
        """Keep namespaces and salts within their quotas; keys of the batch that find no room."""
        refused: set[bytes] = set()
        if self._namespace_quota is not None:
            for namespace in {block.namespace for block in batch}:
                mine = [block for block in batch if block.namespace == namespace]
                held = ledger.namespace_bytes(namespace)
                refused |= self._within(
                    ledger, mine, held, self._namespace_quota, protect, namespace, None
                )
        if self._salt_quota is not None:
            for namespace, salt in {(block.namespace, block.salt) for block in batch}:
                mine = [b for b in batch if (b.namespace, b.salt) == (namespace, salt)]
                held = ledger.usage(namespace, salt).num_bytes
                refused |= self._within(
                    ledger, mine, held, self._salt_quota, protect, namespace, salt
                )
        return refused

    def _within(
        self,
        ledger: Ledger,
        blocks: Sequence[Prepared],
        held: int,
        quota: int,
        protect: Collection[bytes],
        namespace: bytes,
        salt: bytes | None,
    ) -> set[bytes]:
        refused = {block.key for block in blocks if block.nbytes + _RECORD_BYTES > quota}
        blocks = [block for block in blocks if block.key not in refused]
        incoming = sum(block.nbytes + _RECORD_BYTES for block in blocks)
        if held + incoming <= quota:
            return refused
        # Down to the low mark at once: each pass walks past what other namespaces used before.
        target = int(quota * self._low / self._high) - incoming
        pages = -(-max(held - target, 0) // self._env.page_size)
        ledger.evict(pages, protect, namespace=namespace, salt=salt)
        left = (
            ledger.namespace_bytes(namespace)
            if salt is None
            else ledger.usage(namespace, salt).num_bytes
        )
        for block in blocks:
            left += block.nbytes + _RECORD_BYTES
            if left > quota:
                refused.add(block.key)
        return refused

    # --- room on the volume -----------------------------------------------------------------------

    def check_volume(self, num_bytes: int) -> None:
        """Before a group: stop growing at the floor, or try again when it is time."""
        env = self._env
        if self._retry_at is None:
            if env.file_pages < env.map_pages and self._headroom() < num_bytes:
                self.stop_growing("the volume is at its free-space floor")
        elif self._monotonic() < self._retry_at:
            self._stay_cut()  # another process may have grown the file
        elif self._headroom() >= num_bytes:
            self._retry_at = self.reason = None
            env.resize(env.map_bytes(env.capacity_bytes))
        else:
            self._postpone()

    def stop_growing(self, reason: str) -> None:
        """Recycle the pages the file has, from now on."""
        if self._retry_s == FIRST_RETRY_S:  # not again for each try that fails
            path = self._env.directory
            logger.warning("disk tier stops growing path=%s reason=%s", path, reason)
        self.reason = reason
        self._postpone()
        self._stay_cut()

    def adopt(self) -> None:
        """The directory's capacity changed and the map with it: at the floor it stays cut."""
        if self._retry_at is not None:
            self._stay_cut()

    def _stay_cut(self) -> None:
        self._cut_pages = self._env.file_pages
        self._env.resize(self._cut_pages * self._env.page_size)

    def ends(self, ledger: Ledger) -> None:
        """A transaction is about to end: what it freed matures during the next one."""
        self._maturing_pages = ledger.freed_pages + _copied_pages(ledger, ledger.num_changes)

    def stored(self) -> None:
        """A batch was put. Once the file has grown again, the next failure waits 30 s anew.

        A few pages do not count: they may be the last that the volume had.
        """
        if self._retry_at is None and self._env.file_pages >= self._cut_pages + _GROWN_PAGES:
            self._retry_s = FIRST_RETRY_S

    def _postpone(self) -> None:
        self._retry_at = self._monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    def _headroom(self) -> int:
        """Bytes the volume has above its floor."""
        stat = os.statvfs(self._env.directory)
        if self._floor == "auto":
            floor = min(stat.f_blocks * stat.f_frsize // 20, 2 << 30)
        else:
            floor = parse_size(self._floor, "free_space_floor")
        return stat.f_bavail * stat.f_frsize - floor


_RECORD_BYTES = 320  # an index record of a block of 16 tokens, rounded up


def _reserve(limit: int) -> int:
    """Pages that evicting itself needs: it copies tree pages before it changes them."""
    return max(16, limit // 64)


def _copied_pages(ledger: Ledger, num_changes: int) -> int:
    """Tree pages that a transaction copies before it changes them: three a block, at most all."""
    _, tree = ledger.pages_used()
    return min(3 * num_changes, tree) + 8


def _optional_size(value: int | str | None, name: str) -> int | None:
    return None if value is None else parse_size(value, name)
