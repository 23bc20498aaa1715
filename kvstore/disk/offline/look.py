"""What ``kvstore inspect`` shows of a cache, beside a running engine or without one.

Everything is read in slices. Nothing here loads a model, and nothing knows how it is printed.
"""

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.disk import schema
from kvstore.disk.attach import ATTACH_FILE, Attachment
from kvstore.disk.environment import Environment
from kvstore.disk.offline.selection import find_block
from kvstore.disk.offline.summary import summarize
from kvstore.disk.schema import SealError
from kvstore.disk.slices import existing, reading, slices
from kvstore.errors import ConfigError

SURVEY_S = 0.6
_MOST_CHILDREN = 1000


@dataclass(slots=True)
class _Uses:
    """Of one namespace, as far as its blocks were looked at."""

    codecs: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    oldest: float | None = None
    newest: float | None = None


def survey(path: str | Path, *, limit_s: float = SURVEY_S) -> dict[str, Any]:
    """``summarize``, and what only the records know, pages, and who is attached.

    Records are looked at for ``limit_s`` seconds, in the order of keys, which are hashes: what was
    seen by then is a fair sample. ``surveyed_blocks`` says how many that were.
    """
    found = summarize(path)
    uses: dict[bytes, _Uses] = {}
    num_surveyed = 0
    found["pages"] = None
    found["attached"] = []
    with reading(path) as env:
        if env is not None:
            found["pages"] = _pages(env)
            found["attached"] = [
                {"pid": each.pid, "role": each.role, "since": each.since, "holder": str(each)}
                for each in env.attachment.holders()
            ]
            num_surveyed = _survey(env, uses, time.monotonic() + limit_s)
    found["surveyed_blocks"] = num_surveyed
    for row in found["namespaces"]:
        seen = uses.get(bytes.fromhex(row["id"]), _Uses())
        row |= {
            "codecs": dict(seen.codecs),
            "hits": seen.hits,
            "oldest_use": seen.oldest,
            "newest_use": seen.newest,
        }
    return found


def _survey(env: Environment, uses: dict[bytes, _Uses], deadline: float) -> int:
    num_surveyed = 0

    def look(_: Any, key: bytes, value: Any) -> None:
        nonlocal num_surveyed
        try:
            record = schema.decode_record(key, value)
        except SealError:
            return
        num_surveyed += 1
        seen = uses.get(record.namespace)
        if seen is None:
            seen = uses[record.namespace] = _Uses()
        seen.hits += record.hits
        if not record.is_bad:
            seen.codecs[record.codec] += 1
        touched = record.touched
        if seen.oldest is None or touched < seen.oldest:
            seen.oldest = touched
        if seen.newest is None or touched > seen.newest:
            seen.newest = touched

    for _ in slices(env, env.index, look):
        if time.monotonic() > deadline:
            break
    return num_surveyed


def _pages(env: Environment) -> dict[str, int]:
    """Pages of the file: those of trees and payloads, and those that wait to be used again."""
    with env.read() as txn:
        live = 2 + sum(
            stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            for stat in (
                txn.stat(db)
                for db in (
                    env.index, env.payload, env.children, env.recency, env.namespaces, env.meta,
                )
            )
        )  # fmt: skip
    total = env.file_pages
    return {"live": live, "free": max(total - live, 0), "page_bytes": env.page_size}


def block(path: str | Path, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One block in full, and what its namespace was registered as.

    ``prefix`` is the beginning of its key in hex digits. Raises ``ConfigError`` unless it is one.
    """
    with reading(path) as env:
        if env is None:
            raise ConfigError(f"block {prefix}: the cache is empty")
        key = find_block(env, prefix, "block")
        with env.read() as txn:
            value = txn.get(key, db=env.index)
            payload = txn.get(key, db=env.payload)
            cursor = txn.cursor(db=env.children)
            children: list[str] = []
            is_there = cursor.set_key(key)
            num_children = cursor.count() if is_there else 0
            while is_there and len(children) < _MOST_CHILDREN:
                children.append(bytes(cursor.value()).hex())
                is_there = cursor.next_dup()
            try:
                record = schema.decode_record(key, value or b"")
            except SealError:
                raise ConfigError(
                    f"block {key.hex()}: its record is damaged; run: kvstore verify {path} --fix"
                ) from None
            is_intact = payload is not None and schema.checksum(payload) == record.checksum
            name = txn.get(record.namespace, db=env.namespaces)
            description = schema.decode_identity(record.namespace, name)
    tokens = record.tokens if record.num_tokens else b""
    return {
        "path": str(existing(path)),
        "key": key.hex(),
        "parent": record.parent.hex() if record.depth else None,
        "children": children,
        "num_children": num_children,
        "depth": record.depth,
        "namespace": record.namespace.hex(),
        "model": description.get("model"),
        "salt": record.salt.hex(),
        "tokens": record.num_tokens,
        "token_ids": np.frombuffer(tokens, "<u4").tolist(),
        "nbytes": record.nbytes,
        "payload_bytes": record.payload_bytes,
        "codec": record.codec,
        "checksum": record.checksum.hex(),
        "is_intact": None if record.is_bad else is_intact,
        "created": record.created,
        "touched": record.touched,
        "hits": record.hits,
        "is_bad": record.is_bad,
        "num_pins": record.num_pins,
        "has_pin": record.pinned_until > 0,
        "pinned_until": record.pinned_until if 0 < record.pinned_until < math.inf else None,
    }, description


class Engines:
    """What engines that use a cache let others read of themselves. A context manager."""

    def __init__(self, path: str | Path) -> None:
        """Raises ``ConfigError`` for a path that is no cache."""
        self._directory = existing(path)
        self._attachment: Attachment | None = None

    def read(self) -> list[dict[str, Any]]:
        """A snapshot of each (``kvstore.reports.publication``), with pid, role and since when."""
        if self._attachment is None:
            if not (self._directory / ATTACH_FILE).exists():
                return []
            self._attachment = Attachment(self._directory, "watch", read_only=True)
        return [
            {"pid": holder.pid, "role": holder.role, "since": holder.since, **snapshot}
            for holder in self._attachment.holders()
            for snapshot in _snapshots(self._attachment.published(holder))
        ]

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: object) -> None:
        if self._attachment is not None:
            self._attachment.detach()


def _snapshots(body: bytes | None) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ValueError):
        found = json.loads(body or b"[]")
        yield from (each for each in found if isinstance(each, dict))
