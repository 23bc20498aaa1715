"""The tree of blocks in rows: one for each run of blocks without a fork, or for each document.

Streams a walk of the tree: memory grows with the longest document, not with the cache.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record
from kvstore.disk.tree import Visit, walk_tree

HEAD_TOKENS = 48  # of a row, for the text that it begins with


@dataclass(slots=True)
class Branch:
    """A run of blocks in which each but the last has one child.

    level          branches above it
    depth          blocks above it
    num_children   blocks that continue the last one: 0 at the end of a document, else 2 or more
    num_bytes      payloads and records
    hits           of the block that was used most
    touched        latest recorded use, seconds since 1970
    token_ids      the first ones
    """

    key: bytes
    level: int
    depth: int
    namespace: bytes
    salt: bytes
    last_key: bytes = b""
    num_children: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    num_pinned: int = 0
    hits: int = 0
    touched: float = 0.0
    token_ids: list[int] = field(default_factory=list)

    def add(self, visit: Visit) -> None:
        record = visit.record
        self.last_key, self.num_children = visit.key, visit.num_children
        self.num_blocks += 1
        self.num_tokens += 0 if record.is_bad else record.num_tokens
        self.num_bytes += visit.record_bytes + (0 if record.is_bad else record.nbytes)
        self.num_bad += record.is_bad
        self.num_pinned += record.num_pins > 0
        self.hits = max(self.hits, record.hits)
        self.touched = max(self.touched, record.touched)
        if len(self.token_ids) < HEAD_TOKENS:
            self.token_ids = (self.token_ids + token_ids_of(record))[:HEAD_TOKENS]


def branches(
    env: Environment, namespaces: Collection[bytes] | None = None, start: bytes | None = None
) -> Iterator[Branch]:
    """Each before those that continue it, depth first."""
    forks: list[bytes] = []  # last blocks of the branches above
    branch: Branch | None = None
    for visit in walk_tree(env, namespaces, start):
        if visit.is_leaving:
            if branch is not None:  # what continued it has gone, or cannot be read
                yield branch
                branch = None
            if forks and forks[-1] == visit.key:
                forks.pop()
            continue
        record = visit.record
        if branch is None:
            branch = Branch(visit.key, len(forks), record.depth, record.namespace, record.salt)
        branch.add(visit)
        if visit.num_children != 1:
            yield branch
            branch = None
            if visit.num_children:
                forks.append(visit.key)


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A path from a root to a block that nothing continues, which is ``key``.

    own_blocks       at its end, that are no other document's
    hits, touched    of its last block
    token_ids        the first ones of the document
    own_token_ids    the first ones of its own blocks
    """

    key: bytes
    namespace: bytes
    salt: bytes
    num_blocks: int
    num_tokens: int
    num_bytes: int
    own_blocks: int
    num_pinned: int
    hits: int
    touched: float
    token_ids: list[int]
    own_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a path up to one of its blocks. ``fork`` is the number of blocks up to the last one that
    several continue."""

    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_pinned: int = 0
    fork: int = 0


def documents(
    env: Environment, namespaces: Collection[bytes] | None = None, start: bytes | None = None
) -> Iterator[DocumentRow]:
    """Every document once, depth first. With ``start`` from that block on, not from the root."""
    path: list[tuple[_Sums, bytes]] = [(_Sums(), b"")]
    for visit in walk_tree(env, namespaces, start):
        if visit.is_leaving:
            path.pop()
            continue
        record, above = visit.record, path[-1][0]
        num_bytes = visit.record_bytes + (0 if record.is_bad else record.nbytes)
        num_blocks = above.num_blocks + 1
        sums = _Sums(
            num_blocks,
            above.num_tokens + (0 if record.is_bad else record.num_tokens),
            above.num_bytes + num_bytes,
            above.num_pinned + (record.num_pins > 0),
            num_blocks if visit.num_children > 1 else above.fork,
        )
        path.append((sums, record.tokens if record.num_tokens else b""))
        if not visit.num_children:
            yield DocumentRow(
                visit.key,
                record.namespace,
                record.salt,
                num_blocks,
                sums.num_tokens,
                sums.num_bytes,
                num_blocks - sums.fork,
                sums.num_pinned,
                record.hits,
                record.touched,
                _head(path, 0),
                _head(path, sums.fork),
            )


def _head(path: list[tuple[_Sums, bytes]], start: int) -> list[int]:
    """The first tokens after ``start`` blocks of the path."""
    found: list[int] = []
    at = start + 1
    while at < len(path) and len(found) < HEAD_TOKENS:
        found += np.frombuffer(path[at][1], "<u4").tolist()
        at += 1
    return found[:HEAD_TOKENS]


def token_ids_of(record: Record) -> list[int]:
    """Of a block, where they are tokens: other engines may keep something else there."""
    found: list[int] = np.frombuffer(record.tokens, "<u4").tolist() if record.num_tokens else []
    return found
