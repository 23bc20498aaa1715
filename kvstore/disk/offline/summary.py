"""A cache in numbers: what it holds all together, and each of its blocks."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import expand_home
from kvstore.disk import pins, places, schema
from kvstore.disk.environment import Environment
from kvstore.disk.offline.selection import matching_namespaces
from kvstore.disk.schema import Head, Record, SealError, Usage
from kvstore.disk.slices import reading, slices
from kvstore.disk.structure import DATA_FILE
from kvstore.errors import TierBrokenError

_SHOWN = ("model", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim")


def summarize(path: str | Path) -> dict[str, Any]:
    """What ``kvstore inspect`` prints: sizes and counters as last committed. O(namespaces).

    An empty or half-created directory is a cache with 0 blocks. Raises ``ConfigError`` when there
    is no such directory or it is something else, ``TierBrokenError`` when it cannot be read.
    """
    with reading(path) as env:
        directory = expand_home(path).absolute()
        found: dict[str, Any] = {
            "path": str(directory),
            "schema_version": None,
            "file_bytes": places.allocated_bytes(directory / DATA_FILE),
            "used_bytes": 0,
            "capacity_bytes": None,
            "blocks": 0,
            "tokens": 0,
            "bad_blocks": 0,
            "pinned_blocks": 0,
            "namespaces": [],
        }
        if env is None:
            return found
        with env.read() as txn:
            try:
                head = Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
                namespaces = _namespaces(env, txn)
                ended = pins.ended_blocks(env, txn, time.time())
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
        found["pinned_blocks"] = head.total.num_pinned - ended.total()
        for row in namespaces:
            row["pinned_blocks"] -= ended[bytes.fromhex(row["id"])]
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
            total.add_up(usage)
    return [
        {
            "id": namespace.hex(),
            **{name: identities.get(namespace, {}).get(name) for name in _SHOWN},
            "blocks": usage.num_blocks,
            "tokens": usage.num_tokens,
            "bytes": usage.num_bytes,
            "pinned_blocks": usage.num_pinned,
        }
        for namespace, usage in usages.items()
    ]


def list_blocks(
    path: str | Path, *, namespace: str | None = None, with_tokens: bool = False
) -> Iterator[dict[str, Any]]:
    """Every block's record, in key order: key, parent, namespace (hex), depth, sizes, times.

    ``is_pinned`` says whether something protects the block, ``pinned_until`` when the pin ends that
    was put on it: seconds since 1970, infinity for never, None without one.
    ``namespace``: the beginning of an id, or a model's name. ``with_tokens`` adds ``token_ids``.
    Unreadable records are left out (``verify`` finds them).
    """
    with reading(path) as env:
        if env is None:
            return
        wanted = matching_namespaces(env, namespace)
        rows: list[dict[str, Any]] = []
        with env.read() as txn:
            try:
                ended = pins.ended(env, txn, time.time())
            except SealError:
                ended = Counter()

        def collect(_: Any, key: bytes, value: Any) -> None:
            try:
                record = schema.decode_record(key, value)
            except SealError:
                return
            if wanted is None or record.namespace in wanted:
                record = record._replace(num_pins=record.num_pins - ended[key])
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
        "is_pinned": record.num_pins > 0,
        "pinned_until": record.pinned_until or None,
    }
    if with_tokens:
        tokens = record.tokens if record.num_tokens else b""
        row["token_ids"] = np.frombuffer(tokens, "<u4").tolist()
    return row
