"""Which blocks a command means: by namespace, by age, by document, by size. Reads only.

A document on disk is a path in the tree of blocks. It is named by (the beginning of) the key of any
block on it, and what continues that block is meant, too.

A block can only go with everything that continues it. So a choice walks the tree from its leaves
up, and a block is chosen when all conditions hold for it and for what is below it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.disk import schema
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record, SealError
from kvstore.disk.slices import SLICE_RECORDS
from kvstore.disk.tree import Visit, walk_tree
from kvstore.errors import ConfigError
from kvstore.hashing import KEY_BYTES

_MIN_PREFIX = 4  # hex digits of a namespace id that are taken for one
_NUM_BUCKETS = 4096


@dataclass(frozen=True, slots=True)
class Conditions:
    """What is meant; None: no such condition.

    namespaces    ids
    unused_since  last used before this time, seconds since the epoch
    document      key of a block: it, what continues it, and ancestors that nothing else continues
    pins_at       blocks that a pin protects at this time are marked; None: pins do not matter
    """

    namespaces: frozenset[bytes] | None = None
    unused_since: float | None = None
    document: bytes | None = None
    pins_at: float | None = None

    def meets(self, record: Record) -> bool:
        return (self.namespaces is None or record.namespace in self.namespaces) and (
            self.unused_since is None or record.touched < self.unused_since
        )


class Chosen(NamedTuple):
    """A block that may go.

    num_bytes   payload and record
    last_order  of the block and all below it, the newest: the least recently used go by this
    is_end      nothing continues it
    is_pinned   it meets the conditions, but a pin protects it
    """

    key: bytes
    record: Record
    num_bytes: int
    last_order: int
    is_end: bool
    is_pinned: bool


@dataclass(slots=True)
class _Below:
    """What a walk has found below a block that it has not left yet."""

    stays: bool = False
    is_pinned: bool = False
    last_order: int = 0
    is_end: bool = True


def choose(
    env: Environment, conditions: Conditions, max_order: int | None = None
) -> Iterator[Chosen]:
    """The blocks meant, each after all that continues it; with ``max_order`` none used since."""
    path: list[_Below] = [_Below()]
    for visit in walk_tree(env, conditions.namespaces, conditions.document):
        if not visit.is_leaving:
            path.append(_Below())
        elif found := _leave(path, visit, conditions, max_order):
            yield found
    if conditions.document is not None and not path[0].stays:
        yield from _ancestors_alone(env, conditions, path[0], max_order)


def _leave(
    path: list[_Below], visit: Visit, conditions: Conditions, max_order: int | None
) -> Chosen | None:
    """Close the last block of the path; it, when it may go."""
    below, around = path.pop(), path[-1]
    order = max(int.from_bytes(visit.record.order, "big"), below.last_order)
    is_too_new = max_order is not None and order > max_order
    stays = below.stays or is_too_new or not conditions.meets(visit.record)
    has_pin = conditions.pins_at is not None and visit.record.pinned_until > conditions.pins_at
    is_pinned = below.is_pinned or has_pin
    around.stays = around.stays or stays
    around.is_pinned = around.is_pinned or is_pinned
    around.last_order = max(around.last_order, order)
    around.is_end = False
    if stays:
        return None
    num_bytes = visit.record_bytes + (0 if visit.record.is_bad else visit.record.nbytes)
    return Chosen(visit.key, visit.record, num_bytes, order, below.is_end, is_pinned)


def _ancestors_alone(
    env: Environment, conditions: Conditions, below: _Below, max_order: int | None
) -> Iterator[Chosen]:
    """What leads to the document and to nothing else, nearest first."""
    assert conditions.document is not None
    for visit in _ancestors(env, conditions.document):
        stays, is_pinned = visit.num_children > 1, below.is_pinned
        path = [_Below(), _Below(stays, is_pinned, below.last_order, is_end=False)]
        found = _leave(path, visit, conditions, max_order)
        if found is None:
            return
        yield found
        below = path[0]


def ancestors(env: Environment, key: bytes) -> list[Visit]:
    """What the block continues, root first."""
    return list(_ancestors(env, key))[::-1]


def _ancestors(env: Environment, key: bytes) -> Iterator[Visit]:
    """Nearest first."""
    while True:
        found: list[Visit] = []
        with env.read() as txn:
            children = txn.cursor(db=env.children)
            visit = read_visit(env, txn, key)
            while visit is not None and len(found) < SLICE_RECORDS:
                visit = read_visit(env, txn, visit.record.parent)
                if visit is not None:
                    num_children = children.count() if children.set_key(visit.key) else 0
                    found.append(visit._replace(num_children=num_children))
        yield from found
        if visit is None:
            return
        key = visit.key


def read_visit(env: Environment, txn: Any, key: bytes) -> Visit | None:
    """The block, its children not counted; None for one that cannot be read."""
    value = txn.get(key, db=env.index)
    try:
        return Visit(key, schema.decode_record(key, value or b""), len(value or b""), False)
    except SealError:
        return None


def order_to_free(env: Environment, conditions: Conditions, num_bytes: int, newest: int) -> int:
    """The order up to which the blocks meant sum to ``num_bytes``; ``newest`` when they do not.

    Exact, in constant memory: each walk counts bytes in buckets of orders, and the next one looks
    into the bucket where the sum is reached. Two walks do for 16 million uses.
    """
    first, width, missing = 0, newest + 1, num_bytes
    while True:
        step = -(-width // _NUM_BUCKETS)
        sums = [0] * _NUM_BUCKETS
        for chosen in choose(env, conditions, first + width - 1):
            if chosen.last_order >= first and not chosen.is_pinned:
                sums[(chosen.last_order - first) // step] += chosen.num_bytes
        if sum(sums) < missing:
            return newest
        bucket = 0
        while sums[bucket] < missing:
            missing -= sums[bucket]
            bucket += 1
        first, width = first + bucket * step, step
        if step == 1:
            return first


def matching_namespaces(env: Environment, wanted: str | None) -> frozenset[bytes] | None:
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
    found = frozenset(
        namespace
        for namespace, model in known.items()
        if (model is not None and str(model) == wanted)
        or (len(wanted) >= _MIN_PREFIX and namespace.hex().startswith(wanted.lower()))
    )
    if not found:
        names = ", ".join(
            f"{namespace.hex()[:8]} ({model or 'no name'})" for namespace, model in known.items()
        )
        raise ConfigError(f"namespace {wanted}: not in this cache; it has: {names or 'none'}")
    return found


def find_block(env: Environment, prefix: str, what: str = "document") -> bytes:
    """The key that begins with these hex digits. Raises ``ConfigError`` unless it is one.

    ``what`` is what the user calls it.
    """
    digits = prefix.strip().lower()
    try:
        first = bytes.fromhex(digits.ljust(2 * KEY_BYTES, "0"))
        last = bytes.fromhex(digits.ljust(2 * KEY_BYTES, "f"))
    except ValueError:
        first = last = b""
    if not digits or len(first) != KEY_BYTES:
        raise ConfigError(
            f"{what} {prefix}: expected the beginning of a block's key, up to "
            f"{2 * KEY_BYTES} hex digits"
        )
    with env.read() as txn:
        cursor = txn.cursor(db=env.index)
        found = bytes(cursor.key()) if cursor.set_range(first) else b"\xff" * (KEY_BYTES + 1)
        if found > last:
            raise ConfigError(f"{what} {prefix}: no block has a key that begins so")
        if cursor.next() and bytes(cursor.key()) <= last:
            raise ConfigError(f"{what} {prefix}: several blocks have a key that begins so")
    return found
