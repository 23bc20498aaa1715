"""Is everything in the cache what was stored, and does everything agree? ``kvstore verify``.

Three levels: the file's structure (only while nobody else is attached, in a child process); every
record and payload against its checksum; every entry of ``children`` and ``recency`` and the
counters against the records. Each block is judged within one transaction, and what looks wrong is
looked at again in another, so a running engine causes no false alarm.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.block import BlockRef
from kvstore.disk import schema
from kvstore.disk.attach import Attachment
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Head, Record, SealError, Usage
from kvstore.disk.slices import Visit, existing, reading, slices
from kvstore.disk.startup import settle_by_deep_check
from kvstore.disk.store import open_for_change
from kvstore.disk.structure import DATA_FILE, Soundness, check_deep, check_light

_MAX_LISTED = 10_000
# Keys are digests, so the blocks of any part of the key space lie all over the file. A few threads,
# each in a part of its own, keep the disk busy while one of them computes a checksum.
_NUM_THREADS = 4
_NUM_PARTS = 256  # by the first byte of the key


def verify(
    path: str | Path,
    *,
    fix: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Check everything; the object that ``kvstore verify --json`` prints.

    ``corrupt`` lists ``{"key", "reason"}`` (key None: not one block), ``orphans`` keys of blocks
    without a parent record. ``ok`` is False when anything was found, repaired or not; ``fixed``
    counts what ``fix`` repaired: bad blocks become misses, derived entries are rebuilt, a file with
    a damaged structure is set aside. ``bad_blocks`` counts records without bytes at the end, kept
    for the blocks that continue them: each is a miss, and is computed anew when it is asked for.
    ``obstacle`` says why ``fix`` could not be done now, None when it could.
    ``progress(done, total)`` is called now and then, in blocks.

    Raises ``ConfigError`` for a path that is no cache, ``TierBrokenError`` when ``fix`` needs the
    directory and cannot have it.
    """
    directory = existing(path)
    whole = _Part()
    damage = _check_structure(directory, fix=fix)
    if damage:
        whole.found(None, f"structure: {damage}")
        is_aside = fix and check_light(directory / DATA_FILE).soundness is Soundness.EMPTY
        return _report(whole, int(is_aside))
    with reading(directory) as env:
        if env is not None:
            whole = _check(env, progress)
    if not fix or whole.is_sound:
        return _report(whole, 0)
    obstacle = _repair(directory, whole)
    fixed = len(whole.corrupt) + len(whole.orphans) if obstacle is None else 0
    return _report(whole, fixed, obstacle)


def _report(whole: "_Part", fixed: int, obstacle: str | None = None) -> dict[str, Any]:
    return {
        "blocks_checked": whole.total.num_blocks,
        "bytes_checked": whole.num_bytes,
        "corrupt": whole.corrupt[:_MAX_LISTED],
        "orphans": [key.hex() for key in whole.orphans[:_MAX_LISTED]],
        "bad_blocks": whole.total.num_bad,
        "fixed": fixed,
        "obstacle": obstacle,
        "ok": whole.is_sound,
    }


def _check_structure(directory: Path, *, fix: bool) -> str | None:
    """What is wrong with the file; its trees are walked only while nobody else is attached."""
    data_file = directory / DATA_FILE
    finding = check_light(data_file)
    if finding.soundness is Soundness.EMPTY:
        return None
    attachment = Attachment(directory, "verify", read_only=True)
    try:
        if not (attachment.can_write and attachment.try_exclusive()):
            return finding.reason or None
        attachment.claim_slot()
        if fix:
            return settle_by_deep_check(attachment, data_file, raise_on_damage=False)
        return finding.reason or next(iter(check_deep(data_file)), None)
    finally:
        attachment.detach()


class _Part:
    """What was found in a part of the cache."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.total = Usage()
        self.corrupt: list[dict[str, str | None]] = []
        self.orphans: list[bytes] = []
        self.bad_payloads: list[tuple[BlockRef, Record]] = []
        self.needs_rebuild = False

    @property
    def is_sound(self) -> bool:
        return not self.corrupt and not self.orphans

    def found(self, key: bytes | None, reason: str, *, rebuild: bool = True) -> None:
        self.corrupt.append({"key": key.hex() if key is not None else None, "reason": reason})
        self.needs_rebuild = self.needs_rebuild or rebuild

    def add(self, other: "_Part") -> None:
        self.num_bytes += other.num_bytes
        self.total.add_up(other.total)
        self.corrupt += other.corrupt
        self.orphans += other.orphans
        self.bad_payloads += other.bad_payloads
        self.needs_rebuild = self.needs_rebuild or other.needs_rebuild


def _check(env: Environment, progress: Callable[[int, int], None] | None) -> _Part:
    """All parts, each database, and the counters."""
    before = _head(env)
    expected = before.total.num_blocks if before is not None else 0
    whole = _Part()
    with _threads() as (pool, is_over):
        edges = [b"", *(bytes([i]) for i in range(1, _NUM_PARTS)), None]
        parts: list[Future[_Part]] = [
            pool.submit(_Check(env, is_over).run, first or b"", end)
            for first, end in pairwise(edges)
        ]
        parts.append(pool.submit(_Check(env, is_over).run_recency))
        parts.append(pool.submit(_Check(env, is_over).run_pins))
        for part in as_completed(parts):
            whole.add(part.result())
            if progress is not None:
                done = whole.total.num_blocks
                progress(done, max(expected, done))
    after = _head(env)
    # Only a cache that nobody changed meanwhile can be held against the sums of this pass.
    is_quiet = before == after and not whole.needs_rebuild
    if before is None or after is None or (is_quiet and after.total != whole.total):
        whole.found(None, "counters")
    if progress is not None:
        progress(whole.total.num_blocks, whole.total.num_blocks)
    return whole


@contextmanager
def _threads() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """A pool, and an event that is set when the caller has enough: Ctrl-C, or the end."""
    is_over = threading.Event()
    pool = ThreadPoolExecutor(_NUM_THREADS, "kv-verify")
    try:
        yield pool, is_over
    finally:
        is_over.set()
        pool.shutdown(cancel_futures=True)


def _head(env: Environment) -> Head | None:
    with env.read() as txn:
        try:
            return Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
        except SealError:
            return None


class _Check:
    """One thread's pass over a part. A finding counts when a second look confirms it."""

    def __init__(self, env: Environment, is_over: threading.Event) -> None:
        self._env = env
        self._is_over = is_over
        self._part = _Part()
        self._suspects: set[bytes] = set()
        self._is_second_look = False
        self._buffer = np.empty(0, np.uint8)

    def run(self, first: bytes, end: bytes | None) -> _Part:
        """Blocks whose keys lie in between, and payloads that have none."""
        self._walk(self._env.index, self._check_block, first, end)
        self._walk(self._env.payload, self._check_owner, first, end)
        return self._part

    def run_recency(self) -> _Part:
        self._walk(self._env.recency, self._check_recency, b"", None)
        return self._part

    def run_pins(self) -> _Part:
        first = schema.PIN_PREFIX
        end = first[:-1] + bytes([first[-1] + 1])
        self._walk(self._env.meta, self._check_pin, first, end)
        return self._part

    def _walk(self, db: Any, visit: Visit, first: bytes, end: bytes | None) -> None:
        def visit_suspect(txn: Any, key: bytes, value: Any) -> None:
            if key in self._suspects:
                visit(txn, key, value)

        position = first
        for following in slices(self._env, db, visit, first, end):
            if self._suspects:
                # Not by key: in a damaged tree a walk meets keys that a search does not find.
                self._is_second_look = True
                for _ in slices(self._env, db, visit_suspect, position, following or end):
                    pass
                self._is_second_look = False
                self._suspects.clear()
            if following is None or self._is_over.is_set():
                return
            position = following

    def _doubt(self, key: bytes) -> bool:
        """Whether this is the second look; else there will be one at this entry."""
        self._suspects.add(key)
        return self._is_second_look

    def _found(self, key: bytes, reason: str, *, entry: bytes | None = None) -> None:
        """``entry`` is the key under which the walk met it, if not the block's."""
        if self._doubt(key if entry is None else entry):
            self._part.found(key, reason)

    def _check_block(self, txn: Any, key: bytes, value: Any) -> None:
        env = self._env
        try:
            record = schema.decode_record(key, value)
        except SealError:
            self._found(key, "record")
            return
        if not self._is_second_look:
            self._part.total.add(record, len(value))
        is_orphan = record.depth > 0 and txn.get(record.parent, db=env.index) is None
        if is_orphan and self._doubt(key):
            self._part.orphans.append(key)
            self._part.needs_rebuild = True
        children = txn.cursor(db=env.children)
        if not children.set_key_dup(record.parent, key):
            self._found(key, "children")
        may_go = not children.set_key(key) and not record.num_pins
        if may_go and bytes(txn.get(record.order, db=env.recency) or b"") != key:
            self._found(key, "recency")
        if record.num_pins:
            self._check_pins(txn, key, record)
        if not record.is_bad:
            self._check_payload(txn, key, record)

    def _check_pins(self, txn: Any, key: bytes, record: Record) -> None:
        """A block's pins are its own and those of its children; its parent has them, too."""
        env = self._env
        num_pins = int(record.pinned_until > 0)
        children = txn.cursor(db=env.children)
        try:
            if children.set_key(key):
                for child in children.iternext_dup():
                    below = txn.get(bytes(child), db=env.index) or b""
                    num_pins += schema.decode_record(bytes(child), below).num_pins
            above = num_pins
            if record.depth > 0:
                value = txn.get(record.parent, db=env.index) or b""
                above = schema.decode_record(record.parent, value).num_pins
        except SealError:
            return  # found where that record stands
        has_row = not record.pinned_until or txn.get(
            schema.pin_key(record.pinned_until, key), db=env.meta
        )
        if num_pins != record.num_pins or above < num_pins or has_row is None:
            self._found(key, "pins")

    def _check_pin(self, txn: Any, row: bytes, value: Any) -> None:
        until, key = schema.read_pin_key(row)
        try:
            schema.unseal(row, value)
            record = schema.decode_record(key, txn.get(key, db=self._env.index) or b"")
            is_right = record.pinned_until == until
        except SealError:
            is_right = False
        if not is_right:
            self._found(key, "pins", entry=row)

    def _check_payload(self, txn: Any, key: bytes, record: Record) -> None:
        payload = txn.get(key, db=self._env.payload)
        if payload is not None and not self._is_second_look:
            self._part.num_bytes += len(payload)
        if payload is None or len(payload) != record.nbytes:
            reason = "length"
        elif self._checksum(payload) != record.checksum:
            reason = "payload"
        else:
            return
        if self._doubt(key):
            self._part.found(key, reason, rebuild=False)
            ref = BlockRef(key, record.parent, record.tokens, record.depth)
            self._part.bad_payloads.append((ref, record))

    def _checksum(self, payload: Any) -> bytes:
        """Of a copy, made without the interpreter lock: others run while its pages are read."""
        if len(self._buffer) < len(payload):
            self._buffer = np.empty(len(payload), np.uint8)
        copy = self._buffer[: len(payload)]
        copy[:] = np.frombuffer(payload, np.uint8)
        return schema.checksum(copy)

    def _check_recency(self, txn: Any, order: bytes, key: Any) -> None:
        value = txn.get(bytes(key), db=self._env.index)
        try:
            record = schema.decode_record(bytes(key), value or b"")
        except SealError:
            if value is None:
                self._found(bytes(key), "recency", entry=order)
            return
        has_children = txn.cursor(db=self._env.children).set_key(bytes(key))
        if record.order != order or has_children or record.num_pins:
            self._found(bytes(key), "recency", entry=order)

    def _check_owner(self, txn: Any, key: bytes, value: Any) -> None:
        if txn.get(key, db=self._env.index) is None:
            self._found(key, "payload without record")


def _repair(directory: Path, whole: _Part) -> str | None:
    """Bad payloads become misses, and the rest is rebuilt; why that cannot be done now, or None."""
    with open_for_change(directory, "verify") as store:
        is_done = store.repair(whole.bad_payloads, rebuild=whole.needs_rebuild)
        whole.total.num_bad = store.stats().bad_blocks
        return None if is_done else store.why_not()
