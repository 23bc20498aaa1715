"""What the command calls: look at a cache and tend it, beside a running engine or without one.

Reads run in slices of at most 1,000 records or 50 ms, resumed by key, so that they never keep LMDB
from reusing pages for long; what changes while they run is seen or not. Nothing here loads a model
or imports torch.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.disk import places, schema
from kvstore.disk.archive import export_documents, import_documents
from kvstore.disk.compact import compact
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Head, Record, SealError, Usage
from kvstore.disk.selection import (
    continuations,
    find_block,
    matching_namespaces,
    only_for,
    read_records,
    unused_since,
)
from kvstore.disk.slices import existing, reading, slices
from kvstore.disk.store import open_for_change
from kvstore.disk.structure import DATA_FILE
from kvstore.disk.verify import verify
from kvstore.errors import ConfigError, TierBrokenError

__all__ = [
    "compact",
    "export_documents",
    "import_documents",
    "list_blocks",
    "remove",
    "summarize",
    "verify",
]

_SHOWN = ("model", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim")


def summarize(path: str | Path) -> dict[str, Any]:
    """What ``kvstore inspect`` prints: sizes and counters as last committed. O(namespaces).

    An empty or half-created directory is a cache with 0 blocks. Raises ``ConfigError`` when there
    is no such directory or it is something else, ``TierBrokenError`` when it cannot be read.
    """
    with reading(path) as env:
        directory = Path(path).expanduser().absolute()
        found: dict[str, Any] = {
            "path": str(directory),
            "schema_version": None,
            "file_bytes": places.allocated_bytes(directory / DATA_FILE),
            "used_bytes": 0,
            "capacity_bytes": None,
            "blocks": 0,
            "tokens": 0,
            "bad_blocks": 0,
            "namespaces": [],
        }
        if env is None:
            return found
        with env.read() as txn:
            try:
                head = Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
                namespaces = _namespaces(env, txn)
            except SealError:
                raise TierBrokenError(
                    f"{path}: the counters are damaged; run: kvstore verify {path} --fix",
                    tier="disk",
                ) from None
        found["schema_version"] = schema.SCHEMA_VERSION
        found["used_bytes"] = head.total.num_bytes
        found["capacity_bytes"] = head.capacity_bytes
        found["blocks"] = head.total.num_blocks
        found["tokens"] = head.total.num_tokens
        found["bad_blocks"] = head.total.num_bad
        found["namespaces"] = namespaces
        return found


def _namespaces(env: Environment, txn: Any) -> list[dict[str, Any]]:
    """One row per namespace that has blocks or a name."""
    usages: dict[bytes, Usage] = {}
    identities: dict[bytes, dict[str, Any]] = {}
    for raw_key, value in txn.cursor(db=env.namespaces):
        namespace = bytes(raw_key)
        identities[namespace] = schema.decode_identity(namespace, value)
        usages[namespace] = Usage()
    for raw_key, value in txn.cursor(db=env.meta):
        key = bytes(raw_key)
        if key.startswith(schema.USAGE_PREFIX):
            usage = Usage.decode(key, value)
            total = usages.setdefault(schema.namespace_of_usage(key), Usage())
            total.num_blocks += usage.num_blocks
            total.num_tokens += usage.num_tokens
            total.num_bytes += usage.num_bytes
    return [
        {
            "id": namespace.hex(),
            **{name: identities.get(namespace, {}).get(name) for name in _SHOWN},
            "blocks": usage.num_blocks,
            "tokens": usage.num_tokens,
            "bytes": usage.num_bytes,
        }
        for namespace, usage in usages.items()
    ]


def list_blocks(
    path: str | Path, *, namespace: str | None = None, with_tokens: bool = False
) -> Iterator[dict[str, Any]]:
    """Every block's record, in key order: key, parent, namespace (hex), depth, sizes, times.

    ``namespace``: the beginning of an id, or a model's name. ``with_tokens`` adds ``token_ids``.
    Unreadable records are left out (``verify`` finds them).
    """
    with reading(path) as env:
        if env is None:
            return
        wanted = matching_namespaces(env, namespace)
        rows: list[dict[str, Any]] = []

        def collect(_: Any, key: bytes, value: Any) -> None:
            try:
                record = schema.decode_record(key, value)
            except SealError:
                return
            if wanted is None or record.namespace in wanted:
                rows.append(_row(key, record, with_tokens=with_tokens))

        for _ in slices(env, env.index, collect):
            yield from rows
            rows.clear()


def _row(key: bytes, record: Record, *, with_tokens: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": key.hex(),
        "parent": record.parent.hex(),
        "depth": record.depth,
        "namespace": record.namespace.hex(),
        "salt": record.salt.hex(),
        "tokens": record.num_tokens,
        "nbytes": record.nbytes,
        "payload_bytes": record.payload_bytes,
        "codec": record.codec,
        "created": record.created,
        "touched": record.touched,
        "is_bad": record.is_bad,
    }
    if with_tokens:
        tokens = record.tokens if record.num_tokens else b""
        row["token_ids"] = np.frombuffer(tokens, "<u4").tolist()
    return row


def remove(
    path: str | Path,
    *,
    namespace: str | None = None,
    unused_for_s: float | None = None,
    document: str | None = None,
    dry_run: bool = False,
) -> dict[str, int]:
    """Drop what all given conditions choose: ``{"blocks", "bytes"}``. At least one is needed.

    namespace     the beginning of an id, or a model's name
    unused_for_s  not used for this long, nor anything that continues it
    document      the beginning of a block's key (hex): that block, all that continues it, and the
                  ancestors that nothing else continues

    The bytes stay in freed pages until those are reused, or the cache is compacted.
    """
    if namespace is None and unused_for_s is None and document is None:
        raise ConfigError("remove: expected a namespace, an age or a document; nothing was given")
    with reading(path) as env:
        if env is None:
            return {"blocks": 0, "bytes": 0}
        records = read_records(env, namespace)
    chosen = set(records)
    if unused_for_s is not None:
        chosen &= unused_since(records, time.time() - unused_for_s)
    if document is not None:
        key = find_block(records, document)
        below = continuations(records, key)
        chosen &= below | only_for(records, below, key)
    good = [records[key] for key in chosen if not records[key].is_bad]
    counts = {"blocks": len(good), "bytes": sum(record.nbytes for record in good)}
    if chosen and not dry_run:
        deepest_first = sorted(chosen, key=lambda key: records[key].depth, reverse=True)
        with open_for_change(existing(path, is_read_only=False)) as store:
            counts["blocks"] = store.remove(deepest_first)
    return counts
