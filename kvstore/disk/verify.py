"""Is everything in the cache what was stored, and does everything agree? ``kvstore verify``.

Three levels: the file's structure (only while nobody else is attached, in a child process); every
record and payload against its checksum; every entry of ``children`` and ``recency`` and the
counters against the records. Each block is judged within one transaction, so a running engine
causes no false alarm.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.block import BlockRef
from kvstore.disk import schema
from kvstore.disk.attach import Attachment
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Head, Record, SealError, Usage
from kvstore.disk.slices import existing, reading, walk
from kvstore.disk.startup import settle_by_deep_check
from kvstore.disk.store import open_for_change
from kvstore.disk.structure import DATA_FILE, Soundness, check_deep, check_light

_MAX_LISTED = 10_000


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
    a damaged structure is set aside. ``progress(done, total)`` is called per slice of blocks.

    Raises ``ConfigError`` for a path that is no cache, ``TierBrokenError`` when ``fix`` needs the
    directory and cannot have it.
    """
    directory = existing(path)
    damage = _check_structure(directory, fix=fix)
    if damage:
        found = [{"key": None, "reason": f"structure: {damage}"}]
        is_aside = fix and check_light(directory / DATA_FILE).soundness is Soundness.EMPTY
        return _report(0, 0, found, [], int(is_aside))
    with reading(directory) as env:
        if env is None:
            return _report(0, 0, [], [], 0)
        check = _Check(env, progress)
        check.run()
    fixed = _repair(directory, check) if fix and (check.corrupt or check.orphans) else 0
    orphans = [key.hex() for key in check.orphans[:_MAX_LISTED]]
    return _report(check.num_blocks, check.num_bytes, check.corrupt[:_MAX_LISTED], orphans, fixed)


def _report(
    num_blocks: int, num_bytes: int, corrupt: list[Any], orphans: list[str], fixed: int
) -> dict[str, Any]:
    return {
        "blocks_checked": num_blocks,
        "bytes_checked": num_bytes,
        "corrupt": corrupt,
        "orphans": orphans,
        "fixed": fixed,
        "ok": not corrupt and not orphans,
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


class _Check:
    """One pass over index, recency and counters."""

    def __init__(self, env: Environment, progress: Callable[[int, int], None] | None) -> None:
        self.num_blocks = 0
        self.num_bytes = 0
        self.corrupt: list[dict[str, str | None]] = []
        self.orphans: list[bytes] = []
        self.bad_payloads: list[tuple[BlockRef, Record]] = []
        self.needs_rebuild = False
        self._env = env
        self._progress = progress
        self._total = Usage()
        self._expected = 0

    def run(self) -> None:
        before = self._head()
        self._expected = before.total.num_blocks if before else 0
        walk(self._env, self._env.index, self._check_block)
        walk(self._env, self._env.recency, self._check_recency)
        walk(self._env, self._env.payload, self._check_owner)
        after = self._head()
        # Only a cache that nobody changed meanwhile can be held against the sums of this pass.
        is_quiet = before == after and not self.needs_rebuild
        if before is None or after is None or (is_quiet and after.total != self._total):
            self._found(None, "counters")
        if self._progress is not None:
            self._progress(self.num_blocks, self.num_blocks)

    def _head(self) -> Head | None:
        with self._env.read() as txn:
            try:
                return Head.decode(txn.get(schema.HEAD_KEY, db=self._env.meta) or b"")
            except SealError:
                return None

    def _found(self, key: bytes | None, reason: str, *, rebuild: bool = True) -> None:
        self.corrupt.append({"key": key.hex() if key is not None else None, "reason": reason})
        self.needs_rebuild = self.needs_rebuild or rebuild

    def _check_block(self, txn: Any, key: bytes, value: Any) -> None:
        env = self._env
        try:
            record = schema.decode_record(key, value)
        except SealError:
            self._found(key, "record")
            return
        self._total.add(record, len(value))
        if record.depth > 0 and txn.get(record.parent, db=env.index) is None:
            self.orphans.append(key)
            self.needs_rebuild = True
        children = txn.cursor(db=env.children)
        if not children.set_key_dup(record.parent, key):
            self._found(key, "children")
        is_leaf = not children.set_key(key)
        if is_leaf and bytes(txn.get(record.order, db=env.recency) or b"") != key:
            self._found(key, "recency")
        if not record.is_bad:
            self._check_payload(txn, key, record)

    def _check_payload(self, txn: Any, key: bytes, record: Record) -> None:
        self.num_blocks += 1
        payload = txn.get(key, db=self._env.payload)
        reason = None
        if payload is None or len(payload) != record.nbytes:
            reason = "length"
        elif schema.checksum(payload) != record.checksum:
            reason = "payload"
        if payload is not None:
            self.num_bytes += len(payload)
        if reason is not None:
            self._found(key, reason, rebuild=False)
            ref = BlockRef(key, record.parent, record.tokens, record.depth)
            self.bad_payloads.append((ref, record))
        if self._progress is not None and self.num_blocks % 256 == 0:
            self._progress(self.num_blocks, max(self._expected, self.num_blocks))

    def _check_recency(self, txn: Any, order: bytes, key: Any) -> None:
        value = txn.get(bytes(key), db=self._env.index)
        try:
            record = schema.decode_record(bytes(key), value or b"")
        except SealError:
            if value is None:
                self._found(bytes(key), "recency")
            return
        if record.order != order or txn.cursor(db=self._env.children).set_key(bytes(key)):
            self._found(bytes(key), "recency")

    def _check_owner(self, txn: Any, key: bytes, value: Any) -> None:
        record = txn.get(key, db=self._env.index)
        if record is None:
            self._found(key, "payload without record")


def _repair(directory: Path, check: _Check) -> int:
    """Bad payloads become misses; the rest is rebuilt. Returns how many findings that settles."""
    with open_for_change(directory, "verify") as store:
        is_done = store.repair(check.bad_payloads, rebuild=check.needs_rebuild)
    return len(check.corrupt) + len(check.orphans) if is_done else 0
