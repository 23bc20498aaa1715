"""Drop what an operator chooses, beside a running engine or without one.

What is chosen goes in slices, least needed first, each checked once more in the transaction that
drops it: a block that was used or continued meanwhile stays. So does a block that is pinned, and
what leads to it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvstore.disk import schema
from kvstore.disk.environment import Environment
from kvstore.disk.offline.selection import (
    Chosen,
    Conditions,
    choose,
    find_block,
    matching_namespaces,
    order_to_free,
)
from kvstore.disk.schema import Head
from kvstore.disk.slices import existing, is_empty, reading
from kvstore.disk.store import open_for_change
from kvstore.errors import ConfigError

_MAX_LISTED = 1000
_SLICE = 1000  # blocks a transaction
_PAGES_A_BLOCK = 200  # pages of the map for each block of a slice: dropping one copies tree pages


def evict(
    path: str | Path,
    *,
    namespace: str | None = None,
    unused_for_s: float | None = None,
    document: str | None = None,
    to_bytes: int | None = None,
    with_pinned: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Drop what all given conditions choose; at least one is needed.

    namespace     the beginning of an id, or a model's name
    unused_for_s  not used for this long, nor anything that continues it
    document      the beginning of a block's key (hex): that block, all that continues it, and the
                  ancestors that nothing else continues
    to_bytes      the least recently used of what the others choose, until payloads and records
                  take no more than this

    Chosen blocks that are pinned stay, unless ``with_pinned``: then their pins are released, and
    they go as well.

    Returns ``{"blocks", "bytes", "pinned_blocks", "num_documents", "documents", "namespaces"}``:
    bytes of payloads and records; ``pinned_blocks`` were chosen and stay because they are pinned;
    ``documents`` lists the first 1,000 whose end went, by the key of their last block.
    With ``dry_run`` that is what would go. ``progress(blocks)`` is called per slice. Raises
    ``ConfigError`` for conditions that mean nothing here, ``TierBrokenError`` when the cache cannot
    be changed now.

    The bytes stay in freed pages until those are reused, or the cache is compacted.
    """
    if namespace is None and unused_for_s is None and document is None and to_bytes is None:
        raise ConfigError("evict: nothing was chosen; give a namespace, an age, a document or size")
    directory = existing(path, is_read_only=dry_run)
    tally = _Tally(progress)
    with ExitStack() as stack:
        store = None
        if not dry_run and not is_empty(directory):
            store = stack.enter_context(open_for_change(directory, "evict"))
        env = stack.enter_context(reading(directory))
        if env is None:
            return tally.report({})
        conditions = Conditions(
            matching_namespaces(env, namespace),
            None if unused_for_s is None else time.time() - unused_for_s,
            None if document is None else find_block(env, document),
            None if with_pinned else time.time(),
        )
        names = _models(env)
        max_order = None if to_bytes is None else _last_to_go(env, conditions, to_bytes)
        chosen = choose(env, conditions, max_order)
        for some in _batches(chosen, 1 + min(_SLICE, env.map_pages // _PAGES_A_BLOCK)):
            tally.num_pinned += sum(each.is_pinned for each in some)
            some = [each for each in some if not each.is_pinned]
            if store is not None and some:
                seen = {each.key: each.record.order for each in some}
                gone = store.evict(seen, with_pinned=with_pinned)
                some = [each for each in some if each.key in gone]
            tally.count(some)
    return tally.report(names)


def _last_to_go(env: Environment, conditions: Conditions, to_bytes: int) -> int:
    """The order up to which blocks go: 0 for none, the newest for all."""
    with env.read() as txn:
        head = Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
    excess = head.total.num_bytes - to_bytes
    if excess <= 0 or to_bytes == 0:
        return head.next_order if to_bytes == 0 else 0
    return order_to_free(env, conditions, excess, head.next_order)


def _models(env: Environment) -> dict[bytes, str | None]:
    with env.read() as txn:
        return {
            bytes(namespace): schema.decode_identity(bytes(namespace), value).get("model")
            for namespace, value in txn.cursor(db=env.namespaces)
        }


def _batches(chosen: Iterable[Chosen], size: int) -> Iterator[list[Chosen]]:
    iterator = iter(chosen)
    while batch := list(islice(iterator, size)):
        yield batch


@dataclass(slots=True)
class _Tally:
    """What went, or would."""

    progress: Callable[[int], None] | None
    num_blocks: int = 0
    num_bytes: int = 0
    num_pinned: int = 0
    num_documents: int = 0
    documents: list[dict[str, Any]] = field(default_factory=list)
    by_namespace: dict[bytes, list[int]] = field(default_factory=dict)

    def count(self, gone: list[Chosen]) -> None:
        for chosen in gone:
            record = chosen.record
            blocks = 0 if record.is_bad else 1
            self.num_blocks += blocks
            self.num_bytes += chosen.num_bytes
            sums = self.by_namespace.setdefault(record.namespace, [0, 0])
            sums[0] += blocks
            sums[1] += chosen.num_bytes
            if chosen.is_end:
                self.num_documents += 1
                if len(self.documents) < _MAX_LISTED:
                    self.documents.append(_as_document(chosen))
        if self.progress is not None:
            self.progress(self.num_blocks)

    def report(self, models: dict[bytes, str | None]) -> dict[str, Any]:
        namespaces = [
            {"id": namespace.hex(), "model": models.get(namespace), "blocks": n, "bytes": size}
            for namespace, (n, size) in self.by_namespace.items()
        ]
        return {
            "blocks": self.num_blocks,
            "bytes": self.num_bytes,
            "pinned_blocks": self.num_pinned,
            "num_documents": self.num_documents,
            "documents": self.documents,
            "namespaces": namespaces,
        }


def _as_document(chosen: Chosen) -> dict[str, Any]:
    record = chosen.record
    return {
        "key": chosen.key.hex(),
        "namespace": record.namespace.hex(),
        "blocks": record.depth + 1,
        "touched": record.touched,
    }
