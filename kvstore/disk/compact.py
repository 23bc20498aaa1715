"""Give the file's unused pages back to the volume.

LMDB's file never shrinks, and freed pages keep old bytes until they are reused. A compact copy has
neither. It needs the directory alone, because it puts another file in its place.
"""

import os
from pathlib import Path

import lmdb

from kvstore.disk import schema
from kvstore.disk.attach import Attachment
from kvstore.disk.places import TEMPORARY_MARK
from kvstore.disk.slices import existing
from kvstore.disk.startup import settle_by_deep_check
from kvstore.disk.structure import DATA_FILE, Soundness, check_light
from kvstore.errors import TierBrokenError, TierFullError

_SLACK_BYTES = 1 << 20


def compact(path: str | Path) -> dict[str, int]:
    """Replace the file by a copy without free pages: ``{"bytes_before", "bytes_after"}``.

    The copy is on the medium before it takes the file's place; a crash leaves the old file.
    Raises ``ConfigError`` for a path that is no cache, ``TierBrokenError`` when another process is
    attached or the file is damaged, ``TierFullError`` when the volume has no room for the copy.
    """
    directory = existing(path, is_read_only=False)
    data_file = directory / DATA_FILE
    attachment = Attachment(directory, "compact")
    try:
        if not attachment.try_exclusive():
            who = attachment.describe_holders()
            raise TierBrokenError(f"{directory} is in use by {who}; end it first", tier="disk")
        attachment.claim_slot()
        _remove_leftovers(directory)
        finding = check_light(data_file)
        if finding.soundness is Soundness.EMPTY:
            return {"bytes_before": 0, "bytes_after": 0}
        settle_by_deep_check(attachment, data_file, raise_on_damage=True)
        bytes_before = data_file.stat().st_size
        _copy(directory, data_file)
        return {"bytes_before": bytes_before, "bytes_after": data_file.stat().st_size}
    finally:
        attachment.detach()


def _copy(directory: Path, data_file: Path) -> None:
    copy = data_file.with_name(f"{DATA_FILE}{TEMPORARY_MARK}{os.getpid()}")
    env = lmdb.open(str(directory), readonly=True, create=False, max_dbs=len(schema.DATABASES))
    try:
        _check_room(directory, env)
        fd = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            env.copyfd(fd, compact=True)
            os.fsync(fd)
        finally:
            os.close(fd)
    except lmdb.Error as error:
        copy.unlink(missing_ok=True)
        raise TierBrokenError(f"{directory}: the copy failed: {error}", tier="disk") from error
    except BaseException:
        copy.unlink(missing_ok=True)
        raise
    finally:
        env.close()
    copy.rename(data_file)
    _sync_directory(directory)


def _check_room(directory: Path, env: lmdb.Environment) -> None:
    used = 0
    with env.begin() as txn:
        for name in schema.DATABASES:
            stat = txn.stat(env.open_db(name, txn, create=False))
            used += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
    needed = used * env.stat()["psize"] + _SLACK_BYTES
    volume = os.statvfs(directory)
    free = volume.f_bavail * volume.f_frsize
    if free < needed:
        raise TierFullError(
            f"{directory}: the compact copy needs {needed} bytes, the volume has {free} free; "
            "free some, or evict blocks first",
            tier="disk",
            needed_bytes=needed,
        )


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
