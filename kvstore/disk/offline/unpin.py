"""The pins of a cache, listed, and released without the engine that made them."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.disk import pins
from kvstore.disk.environment import Environment
from kvstore.disk.offline.branches import HEAD_TOKENS, token_ids_of
from kvstore.disk.offline.selection import ancestors, find_block, matching_namespaces, read_visit
from kvstore.disk.schema import SealError
from kvstore.disk.slices import existing, reading
from kvstore.disk.store import open_for_change
from kvstore.errors import TierBrokenError


@dataclass(frozen=True, slots=True)
class PinRow:
    """A pin, named by the block that it was put on: the last one of what it protects.

    num_…          from the root on; bytes of payloads and records
    pinned_until   when it ends, seconds since 1970; None for never
    touched        when its block was used last
    token_ids      the first ones of what it protects
    own_token_ids  the first ones after the last block that several continue
    """

    key: bytes
    namespace: bytes
    salt: bytes
    num_blocks: int
    num_tokens: int
    num_bytes: int
    pinned_until: float | None
    touched: float
    token_ids: list[int]
    own_token_ids: list[int]


def pinned(
    env: Environment, namespaces: Collection[bytes] | None = None, document: bytes | None = None
) -> Iterator[PinRow]:
    """The pins that have not ended, the first to end first.

    namespaces  ids; None for all
    document    a block's key: pins of that block, of what it continues and of what continues it

    Raises ``TierBrokenError`` when they cannot be read.
    """
    now = time.time()
    above = set() if document is None else {visit.key for visit in ancestors(env, document)}
    try:
        with env.read() as txn:
            live = [(until, key) for until, key in pins.rows(env, txn) if until > now]
    except SealError:
        raise TierBrokenError(
            f"{env.directory}: a pin is damaged; run: kvstore verify {env.directory} --fix",
            tier="disk",
        ) from None
    for until, key in live:
        with env.read() as txn:
            last = read_visit(env, txn, key)
        if last is None or (namespaces is not None and last.record.namespace not in namespaces):
            continue
        path = [*ancestors(env, key), last]
        if document is None or key in above or any(visit.key == document for visit in path):
            yield _row(path, until)


def _row(path: list[Any], until: float) -> PinRow:
    last = path[-1].record
    fork = max((i for i, visit in enumerate(path, start=1) if visit.num_children > 1), default=0)
    return PinRow(
        path[-1].key,
        last.namespace,
        last.salt,
        len(path),
        sum(0 if visit.record.is_bad else visit.record.num_tokens for visit in path),
        sum(visit.record_bytes + (not visit.record.is_bad) * visit.record.nbytes for visit in path),
        None if until == float("inf") else until,
        last.touched,
        _head(path),
        _head(path[fork:]),
    )


def _head(path: list[Any]) -> list[int]:
    found: list[int] = []
    for visit in path:
        if len(found) >= HEAD_TOKENS:
            break
        found += token_ids_of(visit.record)
    return found[:HEAD_TOKENS]


def unpin(
    path: str | Path,
    *,
    namespace: str | None = None,
    document: str | None = None,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Release pins that were written to disk; blocks stay cached. With ``dry_run`` nothing changes.

    namespace   the beginning of an id, or a model's name; None for all
    document    the beginning of a block's key (hex): pins of that block, of what it continues and
                of what continues it; None for all

    Returns ``{"pins", "released"}``: how many, and of each ``{"key", "namespace", "blocks",
    "bytes", "pinned_until"}``, blocks and bytes from the root on, until None for never.
    """
    with reading(path) as env:
        rows = []
        if env is not None:
            wanted = matching_namespaces(env, namespace)
            block = None if document is None else find_block(env, document)
            rows = list(pinned(env, wanted, block))
    if rows and not dry_run:
        with open_for_change(existing(path, is_read_only=False), "unpin") as store:
            rows = [row for row in rows if store.unpin(row.key)]
    return {
        "pins": len(rows),
        "released": [
            {
                "key": row.key.hex(),
                "namespace": row.namespace.hex(),
                "blocks": row.num_blocks,
                "bytes": row.num_bytes,
                "pinned_until": row.pinned_until,
            }
            for row in rows
        ],
    }
