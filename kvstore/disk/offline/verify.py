"""Is everything in the cache what was stored, and does everything agree? ``kvstore verify``.

Three levels: the file's structure (only while nobody else is attached, in a child process); every
record and payload against its checksum; every entry of ``children`` and ``recency`` and the
counters against the records. Each block is judged within one transaction, and what looks wrong is
looked at again in another, so a running engine causes no false alarm.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.block import BlockRef
from kvstore.disk import schema
from kvstore.disk.attach import Attachment
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Head, Record, SealError, Usage
from kvstore.disk.slices import Visit, existing, is_empty, reading, slices
from kvstore.disk.startup import settle_by_deep_check
from kvstore.disk.store import open_for_change
from kvstore.disk.structure import DATA_FILE, Soundness, check_deep, check_light
from kvstore.errors import ConfigError

_MAX_LISTED = 10_000
# Keys are digests, so payloads in the order of keys lie all over the file. A few threads keep the
# disk busy while one of them computes a checksum.
_NUM_THREADS = 4
_BATCH = 64  # payloads that are read before progress is told


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
    whole = _Findings()
    damage = _check_structure(directory, fix=fix)
    if damage:
        whole.found(None, f"structure: {damage}")
        is_aside = fix and check_light(directory / DATA_FILE).soundness is Soundness.EMPTY
        return _report(whole, int(is_aside))
    with reading(directory) as env:
        if env is not None:
            whole = _Check(env, whole, progress).run()
    if not fix or whole.is_sound:
        return _report(whole, 0)
    obstacle = _repair(directory, whole)
    fixed = len(whole.corrupt) + len(whole.orphans) if obstacle is None else 0
    return _report(whole, fixed, obstacle)


def _report(whole: "_Findings", fixed: int, obstacle: str | None = None) -> dict[str, Any]:
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
    if is_empty(directory):
        return None
    finding = check_light(data_file)
    if finding.soundness is Soundness.FOREIGN:
        raise ConfigError(f"{data_file}: {finding.reason}; name a cache")
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


class _Findings:
    """What was met, and what of it is wrong."""

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


def _head(env: Environment) -> Head | None:
    with env.read() as txn:
        try:
            return Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
        except SealError:
            return None


class _Check:
    """One pass over everything. A finding counts when a second look confirms it."""

    def __init__(
        self,
        env: Environment,
        whole: _Findings,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._env = env
        self._whole = whole
        self._progress = progress
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "kv-verify")
        self._expected = 0
        self._num_read = 0
        self._met: list[tuple[bytes, Record]] = []  # by this slice, their payloads to be read
        self._suspects: set[bytes] = set()
        self._is_second_look = False

    def run(self) -> _Findings:
        env, whole = self._env, self._whole
        before = _head(env)
        self._expected = before.total.num_blocks if before is not None else 0
        after_pins = schema.PIN_PREFIX[:-1] + bytes([schema.PIN_PREFIX[-1] + 1])
        with self._pool:
            self._walk(env.index, self._check_block)
        self._walk(env.recency, self._check_recency)
        self._walk(env.payload, self._check_owner)
        self._walk(env.meta, self._check_pin, schema.PIN_PREFIX, after_pins)
        after = _head(env)
        # Only a cache that nobody changed meanwhile can be held against the sums of this pass.
        is_quiet = before == after and not whole.needs_rebuild
        if before is None or after is None or (is_quiet and after.total != whole.total):
            whole.found(None, "counters")
        if self._progress is not None:
            self._progress(self._num_read, self._num_read)
        return whole

    def _walk(self, db: Any, visit: Visit, first: bytes = b"", end: bytes | None = None) -> None:
        def visit_suspect(txn: Any, key: bytes, value: Any) -> None:
            if key in self._suspects:
                visit(txn, key, value)

        position = first
        for following in slices(self._env, db, visit, first, end):
            self._read_payloads()
            if self._suspects:
                # Not by key: in a damaged tree a walk meets keys that a search does not find.
                self._is_second_look = True
                for _ in slices(self._env, db, visit_suspect, position, following or end):
                    pass
                self._is_second_look = False
                self._suspects.clear()
            if following is not None:
                position = following

    # --- payloads ---------------------------------------------------------------------------------

    def _read_payloads(self) -> None:
        """Those of the blocks this slice has met: wrong ones become suspects."""
        met, self._met = self._met, []
        for start in range(0, len(met), _BATCH):
            batch = met[start : start + _BATCH]
            shares = [batch[i::_NUM_THREADS] for i in range(_NUM_THREADS)]
            for num_bytes, wrong in self._pool.map(self._judge, shares):
                self._whole.num_bytes += num_bytes
                self._suspects.update(wrong)
            self._num_read += len(batch)
            if self._progress is not None:
                self._progress(self._num_read, max(self._expected, self._num_read))

    def _judge(self, blocks: list[tuple[bytes, Record]]) -> tuple[int, list[bytes]]:
        """Thread: bytes read, and the keys of blocks whose payload is not what it should be.

        A payload is copied in a transaction of its own, which is as short as can be, and without
        the interpreter lock, so that others run while its pages are read; the copy is summed.
        """
        num_bytes, wrong = 0, []
        buffer = np.empty(max((record.nbytes for _, record in blocks), default=0), np.uint8)
        for key, record in blocks:
            copy = buffer[: record.nbytes]
            with self._env.read() as txn:
                payload = txn.get(key, db=self._env.payload)
                size = None if payload is None else len(payload)
                if size == record.nbytes:
                    copy[:] = np.frombuffer(payload, np.uint8)
                del payload
            num_bytes += size or 0
            if size != record.nbytes or schema.checksum(copy) != record.checksum:
                wrong.append(key)
        return num_bytes, wrong

    def _look_again_at_payload(self, txn: Any, key: bytes, record: Record) -> None:
        payload = txn.get(key, db=self._env.payload)
        if payload is None or len(payload) != record.nbytes:
            reason = "length"
        elif schema.checksum(payload) != record.checksum:
            reason = "payload"
        else:
            return
        self._whole.found(key, reason, rebuild=False)
        ref = BlockRef(key, record.parent, record.tokens, record.depth)
        self._whole.bad_payloads.append((ref, record))

    # --- records and what follows from them -------------------------------------------------------

    def _doubt(self, key: bytes) -> bool:
        """Whether this is the second look; else there will be one at this entry."""
        self._suspects.add(key)
        return self._is_second_look

    def _found(self, key: bytes, reason: str, *, entry: bytes | None = None) -> None:
        """``entry`` is the key under which the walk met it, if not the block's."""
        if self._doubt(key if entry is None else entry):
            self._whole.found(key, reason)

    def _check_block(self, txn: Any, key: bytes, value: Any) -> None:
        env = self._env
        try:
            record = schema.decode_record(key, value)
        except SealError:
            self._found(key, "record")
            return
        if not self._is_second_look:
            self._whole.total.add(record, len(value))
        is_orphan = record.depth > 0 and txn.get(record.parent, db=env.index) is None
        if is_orphan and self._doubt(key):
            self._whole.orphans.append(key)
            self._whole.needs_rebuild = True
        children = txn.cursor(db=env.children)
        if not children.set_key_dup(record.parent, key):
            self._found(key, "children")
        may_go = not children.set_key(key) and not record.num_pins
        if may_go and bytes(txn.get(record.order, db=env.recency) or b"") != key:
            self._found(key, "recency")
        if record.num_pins:
            self._check_pins(txn, key, record)
        if record.is_bad:
            return
        if self._is_second_look:
            self._look_again_at_payload(txn, key, record)
        else:
            self._met.append((key, record))

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


def _repair(directory: Path, whole: _Findings) -> str | None:
    """Bad payloads become misses, and the rest is rebuilt; why that cannot be done now, or None."""
    with open_for_change(directory, "verify") as store:
        is_done = store.repair(whole.bad_payloads, rebuild=whole.needs_rebuild)
        whole.total.num_bad = store.stats().bad_blocks
        return None if is_done else store.why_not()
