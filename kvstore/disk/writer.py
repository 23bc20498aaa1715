"""What changes the cache, in one writer thread: groups, touches, removals, and tidying up.

Decides what happens when a transaction cannot be had or fails: another writer, a full map, a full
volume, a damaged value. Does not know how a block is read.
"""

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lmdb
import msgpack

from kvstore.block import ITEMSIZE, BlockRef, BlockWrite, PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import schema
from kvstore.disk.codec import RAW, get_codec
from kvstore.disk.environment import Environment, WriterBusyError
from kvstore.disk.ledger import Ledger, Prepared
from kvstore.disk.reader import DAMAGE, Suspect
from kvstore.disk.repair import rebuild
from kvstore.disk.schema import Record, SealError
from kvstore.disk.space import Room, Space
from kvstore.errors import KVStoreError, TierBrokenError

logger = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROUNDS = 6  # transactions, most of which only evict, before a batch is given up
_SURVEYS = 3  # of a group, when other processes evict what was there at the last
_LOCKED_OUT_WAIT_S = 0.2
_WORTH = 0.95  # a codec must save more than this leaves
_REMOVE_SLICE = 1000  # keys a transaction


class _NoRoomError(Exception):
    """Abort the transaction: the batch does not fit, and nothing shall have changed."""


class Writer:
    """All methods belong to one thread; readers add to ``suspects`` from any."""

    def __init__(
        self,
        env: Environment,
        config: DiskConfig,
        capacity_bytes: int | None,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        lock_timeout_s: float,
        suspects: dict[bytes, Suspect],
    ) -> None:
        self.space = Space(env, config, monotonic)
        self.suspects = suspects
        self.num_evicted = 0
        self.removed: list[tuple[bytes, bytes, bytes]] | None = None  # None: nobody takes them
        self._env = env
        self._clock = clock
        self._codec = get_codec(config.codec)
        self._touch_interval_s = config.touch_interval_s
        self._group_bytes = config.group_commit_bytes
        self._lock_timeout_s = lock_timeout_s
        self._capacity_bytes = capacity_bytes  # to be written; None once it was
        self._identities: dict[bytes, bytes] = {}  # to be written
        self._itemsizes: dict[bytes, int] = {}
        self._is_locked_out = False
        self._has_warned_of_reader = False

    # --- public -----------------------------------------------------------------------------------

    def is_locked_out(self) -> bool:
        """Another writer has kept the lock for longer than the limit."""
        since = self._env.waiting_since
        return self._is_locked_out or (
            since is not None and time.monotonic() - since > self._lock_timeout_s
        )

    def register_namespace(self, namespace: bytes, identity: Mapping[str, Any]) -> None:
        """To be written by the next ``tidy``."""
        self._itemsizes[namespace] = ITEMSIZE.get(str(identity.get("dtype")), 1)
        self._identities[namespace] = msgpack.packb(dict(identity), default=str)

    def put_group(
        self, writes: Sequence[BlockWrite], *, count_tokens: bool = True
    ) -> list[PutOutcome]:
        self._env.follow_file()
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
        if not (self.suspects or self._identities or self._capacity_bytes is not None):
            return
        suspects = self.suspects.copy()
        if self._attempt(lambda ledger: self._tidy(ledger, suspects.values()), wait_s):
            self._identities.clear()
            self._capacity_bytes = None
            for key in suspects:
                del self.suspects[key]

    def touch(self, keys: Sequence[bytes]) -> None:
        now = self._clock()
        due = self._due(keys, now)
        if due:
            self._attempt(lambda ledger: _touch(ledger, due, now), _LOCKED_OUT_WAIT_S)

    def remove(self, keys: Sequence[bytes]) -> int:
        slices = range(0, len(keys), _REMOVE_SLICE)
        return sum(self._remove(keys[start : start + _REMOVE_SLICE]) for start in slices)

    def clear(self, ancestor: bytes) -> int:
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

    def _remove(self, keys: Sequence[bytes]) -> int:
        return self._attempt(lambda ledger: _remove(ledger, keys))

    # --- putting ----------------------------------------------------------------------------------

    def put(
        self, blocks: Sequence[Prepared], *, spare: Collection[bytes] = ()
    ) -> dict[bytes, PutOutcome]:
        """Store blocks, parents first; evicts none of them, nor their parents, nor ``spare``."""
        outcomes: dict[bytes, PutOutcome] = {}
        spared = {*spare, *(block.key for block in blocks), *(block.parent for block in blocks)}
        if blocks:
            self.space.check_volume(sum(block.nbytes for block in blocks))
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
                with self._ledger() as ledger:
                    need = self.space.needed_pages(ledger, batch)
                    room = self.space.make_room(ledger, batch, spared)
                    if room is Room.NONE:
                        raise _NoRoomError  # noqa: TRY301
                    outcomes = (
                        self._put_blocks(ledger, batch, spared) if room is Room.ENOUGH else None
                    )
                if outcomes is not None:
                    self.space.stored()
                    return outcomes
            except _NoRoomError:
                return None
            except WriterBusyError:
                return [PutOutcome.FULL] * len(batch)
            except SealError:
                self._rebuild()
            except lmdb.MapFullError:
                if not self._relieve(need, spared):
                    return None
            except lmdb.Error as error:
                if not self._survive(error):
                    raise TierBrokenError(f"{self._env.directory}: {error}", tier="disk") from error
        return None

    def _put_blocks(
        self, ledger: Ledger, batch: list[Prepared], spared: Collection[bytes]
    ) -> list[PutOutcome]:
        refused = self.space.over_quota(ledger, batch, spared)
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

    # --- transactions and their failures ----------------------------------------------------------

    @contextlib.contextmanager
    def _ledger(self, wait_s: float | None = None) -> Iterator[Ledger]:
        """A ledger in a write transaction, finished and committed at the end of the block."""
        if wait_s is None:
            wait_s = _LOCKED_OUT_WAIT_S if self._is_locked_out else self._lock_timeout_s
        while True:
            try:
                with self._env.write(wait_s) as txn:
                    self._is_locked_out = False
                    ledger = Ledger(self._env, txn)
                    if ledger.head.generation == self._env.generation:
                        yield ledger
                        ledger.finish()
                        self.space.ends(ledger)
                        break
            except WriterBusyError:
                self._is_locked_out = self._is_locked_out or wait_s >= self._lock_timeout_s
                raise
            self._env.adopt(ledger.head)
            self.space.adopt()
        self.num_evicted += ledger.num_evicted
        if self.removed is not None:
            self.removed += ledger.removed

    def _attempt(self, change: Callable[[Ledger], int], wait_s: float | None = None) -> int:
        """Make one change in a transaction; its result, or 0 when it cannot be made now."""
        for _ in range(2):
            try:
                with self._ledger(wait_s) as ledger:
                    return change(ledger)
            except SealError:
                self._rebuild()
            except (WriterBusyError, lmdb.MapFullError, TierBrokenError):
                return 0
            except lmdb.Error as error:
                if not self._survive(error):
                    return 0
        return 0

    def _relieve(self, need: int, spared: Collection[bytes]) -> bool:
        """After a full map that the accounts did not foresee: whether trying again may help."""
        if self._env.free_stale_readers():
            return True
        is_better = self._attempt(lambda ledger: self.space.relieve(ledger, need, spared))
        if not is_better and not self._has_warned_of_reader:
            self._has_warned_of_reader = True
            path = self._env.directory
            logger.warning("disk map full, freed pages cannot be reused yet path=%s", path)
        return bool(is_better)

    def _survive(self, error: lmdb.Error) -> bool:
        """After a failed transaction: put things right where that is possible; whether to go on."""
        code = getattr(error, "code", 0)
        # liblmdb says EIO for a write that ended early, as the last one on a full volume does; when
        # it comes again on pages the file already has, it means what it says.
        is_short = code == errno.EIO and self.space.reason is None
        if is_short or code in _NO_SPACE or isinstance(error, lmdb.DiskError):
            self._env.trim()
            self.space.stop_growing(f"the volume is full: {error}")
            return True
        if isinstance(error, lmdb.PanicError):  # an earlier commit failed half-way
            with contextlib.suppress(KVStoreError):
                self._env.recover()
                return True
        elif isinstance(error, DAMAGE):
            self._env.report_damage(error)
        else:
            self._env.turn_off(str(error))
        return False

    # --- tidying up -------------------------------------------------------------------------------

    def _tidy(self, ledger: Ledger, suspects: Iterable[Suspect]) -> int:
        for namespace, body in self._identities.items():
            ledger.name_namespace(namespace, body)
        if self._capacity_bytes is not None:
            ledger.set_capacity(self._capacity_bytes)
        for ref, seen in suspects:
            record = ledger.record(ref.key)  # raises for an unreadable one: rebuild
            # Another process may have removed it, or written it anew, since the reader met it.
            if record is not None and seen is not None and record.created == seen.created:
                ledger.discard(ref.key, record)
        return 1

    def repair(self, bad: Sequence[tuple[BlockRef, Record]], *, rebuild: bool) -> bool:
        """Mark blocks bad and, if asked to, rebuild; False when the lock or room is missing."""
        self.suspects |= {ref.key: (ref, record) for ref, record in bad}
        is_rebuilt = not rebuild or self._rebuild()
        self.tidy()
        return is_rebuilt and not self.suspects

    def _rebuild(self) -> bool:
        hints = [ref for ref, record in self.suspects.copy().values() if record is None]
        try:
            with self._env.write(self._lock_timeout_s) as txn:
                rebuilt = rebuild(self._env, txn, hints)
        except (WriterBusyError, lmdb.MapFullError):
            return False
        logger.warning("rebuilt the index path=%s result=%s", self._env.directory, rebuilt)
        return True

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


def _touch(ledger: Ledger, keys: Sequence[bytes], now: float) -> int:
    first = ledger.next_orders(len(keys))
    for i, key in enumerate(keys):
        record = ledger.record(key)
        if record is not None:
            ledger.touch(key, record, first + i, now)
    return len(keys)


def _remove(ledger: Ledger, keys: Sequence[bytes]) -> int:
    """Deepest first, so that a whole subtree leaves no records behind."""
    found = [(key, ledger.record(key)) for key in dict.fromkeys(keys)]
    present = [(key, record) for key, record in found if record is not None]
    present.sort(key=lambda item: item[1].depth, reverse=True)
    for key, _ in present:
        current = ledger.record(key)  # a bad one may have gone with its last child
        if current is not None:
            ledger.discard(key, current)
    return sum(not record.is_bad for _, record in present)
