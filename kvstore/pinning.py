"""Pins: holds on blocks that must not be lost, in this process's memory or on disk.

A pin in memory ends with the process: its blocks may be demoted to host, but the slowest memory
tier does not evict them. One on disk outlives it: the blocks are written, the disk is told, and
from then on no process evicts them there, so memory need not hold them. Until disk knows, it does.
"""

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvstore.backing import Backing
from kvstore.block import TierName
from kvstore.config import check_seconds
from kvstore.disk.pins import NAMELESS
from kvstore.errors import (
    BlockMissingError,
    CapacityError,
    ConfigError,
    KVStoreError,
    StoreClosedError,
)
from kvstore.index import LOADING, NONE
from kvstore.lease import Lookup, Pin
from kvstore.memory import Memory
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind

logger = logging.getLogger(__name__)

_MAX_TRIES = 8  # to get all of a sequence on disk at once, while others evict there


@dataclass(eq=False, slots=True)
class _Persistence:
    """A pin on its way to disk; ``slots`` are what memory holds of its blocks.

    hold      its name there, by which this one is released and no other
    ends_at   clock time when it ends, once disk is told; not later than disk has it
    """

    pin: Pin
    keys: Sequence[bytes]
    slots: list[int]
    ttl_s: float | None
    ends_at: float = math.inf
    num_tries: int = 0
    is_submitted: bool = False
    is_released: bool = False
    hold: bytes = field(default_factory=lambda: secrets.token_bytes(len(NAMELESS)))


class Pinning:
    """Owner thread only.

    held     by slot: holds of any kind, which the evictor respects
    pinned   by slot: pins in memory, which are limited
    """

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        transfer: TransferLoop,
        write_behind: WriteBehind,
    ) -> None:
        self._index = memory.index
        self._slowest = memory.slowest
        self._setting = "host_cache" if memory.host else "device_cache"
        self._backing = backing
        self._transfer = transfer
        self._write_behind = write_behind
        self._coming: list[_Persistence] = []
        self._clock = memory.clock
        self.held: dict[int, int] = {}
        self.pinned: dict[int, int] = {}

    def in_memory(self, lookup: Lookup) -> Pin:
        """Hold what memory has of a prefix. Raises ``CapacityError`` beyond half of the slowest
        memory tier."""
        found = self._index.match(lookup.keys, lookup.runs)
        slots = list(takewhile(self._index.has_bytes, found))
        count, capacity = len(self.pinned.keys() | set(slots)), self._slowest.capacity
        if count > capacity // 2:
            raise CapacityError(
                f"pins would hold {count} of {capacity} blocks; at most half of a tier may be "
                f"pinned: raise {self._setting}, or unpin"
            )
        for holds in (self.held, self.pinned):
            _add(holds, slots)

        def release() -> None:
            for holds in (self.held, self.pinned):
                _subtract(holds, slots)

        return Pin(len(slots), release)

    def on_disk(self, lookup: Lookup, ttl_s: float | None) -> Pin:
        """Have a prefix written and pinned on disk. Raises ``BlockMissingError`` when a part of it
        is in no tier, ``ConfigError`` where disk takes nothing; what fails later is the pin's
        ``error``."""
        if not self._backing.is_written:
            why = "it is open with disk_mode='ro'"
            if not self._backing.is_read_only:
                why = self._backing.why_off or "set disk_cache"
            raise ConfigError(f"pin: persist and ttl need a disk tier that can be written: {why}")
        assert lookup.is_ready, "the probe has not ended"
        check_seconds("ttl", ttl_s)
        index = self._index
        found = [index.find(lookup.ref(i)) for i in range(len(lookup.keys))]
        missing = [
            key
            for key, slot in zip(lookup.keys, found, strict=True)
            if key not in lookup.on_disk and not (index.has_bytes(slot) or self._is_coming(slot))
        ]
        if missing:
            raise BlockMissingError(
                f"{len(missing)} of {len(found)} blocks are in no tier; compute them, then pin"
            )
        if not found:
            return Pin(0, lambda: None)
        slots = [slot for slot in found if index.has_bytes(slot)]
        _add(self.held, slots)
        pin = Pin(
            len(found),
            lambda: self._release(coming),
            is_settled=False,
            has_ended=lambda: self._clock() >= coming.ends_at,
        )
        coming = _Persistence(pin, lookup.keys, slots, ttl_s)
        self._coming.append(coming)
        self._write([slot for slot in slots if not index.is_written[slot]])
        return pin

    def unpin(self, lookup: Lookup, done: Callable[[bool], None]) -> None:
        """See ``BlockStore.unpin``."""
        if self._backing.tier is None or not lookup.keys:
            done(False)
            return
        self._transfer.unpin(lookup.keys[-1], lambda outcome: done(outcome is True))

    def count(self, tier: TierName) -> int:
        """Blocks pinned in memory of which a memory tier holds a copy."""
        ids = self._index.device if tier is TierName.DEVICE else self._index.host
        return sum(ids[slot] != NONE for slot in self.pinned)

    def pump(self) -> None:
        """Tell disk of pins whose blocks it has been given."""
        for coming in self._coming:
            if not coming.is_submitted and not any(map(self._is_being_written, coming.slots)):
                coming.is_submitted = True
                self._submit(coming)

    def _is_coming(self, slot: int) -> bool:
        """Whether the block is being read from disk, which has it then."""
        return slot != NONE and self._index.loading[slot] == LOADING

    def _is_being_written(self, slot: int) -> bool:
        index = self._index
        return slot in index.dirty or bool(index.transfers[slot] and not index.is_written[slot])

    def _write(self, slots: Sequence[int]) -> None:
        """Have these blocks, parents first, written now."""
        for slot in slots:
            self._write_behind.add(slot)
        self._write_behind.urge(slots)

    def _submit(self, coming: _Persistence) -> None:
        def end(outcome: list[bytes] | KVStoreError) -> None:
            if isinstance(outcome, KVStoreError):
                self._settle(coming, outcome)
            elif outcome:
                self._try_again(coming, outcome)
            else:
                self._settle(coming, None)

        if coming.ttl_s is not None:
            coming.ends_at = self._clock() + coming.ttl_s
        self._transfer.pin(coming.keys, coming.ttl_s, coming.hold, end)

    def _try_again(self, coming: _Persistence, missing: Sequence[bytes]) -> None:
        """Disk had no room for some blocks, or another process evicted them: write them again."""
        index = self._index
        slots = [index.slots.get(key, NONE) for key in missing]
        is_whole = all(map(index.has_bytes, slots))
        coming.num_tries += 1
        if coming.is_released or not is_whole or coming.num_tries == _MAX_TRIES:
            error = f"{len(missing)} of {len(coming.keys)} blocks cannot be kept on disk"
            self._settle(coming, CapacityError(f"{error}: raise disk_cache_size, or unpin others"))
            return
        for slot in slots:
            index.is_written[slot] = 0
        self._write(slots)
        coming.is_submitted = False

    def _settle(self, coming: _Persistence, error: KVStoreError | None) -> None:
        """The end of a pin's way: disk holds the blocks now, or it will not."""
        self._coming.remove(coming)
        _subtract(self.held, coming.slots)
        coming.pin.error = error
        coming.pin.is_settled = True
        if error is not None:
            logger.warning("blocks=%d could not be pinned on disk: %s", len(coming.keys), error)
        elif coming.is_released:
            self._release_on_disk(coming)

    def _release(self, coming: _Persistence) -> None:
        coming.is_released = True
        if coming.pin.is_settled and coming.pin.error is None:
            self._release_on_disk(coming)

    def _release_on_disk(self, coming: _Persistence) -> None:
        def end(_: object) -> None:
            """A hold that cannot be given back because the disk is gone holds nothing any more."""
            coming.pin.is_settled = True

        try:
            self._transfer.release(coming.keys[-1], coming.hold, end)
        except StoreClosedError as error:
            raise StoreClosedError(
                f"{error}: the blocks stay pinned on disk; kvstore unpin releases them"
            ) from None
        coming.pin.is_settled = False


def _add(holds: dict[int, int], slots: Sequence[int]) -> None:
    for slot in slots:
        holds[slot] = holds.get(slot, 0) + 1


def _subtract(holds: dict[int, int], slots: Sequence[int]) -> None:
    for slot in slots:
        holds[slot] -= 1
        if holds[slot] == 0:
            del holds[slot]
