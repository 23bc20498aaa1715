"""Getting blocks out, checked, from any thread, in short read transactions.

An open reader keeps LMDB from reusing pages, so bytes are copied out and the transaction ends at
once. Whatever is not what was asked for, or not what was stored, is counted by reason and left to
the writer, who marks it bad. Changes nothing itself.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import lmdb
import numpy as np

from kvstore.block import BlockRef
from kvstore.disk import schema
from kvstore.disk.codec import RAW, get_codec
from kvstore.disk.environment import Environment, State
from kvstore.disk.schema import DiskEntry, Record, SealError
from kvstore.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    KVStoreError,
    TierBrokenError,
)
from kvstore.hashing import block_key

logger = logging.getLogger(__name__)

DAMAGE = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.CursorFullError, lmdb.InvalidError)

Suspect = tuple[BlockRef, Record | None]  # None: the record itself could not be read


class Reader:
    """Thread-safe. ``suspects`` are bad blocks, by key, for the writer to take."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.suspects: dict[bytes, Suspect] = {}
        self._corrupt: dict[str, int] = {}
        self._counts = threading.Lock()

    @property
    def corrupt(self) -> dict[str, int]:
        with self._counts:
            return dict(self._corrupt)

    # --- what is here -----------------------------------------------------------------------------

    def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        found: list[DiskEntry] = []
        try:
            txn = self._begin(follow=True)
        except TierBrokenError:
            return found
        try:
            index = self._env.index
            for ref in refs:
                value = txn.get(ref.key, db=index)
                if value is None:
                    break
                try:
                    record = schema.decode_record(ref.key, value)
                except SealError:
                    self._suspect(ref, None, "record")
                    break
                if record.is_bad:
                    break
                if record.parent != ref.parent or record.tokens != ref.tokens:
                    self._suspect(ref, record, _mismatch(record, ref))
                    break
                found.append(DiskEntry(ref.key, record.nbytes, record.codec, record.payload_bytes))
        except lmdb.Error as error:
            self._failed(error)
        finally:
            self._env.end_read(txn)
        return found

    def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        found: list[BlockRef] = []
        try:
            txn = self._begin(follow=True)
        except TierBrokenError:
            return found
        try:
            for key in keys:
                try:
                    record = schema.decode_record(key, txn.get(key, db=self._env.index) or b"")
                except SealError:
                    break
                if record.is_bad or record.parent != parent:
                    break
                if block_key(parent, record.tokens) != key:
                    break
                found.append(BlockRef(key, parent, record.tokens, record.depth))
                parent = key
        except lmdb.Error as error:
            self._failed(error)
        finally:
            self._env.end_read(txn)
        return found

    def children(self, parent: bytes, limit: int) -> list[BlockRef]:
        found: list[BlockRef] = []
        try:
            txn = self._begin(follow=True)
        except TierBrokenError:
            return found
        try:
            cursor = txn.cursor(db=self._env.children)
            is_there = cursor.set_key(parent)
            while is_there and len(found) < limit:
                key = bytes(cursor.value())
                value = txn.get(key, db=self._env.index)
                try:
                    record = schema.decode_record(key, value or b"")
                except SealError:
                    record = None
                if record is not None and not record.is_bad and record.parent == parent:
                    found.append(BlockRef(key, parent, record.tokens, record.depth))
                is_there = cursor.next_dup()
        except lmdb.Error as error:
            self._failed(error)
        finally:
            self._env.end_read(txn)
        return found

    # --- payloads ---------------------------------------------------------------------------------

    def read_into(self, ref: BlockRef, dst: memoryview) -> None:
        try:
            txn = self._begin()
        except TierBrokenError as error:
            raise BlockMissingError(str(error)) from error
        try:
            coded = self._copy(txn, ref, dst)
        finally:
            self._env.end_read(txn)
        if coded is not None:
            self._decode(ref, *coded, dst)

    def read_many(self, reads: Sequence[tuple[BlockRef, memoryview]]) -> list[KVStoreError | None]:
        outcomes: list[KVStoreError | None] = [None] * len(reads)
        coded: list[tuple[int, Record, Any]] = []
        try:
            txn = self._begin()
        except TierBrokenError as error:
            return [BlockMissingError(str(error)) for _ in reads]
        try:
            for i, (ref, dst) in enumerate(reads):
                try:
                    found = self._copy(txn, ref, dst)
                except KVStoreError as error:
                    outcomes[i] = error
                else:
                    if found is not None:
                        coded.append((i, *found))
        finally:
            self._env.end_read(txn)
        for i, record, stored in coded:
            try:
                self._decode(reads[i][0], record, stored, reads[i][1])
            except KVStoreError as error:
                outcomes[i] = error
        return outcomes

    def _copy(self, txn: Any, ref: BlockRef, dst: memoryview) -> tuple[Record, Any] | None:
        """Fill ``dst`` and verify it; or, for a coded block, its record and its verified bytes."""
        env = self._env
        try:
            value = txn.get(ref.key, db=env.index)
            if value is None:
                raise BlockMissingError(f"block {_name(ref)} is not on disk")
            try:
                record = schema.read_record(value)
            except SealError:
                raise self._corrupt_block(ref, value, "record") from None
            if record.is_bad is True:
                raise BlockMissingError(f"block {_name(ref)} is marked bad")
            if record.parent != ref.parent or record.tokens != ref.tokens:
                raise self._corrupt_block(ref, value, _mismatch(record, ref))
            if record.payload_bytes != len(dst):
                raise self._wrong_size(ref, value, len(dst))
            view = txn.get(ref.key, db=env.payload)
            if view is None or len(view) != record.nbytes:
                raise self._corrupt_block(ref, value, "length")
            is_raw = record.codec == RAW and record.nbytes == record.payload_bytes
            stored: Any = np.frombuffer(dst, np.uint8) if is_raw else np.empty(len(view), np.uint8)
            stored[:] = np.frombuffer(view, np.uint8)  # without the interpreter lock
            if schema.checksum(stored) != record.checksum:
                raise self._corrupt_block(ref, value, "payload")
        except lmdb.Error as error:
            self._failed(error)
            raise BlockMissingError(f"block {_name(ref)} cannot be read: {error}") from error
        return None if is_raw else (record, stored)

    def _decode(self, ref: BlockRef, record: Record, stored: Any, dst: memoryview) -> None:
        try:
            codec = get_codec(record.codec)
            if codec is None:
                raise ValueError(record.codec)  # noqa: TRY301
            codec.decode_into(memoryview(stored), dst)
        except (ConfigError, ValueError) as error:
            raise self._suspect(ref, record, "codec") from error

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, *, follow: bool = False) -> Any:
        if follow and self._env.state is State.OK:
            self._env.follow_file()
        try:
            return self._env.begin_read()
        except lmdb.Error as error:
            self._failed(error)
            raise TierBrokenError(str(error), tier="disk") from error

    def _failed(self, error: lmdb.Error) -> None:
        if isinstance(error, DAMAGE):
            self._env.report_damage(error)
        else:
            logger.warning("disk read failed path=%s error=%s", self._env.directory, error)
            self._count("error")

    def _corrupt_block(self, ref: BlockRef, value: Any, reason: str) -> CorruptBlockError:
        """For a block that is not what it should be: whether its record or its payload is bad."""
        try:
            record = schema.decode_record(ref.key, value)
        except SealError:
            return self._suspect(ref, None, "record")
        return self._suspect(ref, record, reason)

    def _wrong_size(self, ref: BlockRef, value: Any, expected: int) -> CorruptBlockError:
        try:
            found = schema.decode_record(ref.key, value).payload_bytes
        except SealError:
            return self._suspect(ref, None, "record")
        # The block is as it was stored; nothing is gained by dropping it.
        return CorruptBlockError(
            f"block {_name(ref)} has {found} bytes, {expected} were expected", reason="size"
        )

    def _suspect(self, ref: BlockRef, record: Record | None, reason: str) -> CorruptBlockError:
        """Count a bad block, and leave it to the writer to mark it."""
        self._count(reason)
        # A record that fits its key is right, and the request is what is wrong.
        fits = record is not None and block_key(record.parent, record.tokens) == ref.key
        if not (fits and reason in ("parent", "tokens")):
            self.suspects[ref.key] = (ref, record)
        return CorruptBlockError(f"block {_name(ref)}: bad {reason}", reason=reason)

    def _count(self, reason: str) -> None:
        with self._counts:
            self._corrupt[reason] = self._corrupt.get(reason, 0) + 1


def _name(ref: BlockRef) -> str:
    return ref.key.hex()[:16]


def _mismatch(record: Record, ref: BlockRef) -> str:
    return "parent" if record.parent != ref.parent else "tokens"
