"""Which blocks a command means: by namespace, by age, by document. Reads only.

A document on disk is a path in the tree of blocks. It is named by (the beginning of) the key of any
block on it, and what continues that block is meant, too.
"""

from typing import Any

from kvstore.disk import schema
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record, SealError
from kvstore.disk.slices import walk
from kvstore.errors import ConfigError

_MIN_PREFIX = 4  # hex digits of a namespace id that are taken for one


def read_records(env: Environment, namespace: str | None) -> dict[bytes, Record]:
    """Readable records, without tokens, of the namespaces meant (None: all)."""
    wanted = matching_namespaces(env, namespace)
    records: dict[bytes, Record] = {}

    def collect(_: Any, key: bytes, value: Any) -> None:
        try:
            record = schema.decode_record(key, value)
        except SealError:
            return
        if wanted is None or record.namespace in wanted:
            records[key] = record._replace(tokens=b"")

    walk(env, env.index, collect)
    return records


def matching_namespaces(env: Environment, wanted: str | None) -> set[bytes] | None:
    """Namespaces whose id begins with ``wanted`` or whose model it is; None for all.

    Raises ``ConfigError`` when there is none.
    """
    if wanted is None:
        return None
    with env.read() as txn:
        known = {
            bytes(namespace): schema.decode_identity(bytes(namespace), value).get("model")
            for namespace, value in txn.cursor(db=env.namespaces)
        }
        for raw_key, _ in txn.cursor(db=env.meta):
            key = bytes(raw_key)
            if key.startswith(schema.USAGE_PREFIX):
                known.setdefault(schema.namespace_of_usage(key), None)
    found = {
        namespace
        for namespace, model in known.items()
        if model == wanted
        or (len(wanted) >= _MIN_PREFIX and namespace.hex().startswith(wanted.lower()))
    }
    if not found:
        names = ", ".join(f"{namespace.hex()[:8]} ({model})" for namespace, model in known.items())
        raise ConfigError(f"namespace {wanted!r} is not in this cache; it has: {names or 'none'}")
    return found


def unused_since(records: dict[bytes, Record], time_s: float) -> set[bytes]:
    """Blocks last used before that time, as everything below them."""
    newest: dict[bytes, float] = {}
    for key in sorted(records, key=lambda key: records[key].depth, reverse=True):
        record = records[key]
        newest[key] = max(record.touched, newest.get(key, 0.0))
        newest[record.parent] = max(newest[key], newest.get(record.parent, 0.0))
    return {key for key in records if newest[key] < time_s}


def find_block(records: dict[bytes, Record], prefix: str) -> bytes:
    """The key that begins so. Raises ``ConfigError`` unless it is exactly one."""
    matching = [key for key in records if key.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        found = "no block has" if not matching else f"{len(matching)} blocks have"
        raise ConfigError(f"document {prefix!r}: {found} a key that begins so; give more of it")
    return matching[0]


def continuations(records: dict[bytes, Record], key: bytes) -> set[bytes]:
    """The block and all below it."""
    children = _children(records)
    found: set[bytes] = set()
    queue = [key]
    while queue:
        key = queue.pop()
        found.add(key)
        queue.extend(children.get(key, ()))
    return found


def ancestors(records: dict[bytes, Record], key: bytes) -> list[bytes]:
    """What the block continues, nearest first."""
    found = []
    parent = records[key].parent
    while parent in records:
        found.append(parent)
        parent = records[parent].parent
    return found


def only_for(records: dict[bytes, Record], chosen: set[bytes], key: bytes) -> set[bytes]:
    """Ancestors of ``key`` that lead to nothing but ``chosen``."""
    children = _children(records)
    found: set[bytes] = set()
    for parent in ancestors(records, key):
        if not all(child in chosen or child in found for child in children[parent]):
            break
        found.add(parent)
    return found


def _children(records: dict[bytes, Record]) -> dict[bytes, list[bytes]]:
    children: dict[bytes, list[bytes]] = {}
    for key, record in records.items():
        children.setdefault(record.parent, []).append(key)
    return children
