"""Reading a whole cache without holding a read transaction for long.

An open reader keeps LMDB from reusing the pages freed since it began. So a walk over the index
runs in slices and resumes by key: each slice is consistent in itself, the whole is not.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb

from kvstore.config import expand_home
from kvstore.disk import places, registry
from kvstore.disk.environment import Environment, State
from kvstore.disk.structure import DATA_FILE, Soundness, check_light
from kvstore.errors import ConfigError, TierBrokenError

SLICE_RECORDS = 1000
SLICE_S = 0.05
_LOOK_S = 0.1


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[Environment | None]:
    """The environment at ``path``, read-only; None when there is nothing in it yet.

    Raises ``ConfigError`` when the path is missing or not a cache.
    """
    directory = existing(path)
    if is_empty(directory):
        yield None
        return
    env = registry.acquire(directory, role="inspect", is_read_only=True)
    try:
        wait_until_open(env)
        if env.state is not State.OK:
            raise TierBrokenError(env.reason or f"{directory}: cannot be read", tier="disk")
        yield env
    except lmdb.Error as error:
        raise TierBrokenError(
            f"{directory}: the database cannot be read ({error}); run: kvstore verify {directory}",
            tier="disk",
        ) from error
    finally:
        registry.release(env)


def is_empty(directory: Path) -> bool:
    """Nothing was ever stored there: no file yet, or one whose creation was interrupted."""
    finding = check_light(directory / DATA_FILE)
    return finding.soundness is Soundness.EMPTY or (
        finding.soundness is Soundness.SOUND and finding.main_root is None
    )


def wait_until_open(env: Environment) -> None:
    """Wait for our own check of the file; raises ``TierBrokenError`` while another keeps it."""
    while not env.wait_ready(_LOOK_S):
        if env.waits_for_others:
            raise TierBrokenError(f"{env.reason}; try again when that has ended", tier="disk")


def existing(path: str | Path, *, is_read_only: bool = True) -> Path:
    """The directory of a cache, absolute. Raises ``ConfigError``."""
    directory = expand_home(path).absolute()
    if not directory.exists():
        raise ConfigError(f"{path}: there is no such directory; check the path")
    places.check_directory(directory, is_read_only=is_read_only)
    return directory


Visit = Callable[[Any, bytes, Any], None]


def walk(env: Environment, db: Any, visit: Visit) -> None:
    """Call ``visit(transaction, key, value)`` for every entry of a database, in key order.

    ``value`` is a mapped view, and both it and the transaction are gone after the call.
    """
    for _ in slices(env, db, visit):
        pass


def slices(
    env: Environment, db: Any, visit: Visit, first: bytes = b"", end: bytes | None = None
) -> Iterator[bytes | None]:
    """Like ``walk``, for keys from ``first`` on and before ``end``.

    Yields after each slice, when no transaction is open, where the next one begins.
    """
    position: bytes | None = first
    while position is not None:
        with env.read() as txn:
            position = _walk_slice(txn, db, position, end, visit)
        yield position


def _walk_slice(
    txn: Any, db: Any, position: bytes, end: bytes | None, visit: Visit
) -> bytes | None:
    """One slice from ``position`` on; where the next one begins, None at the end."""
    cursor = txn.cursor(db=db)
    deadline = time.monotonic() + SLICE_S
    is_there = cursor.set_range(position) if position else cursor.first()
    for _ in range(SLICE_RECORDS):
        key = bytes(cursor.key()) if is_there else None
        if key is None or (end is not None and key >= end):
            return None
        visit(txn, key, cursor.value())
        is_there = cursor.next()
        if time.monotonic() > deadline:
            break
    return bytes(cursor.key()) if is_there else None
