"""What changes the cache, in one writer thread: groups, touches, removals, and tidying up.

Does not know how a block is read, nor what becomes of a transaction that fails.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lmdb
import msgpack

from kvstore.block import ITEMSIZE, BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.config import DiskConfig
from kvstore.disk import pins, schema
from kvstore.disk.changes import LOCKED_OUT_WAIT_S, Changes
from kvstore.disk.codec import RAW, get_codec
from kvstore.disk.departures import Departure
from kvstore.disk.environment import Environment, State
from kvstore.disk.ledger import Ledger, Prepared
from kvstore.disk.reader import Suspect
from kvstore.disk.schema import Record, SealError
from kvstore.disk.space import Room
from kvstore.disk.writer_lock import WriterBusyError
from kvstore.errors import TierBrokenError

_ROUNDS = 6  # transactions, most of which only evict, before a batch is given up
_SURVEYS = 3  # of a group, when other processes evict what was there at the last
_WORTH = 0.95  # a codec must save more than this leaves
_REMOVE_SLICE = 1000  # keys a transaction


class _NoRoomError(Exception):
    """Abort the transaction: the batch does not fit, and nothing shall have changed."""


class Writer:
    """All methods belong to one thread."""

    def __init__(
        self,
        env: Environment,
        changes: Changes,
        config: DiskConfig,
        capacity_bytes: int | None,
    ) -> None:
        self._env = env
        self._changes = changes
        self._space = changes.space
        self._clock = changes.clock
        self._codec = get_codec(config.codec)
        self._touch_interval_s = config.touch_interval_s
        self._group_bytes = config.group_commit_bytes
        self._capacity_bytes = capacity_bytes  # to be written; None once it was
        self._identities: dict[bytes, bytes] = {}  # to be written
        self._itemsizes: dict[bytes, int] = {}

    def register_namespace(self, namespace: bytes, identity: Mapping[str, Any]) -> None:
        """To be written by the next ``tidy``."""
        self._itemsizes[namespace] = ITEMSIZE.get(str(identity.get("dtype")), 1)
        self._identities[namespace] = msgpack.packb(dict(identity), default=str)

    def put_group(
        self, writes: Sequence[BlockWrite], *, count_tokens: bool = True
    ) -> list[PutOutcome]:
        self._env.follow_file()
        if self._env.state is not State.OK:  # it led to one that must be checked first
            return [PutOutcome.FULL] * len(writes)
        self.tidy()
        outcomes: dict[bytes, PutOutcome] = {}
        for _ in range(_SURVEYS):
            outcomes = self._survey(writes)
            absent = [write for write in writes if write.ref.key not in outcomes]
            blocks = [self._prepare(write, count_tokens=count_tokens) for write in absent]
            outcomes |= self.put(blocks, spare=outcomes)
            if not any(_lost_parent(write.ref, outcomes) for write in writes):
                break
        return [outcomes[write.ref.key] for write in writes]

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

    def pin(self, keys: Sequence[bytes], ttl_s: float | None) -> list[bytes]:
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
                pins.expire(ledger, self._clock())  # none that has ended counts
                pins.pin(ledger, keys[-1], until)
            return 1

        self._change_pins(change, keys)
        return missing

    def unpin(self, key: bytes) -> bool:
        had_one = False

        def change(ledger: Ledger) -> int:
            nonlocal had_one
            had_one = pins.unpin(ledger, key)
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

    def remove(self, keys: Sequence[bytes]) -> Removal:
        kept: set[bytes] = set()
        slices = range(0, len(keys), _REMOVE_SLICE)
        count = sum(self._remove(keys[start : start + _REMOVE_SLICE], kept) for start in slices)
        return Removal(count, len(kept))

    def _remove(self, keys: Sequence[bytes], kept: set[bytes]) -> int:
        return self._changes.attempt(lambda ledger: _remove(ledger, keys, kept))

    def evict(self, seen: Mapping[bytes, bytes], *, with_pinned: bool) -> set[bytes] | None:
        """None when that cannot be done now."""
        gone: set[bytes] = set()

        def drop_unchanged(ledger: Ledger) -> int:
            gone.clear()
            gone.update(_evict(ledger, seen, with_pinned=with_pinned))
            return 1

        return gone if self._changes.attempt(drop_unchanged) else None

    def clear(self, ancestor: bytes) -> Removal:
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

    # --- putting ----------------------------------------------------------------------------------

    def put(
        self, blocks: Sequence[Prepared], *, spare: Collection[bytes] = ()
    ) -> dict[bytes, PutOutcome]:
        """Store blocks, parents first; evicts none of them, nor their parents, nor ``spare``."""
        outcomes: dict[bytes, PutOutcome] = {}
        spared = {*spare, *(block.key for block in blocks), *(block.parent for block in blocks)}
        if blocks:
            self._space.check_volume(sum(block.nbytes for block in blocks))
        batches = deque(_split(blocks, self._group_bytes))
        while batches:
            batch = _without_lost(batches.popleft(), outcomes)
            if not batch:
                continue
            some = self._put_batch(batch, spared)
            if some is None and len(batch) > 1:
                middle = len(batch) // 2
                batches.extendleft([batch[middle:], batch[:middle]])
                continue
            for block, outcome in zip(batch, some or [PutOutcome.FULL], strict=True):
                outcomes.setdefault(block.key, outcome)
        return outcomes

    def _survey(self, writes: Sequence[BlockWrite]) -> dict[bytes, PutOutcome]:
        """Blocks that need no codec, no checksum and no room: present ones and orphans."""
        env = self._env
        known: dict[bytes, PutOutcome] = {}
        coming: set[bytes] = set()
        try:
            with env.read() as txn:
                for write in writes:
                    ref = write.ref
                    if _is_present(env, txn, ref):
                        known[ref.key] = PutOutcome.PRESENT
                    elif (
                        ref.depth > 0
                        and ref.parent not in coming
                        and txn.get(ref.parent, db=env.index) is None
                    ):
                        known[ref.key] = PutOutcome.ORPHAN
                    else:
                        coming.add(ref.key)
        except (lmdb.Error, TierBrokenError):
            return {}  # the transaction that puts them finds out
        return known

    def _prepare(self, write: BlockWrite, *, count_tokens: bool) -> Prepared:
        """Encode and sum a block, before any transaction; the payload stays borrowed."""
        ref = write.ref
        plain = memoryview(write.payload).cast("B")
        stored: Any = plain
        codec = RAW
        if self._codec is not None:
            encoded = self._codec.encode(plain, self._itemsizes.get(write.namespace, 1))
            if len(encoded) < _WORTH * len(plain):
                stored, codec = encoded, self._codec.name
        return Prepared(
            ref.key,
            ref.parent,
            ref.tokens,
            ref.depth,
            write.namespace,
            write.salt,
            len(ref.tokens) // 4 if count_tokens else 0,
            stored,
            len(stored),
            len(plain),
            codec,
            schema.checksum(stored),
        )

    def _put_batch(
        self, batch: list[Prepared], spared: Collection[bytes]
    ) -> list[PutOutcome] | None:
        """All of the batch in one transaction, after others that only evict; None for no room."""
        need = 0
        for _ in range(_ROUNDS):
            try:
                with self._changes.ledger() as ledger:
                    need = self._space.needed_pages(ledger, batch)
                    room = self._space.make_room(ledger, batch, spared)
                    if room is Room.NONE:
                        raise _NoRoomError  # noqa: TRY301
                    outcomes = (
                        self._put_blocks(ledger, batch, spared) if room is Room.ENOUGH else None
                    )
                if outcomes is not None:
                    self._space.stored()
                    return outcomes
            except _NoRoomError:
                return None
            except WriterBusyError:
                return [PutOutcome.FULL] * len(batch)
            except SealError:
                self._changes.rebuild()
            except lmdb.MapFullError:
                if not self._changes.relieve(need, spared):
                    return None
            except lmdb.Error as error:
                if not self._changes.survive(error):
                    raise TierBrokenError(f"{self._env.directory}: {error}", tier="disk") from error
        return None

    def _put_blocks(
        self, ledger: Ledger, batch: list[Prepared], spared: Collection[bytes]
    ) -> list[PutOutcome]:
        refused = self._space.over_quota(ledger, batch, spared)
        now = self._clock()
        # The end of a chain gets the lowest order: it is the first that may go.
        newest = ledger.next_orders(len(batch)) + len(batch) - 1
        outcomes = []
        for i, block in enumerate(batch):
            if block.key in refused or block.parent in refused:
                refused.add(block.key)
                outcomes.append(PutOutcome.FULL)
            else:
                outcomes.append(ledger.put(block, newest - i, now))
        return outcomes

    # --- recency ----------------------------------------------------------------------------------

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


def _lost_parent(ref: BlockRef, outcomes: dict[bytes, PutOutcome]) -> bool:
    """Its parent, of the same group, was here at the survey; then another process evicted it."""
    is_orphan = outcomes[ref.key] is PutOutcome.ORPHAN
    return is_orphan and outcomes.get(ref.parent) is PutOutcome.PRESENT


def _is_present(env: Environment, txn: Any, ref: BlockRef) -> bool:
    value = txn.get(ref.key, db=env.index)
    try:
        record = schema.decode_record(ref.key, value) if value is not None else None
    except SealError:
        return False
    return record is not None and not record.is_bad and record.tokens == ref.tokens


def _split(blocks: Sequence[Prepared], num_bytes: int) -> list[list[Prepared]]:
    """Batches of at most ``num_bytes`` of payload, or of one block that is larger."""
    batches: list[list[Prepared]] = []
    room = 0
    for block in blocks:
        if not batches or block.nbytes > room:
            batches.append([])
            room = num_bytes
        batches[-1].append(block)
        room -= block.nbytes
    return batches


def _without_lost(batch: list[Prepared], outcomes: dict[bytes, PutOutcome]) -> list[Prepared]:
    """What is left of a batch when blocks whose parent found no room find none, either."""
    kept = []
    for block in batch:
        if outcomes.get(block.parent) is PutOutcome.FULL:
            outcomes[block.key] = PutOutcome.FULL
        else:
            kept.append(block)
    return kept


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
