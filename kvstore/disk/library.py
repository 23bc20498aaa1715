"""The disk tier as a library of its own: opaque payloads under keys the caller gives.

For connectors of other engines: they know what a key means and what a payload holds. Same directory
format, same guarantees (checked reads, one transaction, bounded, shared by processes), and the same
command looks into it. Blocks have no parents here, so what is evicted first is what was put or
touched longest ago: a caller with chains touches them leaf first, root last.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.config import DiskConfig, parse_size
from kvstore.disk.store import DiskStats, DiskStore
from kvstore.errors import BlockMissingError, ConfigError, CorruptBlockError
from kvstore.hashing import block_key, chain_seed, namespace_id


def open_disk(
    path: str | Path,
    *,
    namespace: str | Mapping[str, Any] = "default",
    capacity: int | str | None = None,
    config: DiskConfig | None = None,
) -> "DiskCache":
    """Open the cache directory ``path``, create it where there is none.

    ``namespace`` keeps callers apart that use equal keys for different things: a name, or a mapping
    with everything that makes payloads interchangeable (model, dtype, layout, instruction set).
    ``capacity`` (bytes or ``"50GiB"``) belongs to the directory; None keeps what it has.

    Raises ``ConfigError`` and ``TierBrokenError`` as ``DiskStore.open`` does.
    """
    identity = {"name": namespace} if isinstance(namespace, str) else dict(namespace)
    identity = {**identity, "kind": "opaque"}
    _namespace(identity)
    capacity_bytes = None if capacity is None else parse_size(capacity, "capacity")
    store = DiskStore.open(path, capacity_bytes=capacity_bytes, config=config)
    return DiskCache(store, identity)


class DiskCache:
    """Bytes under keys, in one namespace. All methods may be called from any thread.

    What was put under a key does not change: ``remove`` it to put something else. A damaged payload
    is a miss, and is dropped.
    """

    def __init__(self, store: DiskStore, identity: Mapping[str, Any]) -> None:
        self._store = store
        self._namespace = _namespace(identity)
        self._seed = chain_seed(self._namespace)
        self._writing = threading.Lock()  # the store has one writer thread: one at a time here
        with self._writing:
            store.register_namespace(self._namespace, identity)

    def probe(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are here."""
        return [bool(self._store.probe([self._ref(key)])) for key in keys]

    def get(self, key: bytes) -> bytes | None:
        """The payload, verified; None when it is not here."""
        found = self._store.probe([self._ref(key)])
        if not found:
            return None
        data = bytearray(found[0].payload_bytes)
        return bytes(data) if self.get_into(key, memoryview(data)) else None

    def get_into(self, key: bytes, dst: memoryview) -> bool:
        """Fill ``dst``, which has exactly the payload's size; False when it is not here."""
        try:
            self._store.read_into(self._ref(key), dst)
        except (BlockMissingError, CorruptBlockError):
            return False
        return True

    def put(self, key: bytes, payload: bytes | bytearray | memoryview) -> PutOutcome:
        """``STORED``, ``PRESENT``, or ``FULL``; copies the payload."""
        return self.put_many([(key, payload)])[0]

    def put_many(
        self, items: Sequence[tuple[bytes, bytes | bytearray | memoryview]]
    ) -> list[PutOutcome]:
        """Several in one transaction: faster, above all with durability "power"."""
        writes = [BlockWrite(self._ref(key), self._namespace, b"", data) for key, data in items]
        with self._writing:
            return self._store.put_group(writes, count_tokens=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use; the last of ``keys`` becomes the youngest."""
        with self._writing:
            self._store.touch([self._ref(key).key for key in keys])

    def remove(self, keys: Sequence[bytes]) -> int:
        """Drop these; how many were here."""
        with self._writing:
            return self._store.remove([self._ref(key).key for key in keys]).num_blocks

    def stats(self) -> DiskStats:
        return self._store.stats()

    def flush(self) -> None:
        with self._writing:
            self._store.flush()

    def close(self) -> None:
        with self._writing:
            self._store.close()

    def __enter__(self) -> "DiskCache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ref(self, key: bytes) -> BlockRef:
        """A root block whose "tokens" are the caller's key: the same rule gives its block key."""
        return BlockRef(block_key(self._seed, key), self._seed, key, 0)


def _namespace(identity: Mapping[str, Any]) -> bytes:
    """Its id. Raises ``ConfigError`` for a mapping that has none."""
    try:
        return namespace_id(identity)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            "namespace: expected a name, or a mapping of names to texts, numbers, bytes, and lists "
            f"and mappings of these ({error})"
        ) from error
