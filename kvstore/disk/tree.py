"""The tree of blocks, walked depth first in little memory and in short transactions.

A walk knows the path from a root to where it is, nothing else, so its memory grows with the longest
document and not with the cache. It resumes by key: what changes meanwhile is seen or not.
"""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.disk import schema, slices
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record, SealError
from kvstore.hashing import KEY_BYTES

_AFTER_ALL = b"\xff" * (KEY_BYTES + 1)


class Visit(NamedTuple):
    """A block, before everything that continues it and once more after that.

    record_bytes  of the record as stored
    is_leaving    the second time: all that continues the block has been visited
    num_children  blocks that continue it directly; a walk counts them
    """

    key: bytes
    record: Record
    record_bytes: int
    is_leaving: bool
    num_children: int = 0


@dataclass(slots=True)
class _Level:
    """The children of ``parent``, visited up to ``last``. ``block`` is None below a seed."""

    parent: bytes
    block: Visit | None
    last: bytes = b""


def walk_tree(
    env: Environment, namespaces: Collection[bytes] | None = None, start: bytes | None = None
) -> Iterator[Visit]:
    """Every block of these namespaces (None: all), or the block ``start`` and what continues it.

    No transaction is open between two visits. A block whose record cannot be read is passed over,
    and so is what is below it: ``verify`` finds them.
    """
    walk = _Walk(env, namespaces, start)
    while not walk.is_done:
        with env.read() as txn:
            visits = walk.advance(txn)
        yield from visits


class _Walk:
    def __init__(
        self, env: Environment, namespaces: Collection[bytes] | None, start: bytes | None
    ) -> None:
        self.is_done = False
        self._env = env
        self._namespaces = namespaces
        self._start = start
        self._seed = b""  # the last key of ``children`` that was looked at
        self._levels: list[_Level] = []

    def advance(self, txn: Any) -> list[Visit]:
        """One slice of the walk."""
        visits: list[Visit] = []
        cursor = txn.cursor(db=self._env.children)
        deadline = time.monotonic() + slices.SLICE_S
        for _ in range(slices.SLICE_RECORDS):
            if self._levels:
                self._step(txn, cursor, visits)
            elif self._start is not None:
                self._enter(txn, cursor, self._start, visits, is_root=False)
                self._start, self._seed = None, _AFTER_ALL
            elif not self._next_seed(txn, cursor):
                self.is_done = True
                break
            if time.monotonic() > deadline:
                break
        return visits

    def _step(self, txn: Any, cursor: Any, visits: list[Visit]) -> None:
        """To the next child of the deepest level, or out of that level."""
        level = self._levels[-1]
        if cursor.set_range_dup(level.parent, level.last + b"\0"):
            level.last = bytes(cursor.value())
            self._enter(txn, cursor, level.last, visits, is_root=level.block is None)
        else:
            self._levels.pop()
            if level.block is not None:
                visits.append(level.block._replace(is_leaving=True))

    def _enter(
        self, txn: Any, cursor: Any, key: bytes, visits: list[Visit], *, is_root: bool
    ) -> None:
        value = txn.get(key, db=self._env.index)
        try:
            record = schema.decode_record(key, value or b"")
        except SealError:
            return
        # what continues a block is of its namespace
        if is_root and self._namespaces is not None and record.namespace not in self._namespaces:
            return
        num_children = cursor.count() if cursor.set_key(key) else 0
        visit = Visit(key, record, len(value), is_leaving=False, num_children=num_children)
        visits.append(visit)
        self._levels.append(_Level(key, visit))

    def _next_seed(self, txn: Any, cursor: Any) -> bool:
        """To the next key that has children and is no block: roots hang below it."""
        if not cursor.set_range(self._seed + b"\0"):
            return False
        self._seed = bytes(cursor.key())
        if txn.get(self._seed, db=self._env.index) is None:
            self._levels.append(_Level(self._seed, None))
        return True
