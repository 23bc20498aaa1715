"""The database file: opened by liblmdb, its databases created once, their handles taken.

Does not know who else holds the directory, nor what is done with the file later.
"""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from kvstore.disk import departures, schema
from kvstore.disk.schema import Head, SealError, Usage
from kvstore.errors import TierBrokenError

_MAX_READERS = 512


@dataclass(frozen=True, slots=True)
class Opened:
    """Handles of the databases of ``schema``; ``head`` is None where it is damaged (the writer
    rebuilds it)."""

    index: Any
    payload: Any
    children: Any
    recency: Any
    namespaces: Any
    meta: Any
    head: Head | None


def open_file(directory: Path, *, is_read_only: bool, is_synced: bool, has_locks: bool) -> Any:
    """liblmdb's environment of an existing directory. ``has_locks``: it keeps its table of readers,
    which takes a directory that can be written. Raises ``lmdb.Error``."""
    env = lmdb.open(
        os.fsencode(directory),  # a path need not be text
        map_size=0,  # as the file says
        readonly=is_read_only,
        sync=is_synced,
        metasync=is_synced,
        mode=0o600,
        create=False,
        max_readers=_MAX_READERS,
        max_dbs=len(schema.DATABASES),
        # A spare transaction keeps a reader slot, which a forked child would free at its end.
        max_spare_txns=0,
        lock=has_locks,
    )
    if has_locks:
        env.reader_check()
    return env


def create_databases(env: Any, txn: Any, capacity_bytes: int) -> None:
    """Fill a new file, unless another process was faster."""
    if txn.stat()["entries"]:
        return
    for name in schema.DATABASES:
        env.open_db(name, txn=txn, dupsort=name == schema.CHILDREN)
    meta = env.open_db(schema.META, txn=txn)
    head = Head(1, capacity_bytes, 1, 0, Usage())
    txn.put(schema.SCHEMA_KEY, str(schema.SCHEMA_VERSION).encode(), db=meta)
    txn.put(schema.UUID_KEY, uuid.uuid4().bytes, db=meta)
    txn.put(schema.HEAD_KEY, head.encode(), db=meta)
    departures.begin(txn, meta)


def take_handles(env: Any, directory: Path) -> Opened:
    """Raises ``TierBrokenError`` for another schema than ours."""
    meta = env.open_db(schema.META, create=False)
    with env.begin() as txn:
        version = txn.get(schema.SCHEMA_KEY, db=meta)
        sealed_head = txn.get(schema.HEAD_KEY, db=meta)
    schema.check_version(version, directory)
    try:
        head = Head.decode(sealed_head or b"")
    except SealError:
        head = None
    return Opened(
        index=env.open_db(schema.INDEX, create=False),
        payload=env.open_db(schema.PAYLOAD, create=False),
        children=env.open_db(schema.CHILDREN, create=False, dupsort=True),
        recency=env.open_db(schema.RECENCY, create=False),
        namespaces=env.open_db(schema.NAMESPACES, create=False),
        meta=meta,
        head=head,
    )


def explain(directory: Path, pid: int, error: Exception) -> TierBrokenError:
    """Why a directory cannot be opened, for the user."""
    if isinstance(error, lmdb.LockError):
        return TierBrokenError(
            f"{directory}: a process of another container has our pid {pid}; start this one with "
            "another pid (docker --pid=host), or give it its own directory",
            tier="disk",
        )
    reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return TierBrokenError(f"{directory} cannot be opened: {reason}", tier="disk")
