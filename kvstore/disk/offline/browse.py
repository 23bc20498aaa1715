"""Looking around in a cache: what is below a block, what else is there. Short transactions only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.disk import departures, schema, slices
from kvstore.disk.departures import Departure
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Record, SealError


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a chain of keys is here: ``num_found`` blocks, and whether the next one is bad."""

    num_found: int
    is_next_bad: bool


class Browser:
    """Reads one environment; None stands for a cache in which nothing was ever stored, or without
    ``remembers`` for one that is not there to be asked."""

    def __init__(self, env: Environment | None, *, remembers: bool = True) -> None:
        self._env = env
        self._remembers = remembers

    def follow(self, keys: Sequence[bytes], runs: Sequence[bytes], start: int = 0) -> Followed:
        """Compare a chain with what is here, from block ``start`` on, block by block."""
        if self._env is None:
            return Followed(start, False)
        at = start
        while at < len(keys):
            end = min(at + slices.SLICE_RECORDS, len(keys))
            with self._env.read() as txn:
                while at < end:
                    value = txn.get(keys[at], db=self._env.index)
                    if value is None:
                        return Followed(at, False)
                    record = _decode(keys[at], value)
                    if record is None or record.is_bad or record.tokens != runs[at]:
                        return Followed(at, True)
                    at += 1
        return Followed(at, False)

    def children(self, parent: bytes, most: int) -> Iterator[tuple[bytes, Record]]:
        """Blocks that continue ``parent``, at most the first ``most``."""
        last, left = b"", most
        while self._env is not None and left > 0:
            found: list[tuple[bytes, Record | None]] = []
            with self._env.read() as txn:
                cursor = txn.cursor(db=self._env.children)
                is_there = cursor.set_range_dup(parent, last + b"\0")
                while is_there and len(found) < min(left, slices.SLICE_RECORDS):
                    key = bytes(cursor.value())
                    found.append((key, _decode(key, txn.get(key, db=self._env.index))))
                    is_there = cursor.next_dup()
            if not found:
                return
            last, left = found[-1][0], left - len(found)
            for key, record in found:
                if record is not None and not record.is_bad:
                    yield key, record

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """The registered ones, each with what it was registered as."""
        if self._env is None:
            return {}
        with self._env.read() as txn:
            return {
                bytes(namespace): schema.decode_identity(bytes(namespace), value)
                for namespace, value in txn.cursor(db=self._env.namespaces)
            }

    def salts(self, namespace: bytes) -> set[bytes]:
        """Digests of the salts under which the namespace has blocks."""
        prefix = schema.usage_key(namespace, b"")
        found: set[bytes] = set()
        if self._env is None:
            return found
        with self._env.read() as txn:
            cursor = txn.cursor(db=self._env.meta)
            is_there = cursor.set_range(prefix)
            while is_there and bytes(cursor.key()).startswith(prefix):
                found.add(bytes(cursor.key())[len(prefix) :])
                is_there = cursor.next()
        return found

    def beginnings(self, namespace: bytes, tokens: bytes) -> Iterator[Record]:
        """First blocks with these tokens, under whatever salt. Reads the whole index."""
        if self._env is None:
            return
        found: list[Record] = []

        def collect(_: Any, key: bytes, value: Any) -> None:
            if tokens in bytes(value):  # before decoding all the others
                record = _decode(key, value)
                if record is not None and (record.depth, record.tokens) == (0, tokens):
                    found.append(record)

        for _ in slices.slices(self._env, self._env.index, collect):
            yield from (record for record in found if record.namespace == namespace)
            found.clear()

    def departure(self, key: bytes) -> Departure | None:
        """Why a block left the cache; None when nothing is known of that."""
        if self._env is None:
            return None
        with self._env.read() as txn:
            return departures.find(txn, self._env.meta, [key]).get(key)

    def knows_departures(self) -> bool:
        """Whether a block that is neither here nor known to have left was never here."""
        if self._env is None:
            return self._remembers
        with self._env.read() as txn:
            return departures.knows_all(txn, self._env.meta)


def _decode(key: bytes, value: Any) -> Record | None:
    try:
        return schema.decode_record(key, value or b"")
    except SealError:
        return None
