"""Forgetting: cached blocks leave tiers on purpose, and not because their room is needed.

What anybody else needs stays: blocks in use, on their way, or pinned, and where one sequence is
forgotten, blocks that others continue, and all that leads to them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvstore.backing import Backing
from kvstore.block import Removal, TierName
from kvstore.errors import KVStoreError
from kvstore.eviction import Evictor
from kvstore.hashing import chain_seed, salt_digest
from kvstore.index import NONE
from kvstore.lease import Lookup
from kvstore.memory import Memory
from kvstore.pinning import Pinning
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind


class Forgetting:
    """Owner thread only."""

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        transfer: TransferLoop,
        evictor: Evictor,
        pinning: Pinning,
        write_behind: WriteBehind,
    ) -> None:
        self._memory = memory
        self._index = memory.index
        self._backing = backing
        self._transfer = transfer
        self._evictor = evictor
        self._held = pinning.held
        self._write_behind = write_behind

    def reset(self, tier: TierName | None, salt: str | None) -> int:
        """See ``BlockStore.reset``."""
        index, skipped = self._index, 0
        digest = None if salt is None else salt_digest(salt)
        for slot in list(index.used_slots()):
            if digest is not None and index.salt[slot] != digest:
                continue
            if self._is_needed(slot):
                skipped += 1
                continue
            on_host = index.host[slot] != NONE
            if tier in (None, TierName.DEVICE) and index.device[slot] != NONE:
                self._evictor.policy.forget(slot)  # dropping would walk its order up to there
                self._evictor.drop_device(slot)
            if tier in (None, TierName.HOST) and on_host:
                self._evictor.drop_host(slot)
        for each in (TierName.DEVICE, TierName.HOST):
            if not skipped and tier in (None, each):
                self._memory.events.cleared(each, digest)
        return skipped

    def forget(
        self,
        lookup: Lookup,
        beginning: bytes,
        done: Callable[[Mapping[TierName, int] | KVStoreError], None],
    ) -> None:
        """See ``BlockStore.forget``."""
        end = lookup.parent(len(lookup.keys))
        dropped, kept = self._forget_in_memory(lookup.keys, end, beginning)
        if self._backing.tier is None:
            done(dropped)
            return

        def finish(outcome: int | KVStoreError) -> None:
            done({**dropped, TierName.DISK: outcome} if isinstance(outcome, int) else outcome)

        self._transfer.forget(lookup.keys, end, beginning, kept, finish)

    def clear_disk(self, salt: str, done: Callable[[int | KVStoreError], None]) -> None:
        """See ``BlockStore.clear_disk``."""
        if self._backing.tier is None:
            done(0)
            return
        digest = salt_digest(salt)

        def end(outcome: Removal | KVStoreError) -> None:
            if isinstance(outcome, KVStoreError):
                done(outcome)
                return
            if not outcome.num_pinned:
                self._memory.events.cleared(TierName.DISK, digest)
            self._rewrite(digest)
            done(outcome.num_pinned)

        self._transfer.clear(chain_seed(self._memory.namespace, salt), end)

    def _rewrite(self, salt: bytes) -> None:
        """Disk lost this salt's blocks: those that memory still holds are dirty again."""
        index = self._index
        kept = [slot for slot in index.used_slots() if index.salt[slot] == salt]
        for slot in sorted(kept, key=index.depth.__getitem__):  # parents first
            index.is_written[slot] = 0
            if index.has_bytes(slot):
                self._write_behind.add(slot)

    def _is_needed(self, slot: int) -> bool:
        index = self._index
        return bool(index.refcount[slot] or index.transfers[slot] or slot in self._held)

    def _forget_in_memory(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes
    ) -> tuple[Counter[TierName], set[bytes]]:
        """Drop the sequence ``keys``, root first, and what continues ``end``, its last key or the
        seed, with tokens that begin so.

        Returns how many copies went, by tier, and the keys of what stays. Dirty blocks are lost.
        """
        index = self._index
        below = [slot for slot in index.children(end) if index.tokens[slot].startswith(beginning)]
        for slot in below:  # grows: parents before children
            below += index.children(index.key[slot])
        path = [index.slots[key] for key in keys if key in index.slots]
        dropped: Counter[TierName] = Counter()
        kept: set[bytes] = set()
        for slot in [*reversed(below), *reversed(path)]:
            key = index.key[slot]
            if self._is_needed(slot) or any(True for _ in index.children(key)):
                kept.add(key)
                continue
            on_device, on_host = index.device[slot] != NONE, index.host[slot] != NONE
            if on_device:
                self._evictor.policy.forget(slot)
                self._evictor.drop_device(slot)
            if on_host:
                self._evictor.drop_host(slot)
            dropped[TierName.DEVICE] += on_device
            dropped[TierName.HOST] += on_host
        is_continued = not kept.issubset(keys)
        last = max((i for i, key in enumerate(keys) if is_continued or key in kept), default=-1)
        return dropped, kept.union(keys[: last + 1])
