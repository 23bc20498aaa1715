"""Which blocks on disk one sequence and what continues it have to themselves."""

from collections.abc import Container, Iterator, Sequence

from kvstore.disk import schema
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record, SealError
from kvstore.disk.tree import walk_tree


def own_blocks(
    env: Environment,
    keys: Sequence[bytes],
    end: bytes,
    beginning: bytes,
    spared: Container[bytes],
) -> Iterator[tuple[bytes, Record]]:
    """What continues ``end`` with tokens that begin so, deepest first, then ``keys`` from their
    end, but no spared ones. Whether something else continues a block is not looked at."""
    for branch in _branches(env, end, beginning):
        for visit in walk_tree(env, None, branch):
            if visit.is_leaving and visit.key not in spared:
                yield visit.key, visit.record
    for key in reversed(keys):
        record = _read(env, key)
        if record is not None and key not in spared:
            yield key, record


def _branches(env: Environment, parent: bytes, beginning: bytes) -> list[bytes]:
    with env.read() as txn:
        cursor = txn.cursor(db=env.children)
        children = [bytes(key) for key in cursor.iternext_dup()] if cursor.set_key(parent) else []
    found = [(key, _read(env, key)) for key in children]
    return [
        key for key, record in found if record is not None and record.tokens.startswith(beginning)
    ]


def _read(env: Environment, key: bytes) -> Record | None:
    with env.read() as txn:
        try:
            return schema.decode_record(key, txn.get(key, db=env.index) or b"")
        except SealError:
            return None
