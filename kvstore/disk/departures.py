"""Which blocks have left the cache, and why: what tells a miss from a first visit.

A ring of the latest, written in the transaction that removes::

    "gone"              sealed: blocks that left so far, whether that is since the cache was created
    "gone/" ‖ u16       sealed chunk of 8-byte entries: 7 bytes of the block's key, and the reason

A cache that is older than the ring has none until something leaves it.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from kvstore.disk.schema import SealError, seal, unseal

COUNT_KEY, CHUNK_PREFIX = b"gone", b"gone/"

_ENTRY_BYTES = 8
_CHUNK_ENTRIES = 240  # two chunks share a page of 4 KiB
_MAX_CHUNKS = 256  # 61,440 blocks in half a megabyte
_PAGES_A_CHUNK = 512  # of the cache: the ring is less than a thousandth of it
_COUNT = struct.Struct("<Q?")


class Departure(IntEnum):
    EVICTED = 1  # to make room
    REMOVED = 2  # by a command, or because the prefix cache was reset
    CORRUPT = 3  # its bytes or its record were not what was stored


def begin(txn: Any, meta: Any) -> None:
    """For a cache that is created now."""
    txn.put(COUNT_KEY, seal(COUNT_KEY, _COUNT.pack(0, True)), db=meta)


def note(txn: Any, meta: Any, left: Sequence[tuple[bytes, Departure]], *, cache_pages: int) -> None:
    """Add blocks that this transaction removes; ``cache_pages`` is what the cache may grow to."""
    num_chunks = max(1, min(cache_pages // _PAGES_A_CHUNK, _MAX_CHUNKS))
    count, is_whole = _count(txn, meta)
    entries = b"".join(key[: _ENTRY_BYTES - 1] + bytes([why]) for key, why in left)
    start = 0
    while start < len(entries):
        number, filled = divmod(count, _CHUNK_ENTRIES)
        key = _chunk_key(number % num_chunks)
        kept = _chunk(txn, meta, key)[: filled * _ENTRY_BYTES] if filled else b""
        taken = entries[start : start + (_CHUNK_ENTRIES - filled) * _ENTRY_BYTES]
        # A lost beginning (a chunk that was damaged) is made up for, so that positions stay right.
        kept = kept.rjust(filled * _ENTRY_BYTES, b"\0")
        txn.put(key, seal(key, kept + taken), db=meta)
        start += len(taken)
        count += len(taken) // _ENTRY_BYTES
    txn.put(COUNT_KEY, seal(COUNT_KEY, _COUNT.pack(count, is_whole)), db=meta)


def find(txn: Any, meta: Any, keys: Sequence[bytes]) -> dict[bytes, Departure]:
    """Those of the keys that the ring knows, each with why it left the last time it is known of."""
    wanted = {key[: _ENTRY_BYTES - 1]: key for key in keys}
    found: dict[bytes, Departure] = {}
    chunks = _chunks(txn, meta)
    newest = (_count(txn, meta)[0] - 1) // _CHUNK_ENTRIES
    oldest_first = sorted(chunks, key=lambda item: (item[0] - newest - 1) % len(chunks))
    for _, chunk in oldest_first:  # so that the latest reason stays
        for start in range(0, len(chunk), _ENTRY_BYTES):
            key = wanted.get(chunk[start : start + _ENTRY_BYTES - 1])
            if key is not None:
                found[key] = Departure(chunk[start + _ENTRY_BYTES - 1])
    return found


def knows_all(txn: Any, meta: Any) -> bool:
    """Whether every block that ever left this cache is in the ring."""
    count, is_whole = _count(txn, meta)
    return is_whole and count == sum(len(c) for _, c in _chunks(txn, meta)) // _ENTRY_BYTES


def _count(txn: Any, meta: Any) -> tuple[int, bool]:
    try:
        count, is_whole = _COUNT.unpack(unseal(COUNT_KEY, txn.get(COUNT_KEY, db=meta) or b""))
    except (SealError, struct.error):
        return 0, False
    return count, is_whole


def _chunk_key(number: int) -> bytes:
    return CHUNK_PREFIX + number.to_bytes(2, "big")


def _chunk(txn: Any, meta: Any, key: bytes) -> bytes:
    try:
        return unseal(key, txn.get(key, db=meta) or b"")
    except SealError:
        return b""


def _chunks(txn: Any, meta: Any) -> list[tuple[int, bytes]]:
    cursor = txn.cursor(db=meta)
    found = []
    is_there = cursor.set_range(CHUNK_PREFIX)
    while is_there and bytes(cursor.key()).startswith(CHUNK_PREFIX):
        key = bytes(cursor.key())
        found.append((int.from_bytes(key[len(CHUNK_PREFIX) :], "big"), _chunk(txn, meta, key)))
        is_there = cursor.next()
    return found
