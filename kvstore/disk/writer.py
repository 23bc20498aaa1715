"""What changes the cache, in one writer thread: touches, pins, removals, and tidying up.

How blocks are put is ``putting``'s business, and what becomes of a transaction that fails that of
``changes``. Does not know how a block is read.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lmdb
import msgpack

from kvstore.block import ITEMSIZE, BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.config import DiskConfig
from kvstore.disk import pins, schema
from kvstore.disk.changes import LOCKED_OUT_WAIT_S, Changes
from kvstore.disk.departures import Departure
from kvstore.disk.environment import Environment, State
from kvstore.disk.ledger import Ledger, Prepared
from kvstore.disk.putting import Putter
from kvstore.disk.reader import Suspect
from kvstore.disk.schema import Record, SealError
from kvstore.errors import TierBrokenError

_REMOVE_SLICE = 1000  # keys a transaction


class Writer:
    """All methods belong to one thread. What they promise is written in ``DiskStore``, which has
    asked before whether anything may be written."""

    def __init__(
        self,
        env: Environment,
        changes: Changes,
        config: DiskConfig,
        capacity_bytes: int | None,
    ) -> None:
        self._env = env
        self._changes = changes
        self._putter = Putter(env, changes, config)
        self._clock = changes.clock
        self._touch_interval_s = config.touch_interval_s
        self._capacity_bytes = capacity_bytes  # to be written; None once it was
        self._identities: dict[bytes, bytes] = {}  # to be written

    def register_namespace(self, namespace: bytes, identity: Mapping[str, Any]) -> None:
        """To be written by the next ``tidy``."""
        self._putter.itemsizes[namespace] = ITEMSIZE.get(str(identity.get("dtype")), 1)
        self._identities[namespace] = msgpack.packb(dict(identity), default=str)

    def put_group(self, writes: Sequence[BlockWrite], *, count_tokens: bool) -> list[PutOutcome]:
        self._env.follow_file()
        if self._env.state is not State.OK:  # it led to one that must be checked first
            return [PutOutcome.FULL] * len(writes)
        self.tidy()
        return self._putter.put_group(writes, count_tokens=count_tokens)

    def put_encoded(self, blocks: Sequence[Prepared]) -> dict[bytes, PutOutcome]:
        return self._putter.put(blocks)

    def tidy(self, *, wait_s: float | None = None) -> None:
        """Write what waits: names of namespaces, a new capacity, bad blocks. Never raises."""
        waiting = self._changes.suspects
        if not (waiting or self._identities or self._capacity_bytes is not None):
            return
        suspects, identities = waiting.copy(), self._identities.copy()
        capacity_bytes = self._capacity_bytes

        def write_all(ledger: Ledger) -> int:
            for namespace, body in identities.items():
                ledger.name_namespace(namespace, body)
            if capacity_bytes is not None:
                ledger.set_capacity(capacity_bytes)
            _mark_bad(ledger, suspects.values())
            return 1

        if self._changes.attempt(write_all, wait_s):
            self._capacity_bytes = None
            for namespace in identities:
                del self._identities[namespace]
            for key in suspects:
                del waiting[key]

    def touch(self, keys: Sequence[bytes]) -> None:
        now = self._clock()
        due = self._due(keys, now)
        if due:
            self._changes.attempt(lambda ledger: _touch(ledger, due, now), LOCKED_OUT_WAIT_S)

    def _due(self, keys: Sequence[bytes], now: float) -> list[bytes]:
        """Blocks whose recorded use is older than the interval, or lies in the future."""
        due = []
        try:
            with self._env.read() as txn:
                for key in keys:
                    value = txn.get(key, db=self._env.index)
                    if value is not None:
                        age = now - schema.decode_record(key, value).touched
                        if not 0 <= age < self._touch_interval_s:
                            due.append(key)
        except (SealError, lmdb.Error, TierBrokenError):
            return []  # whoever reads the block finds out
        return due

    def pin(self, keys: Sequence[bytes], ttl_s: float | None, hold: bytes) -> list[bytes]:
        if not keys:
            return []
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        missing: list[bytes] = []

        def change(ledger: Ledger) -> int:
            records = [ledger.record(key) for key in keys]
            missing[:] = [
                key
                for key, record in zip(keys, records, strict=True)
                if record is None or record.is_bad
            ]
            if not missing:
                now = self._clock()
                pins.expire(ledger, now)  # none that has ended counts
                pins.pin(ledger, keys[-1], until, hold, now)
            return 1

        self._change_pins(change, keys)
        return missing

    def unpin(self, key: bytes, hold: bytes | None) -> bool:
        had_one = False

        def change(ledger: Ledger) -> int:
            nonlocal had_one
            if hold is None:
                had_one = pins.unpin(ledger, key)
            else:
                had_one = pins.release(ledger, key, hold, self._clock())
            return 1

        self._change_pins(change, [key])
        return had_one

    def _change_pins(self, change: Callable[[Ledger], int], keys: Sequence[bytes]) -> None:
        if not self._changes.attempt(change, makes_room_for=keys):
            raise TierBrokenError(
                f"{self._env.directory}: no pin can be changed while another process keeps the "
                "writer's lock, or readers keep freed pages; try again",
                tier="disk",
            )

    def remove(self, keys: Sequence[bytes]) -> Removal | None:
        """None when that cannot be done now, or not to the end."""
        kept: set[bytes] = set()
        count = 0
        for start in range(0, len(keys), _REMOVE_SLICE):
            num_gone = self._remove(keys[start : start + _REMOVE_SLICE], kept)
            if num_gone is None:
                return None
            count += num_gone
        return Removal(count, len(kept))

    def _remove(self, keys: Sequence[bytes], kept: set[bytes]) -> int | None:
        num_gone = 0

        def drop(ledger: Ledger) -> int:
            nonlocal num_gone
            num_gone = _remove(ledger, keys, kept)
            return 1

        return num_gone if self._changes.attempt(drop) else None

    def evict(self, seen: Mapping[bytes, bytes], *, with_pinned: bool) -> set[bytes] | None:
        """None when that cannot be done now."""
        gone: set[bytes] = set()

        def drop_unchanged(ledger: Ledger) -> int:
            gone.clear()
            gone.update(_evict(ledger, seen, with_pinned=with_pinned))
            return 1

        return gone if self._changes.attempt(drop_unchanged) else None

    def clear(self, ancestor: bytes) -> Removal | None:
        """None as ``remove``."""
        keys: list[bytes] = []
        level = [ancestor]
        while level:
            slices = range(0, len(level), _REMOVE_SLICE)
            parts = [self._children(level[start : start + _REMOVE_SLICE]) for start in slices]
            level = [key for part in parts for key in part]
            keys += level
        return self.remove(keys[::-1])

    def _children(self, parents: Sequence[bytes]) -> list[bytes]:
        with self._env.read() as txn:
            cursor = txn.cursor(db=self._env.children)
            return [
                bytes(child)
                for parent in parents
                if cursor.set_key(parent)
                for child in cursor.iternext_dup()
            ]

    def repair(self, bad: Sequence[tuple[BlockRef, Record]], *, rebuild: bool) -> bool:
        self._changes.suspects |= {ref.key: (ref, record) for ref, record in bad}
        is_rebuilt = not rebuild or self._changes.rebuild()
        self.tidy()
        return is_rebuilt and not self._changes.suspects


def _mark_bad(ledger: Ledger, suspects: Iterable[Suspect]) -> None:
    for ref, seen in suspects:
        record = ledger.record(ref.key)  # raises for an unreadable one: rebuild
        # Another process may have removed it, or written it anew, since the reader met it.
        if record is not None and seen is not None and record.created == seen.created:
            ledger.discard(ref.key, record, Departure.CORRUPT)


def _touch(ledger: Ledger, keys: Sequence[bytes], now: float) -> int:
    first = ledger.next_orders(len(keys))
    for i, key in enumerate(keys):
        record = ledger.record(key)
        if record is not None:
            ledger.touch(key, record, first + i, now)
    return len(keys)


def _remove(ledger: Ledger, keys: Sequence[bytes], kept: set[bytes]) -> int:
    """Deepest first, so that a whole subtree leaves no records behind; how many good ones went.

    Adds to ``kept`` the good ones that stay because they are pinned.
    """
    found = [(key, ledger.record(key)) for key in dict.fromkeys(keys)]
    present = [(key, record) for key, record in found if record is not None]
    present.sort(key=lambda item: item[1].depth, reverse=True)
    count = 0
    for key, _ in present:
        record = ledger.record(key)  # a bad one may have gone with its last child
        if record is None:
            continue
        if not record.num_pins:
            ledger.discard(key, record, Departure.REMOVED)
            count += not record.is_bad
        elif not record.is_bad:
            kept.add(key)
    return count


def _evict(ledger: Ledger, seen: Mapping[bytes, bytes], *, with_pinned: bool) -> Iterator[bytes]:
    for key, order in seen.items():
        record = ledger.record(key)
        if record is None or record.order != order or ledger.has_children(key):
            continue
        if record.num_pins:
            if not with_pinned:
                continue
            pins.unpin(ledger, key)
            record = ledger.record(key)  # a bad one goes with its pin
        if record is not None:
            ledger.drop(key, record, Departure.REMOVED)
        yield key
