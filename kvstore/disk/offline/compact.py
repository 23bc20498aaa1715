"""Give the file's unused pages back to the volume.

LMDB's file never shrinks, and freed pages keep old bytes until they are reused. A compact copy has
neither. It needs the directory alone, because it puts another file in its place.
"""

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb

from kvstore.disk import schema
from kvstore.disk.attach import ATTACH_FILE, Attachment
from kvstore.disk.places import TEMPORARY_MARK
from kvstore.disk.slices import existing, is_empty
from kvstore.disk.startup import settle_by_deep_check
from kvstore.disk.structure import DATA_FILE, Soundness, check_light
from kvstore.errors import TierBrokenError, TierFullError

_SLACK_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20


def compact(
    path: str | Path, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, int]:
    """Replace the file by a copy without free pages: ``{"bytes_before", "bytes_after"}``.

    The copy is on the medium before it takes the file's place; a crash leaves the old file.
    ``progress(done, total)`` is called now and then, in bytes.
    Raises ``ConfigError`` for a path that is no cache, ``TierBrokenError`` when another process is
    attached or the file is damaged, ``TierFullError`` when the volume has no room for the copy.
    """
    directory = existing(path, is_read_only=False)
    data_file = directory / DATA_FILE
    if _is_untouched(directory):
        return {"bytes_before": 0, "bytes_after": 0}
    attachment = Attachment(directory, "compact")
    try:
        if not attachment.try_exclusive():
            raise _in_use(attachment, directory)
        attachment.claim_slot()
        _remove_leftovers(directory)
        finding = check_light(data_file)
        if finding.soundness is Soundness.EMPTY:
            return {"bytes_before": 0, "bytes_after": 0}
        settle_by_deep_check(attachment, data_file, raise_on_damage=True)
        bytes_before = data_file.stat().st_size
        _copy(directory, data_file, progress)
        return {"bytes_before": bytes_before, "bytes_after": data_file.stat().st_size}
    finally:
        attachment.detach()


def require_alone(path: str | Path) -> None:
    """Raise ``TierBrokenError`` when another process is attached: ``compact`` would refuse, too."""
    directory = existing(path)
    if _is_untouched(directory):
        return
    attachment = Attachment(directory, "compact", read_only=True)
    try:
        if not attachment.try_exclusive():
            raise _in_use(attachment, directory)
    finally:
        attachment.detach()


def _is_untouched(directory: Path) -> bool:
    """No cache, and nobody who makes one: then it is no business of ours to leave a file there."""
    return not (directory / ATTACH_FILE).exists() and is_empty(directory)


def _in_use(attachment: Attachment, directory: Path) -> TierBrokenError:
    who = attachment.describe_holders()
    return TierBrokenError(f"{directory} is in use by {who}; end it first", tier="disk")


def _copy(directory: Path, data_file: Path, progress: Callable[[int, int], None] | None) -> None:
    copy = data_file.with_name(f"{DATA_FILE}{TEMPORARY_MARK}{os.getpid()}")
    env = lmdb.open(
        os.fsencode(directory), readonly=True, create=False, max_dbs=len(schema.DATABASES)
    )
    try:
        needed = _needed_bytes(directory, env)
        fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _stream(env, fd, lambda done: progress and progress(min(done, needed), needed))
            os.fsync(fd)
        finally:
            os.close(fd)
    except (lmdb.Error, OSError) as error:
        copy.unlink(missing_ok=True)
        raise TierBrokenError(f"{directory}: the copy failed: {error}", tier="disk") from error
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    finally:
        env.close()
    copy.rename(data_file)
    _sync_directory(directory)


def _stream(env: lmdb.Environment, fd: int, on_bytes: Callable[[int], object]) -> None:
    """Write the compact copy through a pipe: liblmdb's own loop could not be interrupted."""
    source, sink = os.pipe()
    fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _CHUNK_BYTES)
    with ThreadPoolExecutor(1, "kv-compact") as pool:
        try:
            copying = pool.submit(_copy_into, env, sink)
            done = 0
            while chunk := os.read(source, _CHUNK_BYTES):
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
                done += len(chunk)
                on_bytes(done)
        finally:
            os.close(source)  # ends a copy that is under way: its next write fails
        copying.result()


def _copy_into(env: lmdb.Environment, sink: int) -> None:
    try:
        env.copyfd(sink, compact=True)
    finally:
        os.close(sink)


def _needed_bytes(directory: Path, env: lmdb.Environment) -> int:
    """Size of the copy. Raises ``TierFullError`` when the volume has no room for it."""
    used = 0
    with env.begin() as txn:
        meta = env.open_db(schema.META, txn, create=False)
        schema.check_version(txn.get(schema.SCHEMA_KEY, db=meta), directory)
        for name in schema.DATABASES:
            stat = txn.stat(env.open_db(name, txn, create=False))
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    needed = int(used * env.stat()["psize"]) + _SLACK_BYTES
    volume = os.statvfs(directory)
    free = volume.f_bavail * volume.f_frsize
    if free < needed:
        raise TierFullError(
            f"{directory}: the compact copy needs {needed} bytes, the volume has {free} free; "
            "free some, or evict blocks first",
            tier="disk",
            needed_bytes=needed,
        )
    return needed


def _remove_leftovers(directory: Path) -> None:
    """Copies of an earlier run that was killed."""
    for leftover in directory.glob(f"{DATA_FILE}{TEMPORARY_MARK}*"):
        leftover.unlink()


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
