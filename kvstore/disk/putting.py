"""Putting: groups of blocks become records and payloads, in as few transactions as room allows.

What can be known without writing is found out first, and codec and checksum are done before any
transaction begins: nothing but puts and deletes happens while the writer's lock is held.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import lmdb

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import schema
from kvstore.disk.changes import Changes
from kvstore.disk.codec import RAW, get_codec
from kvstore.disk.environment import Environment
from kvstore.disk.ledger import Ledger, Prepared
from kvstore.disk.schema import SealError
from kvstore.disk.space import Room
from kvstore.disk.writer_lock import WriterBusyError
from kvstore.errors import TierBrokenError

_ROUNDS = 6  # transactions, most of which only evict, before a batch is given up
_SURVEYS = 3  # of a group, when other processes evict what was there at the last
_WORTH = 0.95  # a codec must save more than this leaves


class _NoRoomError(Exception):
    """Abort the transaction: the batch does not fit, and nothing shall have changed."""


class Putter:
    """All methods belong to the writer's thread.

    itemsizes  bytes of one element, by namespace, for the codec; 1 where it is not known
    """

    def __init__(self, env: Environment, changes: Changes, config: DiskConfig) -> None:
        self._env = env
        self._changes = changes
        self._space = changes.space
        self._clock = changes.clock
        self._codec = get_codec(config.codec)
        self._group_bytes = config.group_commit_bytes
        self.itemsizes: dict[bytes, int] = {}

    def put_group(self, writes: Sequence[BlockWrite], *, count_tokens: bool) -> list[PutOutcome]:
        """See ``DiskStore.put_group``."""
        outcomes: dict[bytes, PutOutcome] = {}
        for _ in range(_SURVEYS):
            outcomes = self._survey(writes)
            absent = [write for write in writes if write.ref.key not in outcomes]
            blocks = [self._prepare(write, count_tokens=count_tokens) for write in absent]
            outcomes |= self.put(blocks, spare=outcomes)
            if not any(_lost_parent(write.ref, outcomes) for write in writes):
                break
        return [outcomes[write.ref.key] for write in writes]

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
            encoded = self._codec.encode(plain, self.itemsizes.get(write.namespace, 1))
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
