"""What stands in the environment: databases, records, counters, and how each is sealed.

    index       key → sealed Record                every block, and bad ones with children
    payload     key → the block's bytes, as the codec left them
    children    parent → key, several per parent    roots stand under their seed
    recency     order → key                         leaves only: the first is the next victim
    namespaces  id → sealed msgpack identity        what ``inspect`` prints
    meta        "schema", "uuid", "head" → sealed Head,
                "usage/" ‖ namespace ‖ salt → sealed Usage,
                "pin/" ‖ end of the pin ‖ key → sealed holds: the first is the next to end,
                "gone", "gone/" ‖ u16 → which blocks left lately, and why (``departures``)

A *sealed* value begins with the xxh3-128 of its key and its body, so a flipped bit, or a value
that a damaged tree hands out under another key, is found before anything believes it.

A block with children needs no place in ``recency``: it cannot be a victim. It comes back there,
with its own order, when its last child goes. Nor does a pinned leaf have a place there. So the
first entry is always one that may be evicted, and no scan ever steps over entries that may not.

What is not pinned is encoded as it was before there were pins.

Does not know LMDB's pages, processes or files.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import xxhash

from kvstore.errors import TierBrokenError

SCHEMA_VERSION = 1

INDEX, PAYLOAD, CHILDREN, RECENCY, NAMESPACES, META = (
    b"index",
    b"payload",
    b"children",
    b"recency",
    b"namespaces",
    b"meta",
)
DATABASES = (INDEX, PAYLOAD, CHILDREN, RECENCY, NAMESPACES, META)

SCHEMA_KEY, UUID_KEY, HEAD_KEY = b"schema", b"uuid", b"head"
USAGE_PREFIX, PIN_PREFIX = b"usage/", b"pin/"

SEAL_BYTES = 16
NAMESPACE_BYTES = 32
PAGE_BYTES = 4096


class SealError(Exception):
    """A value does not match its checksum, or its body is not what it should be."""


def check_version(found: bytes | None, directory: Path) -> None:
    """Raises ``TierBrokenError`` for another version than ours."""
    if found != str(SCHEMA_VERSION).encode():
        shown = found.decode(errors="replace") if found else "none"
        raise TierBrokenError(
            f"{directory} has schema {shown}, this program knows {SCHEMA_VERSION}; use the program "
            "that made it, or another directory",
            tier="disk",
        )


def checksum(data: Any) -> bytes:
    """xxh3-128 of a bytes-like object, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def seal(key: bytes, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key + body) + body


def unseal(key: bytes, value: Any) -> bytes:
    """The body of a sealed value (bytes or a mapped view). Raises ``SealError``."""
    raw = bytes(value)
    body = raw[SEAL_BYTES:]
    if xxhash.xxh3_128_digest(key + body) != raw[:SEAL_BYTES]:
        raise SealError
    return body


class Record(NamedTuple):
    """One block in ``index``: msgpack array of these fields, in this order, sealed.

    order          8 bytes, big-endian: when it was used last, and its key in ``recency`` if a leaf
    nbytes         bytes stored under the key in ``payload``
    payload_bytes  bytes after decoding
    checksum       xxh3-128 of the stored bytes
    is_bad         the payload is gone; the record stays for its children or its pin, until it is
                   put anew
    hits           uses that were recorded, at most one in each touch interval
    num_pins       pins of this block and of what continues it; 0 for most
    pinned_until   when this block's own pin ends: seconds since 1970, inf for never, 0.0 without
    """

    parent: bytes
    tokens: bytes
    depth: int
    namespace: bytes
    salt: bytes
    num_tokens: int
    nbytes: int
    payload_bytes: int
    codec: str
    checksum: bytes
    created: float
    touched: float
    order: bytes
    is_bad: bool
    hits: int = 0
    num_pins: int = 0
    pinned_until: float = 0.0


_NUM_FIELDS = len(Record._fields)
_NUM_FIRST = 14  # of a block that was never used again nor pinned: what older caches have
_LATER = (0, 0, 0.0)  # what the others are then


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A block that is on disk: the bytes it takes there, and decoded."""

    key: bytes
    nbytes: int
    codec: str
    payload_bytes: int


def encode_record(key: bytes, record: Record) -> bytes:
    fields = _NUM_FIELDS if record.num_pins else _NUM_FIRST + bool(record.hits)
    body: bytes = msgpack.packb(record[:fields])
    return xxhash.xxh3_128_digest(key + body) + body


def decode_record(key: bytes, value: Any) -> Record:
    """Raises ``SealError`` for anything that ``encode_record`` did not write under this key."""
    raw = bytes(value)
    body = raw[SEAL_BYTES:]
    if xxhash.xxh3_128_digest(key + body) != raw[:SEAL_BYTES]:
        raise SealError
    return read_record(raw)


def read_record(value: Any) -> Record:
    """A record whose seal was not checked: its fields may be anything. Raises ``SealError``.

    For the path of every read, which compares parent, tokens, length and checksum one by one.
    """
    try:
        fields = msgpack.unpackb(value[SEAL_BYTES:], use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise SealError from error
    if not isinstance(fields, tuple):
        raise SealError
    missing = _NUM_FIELDS - len(fields)
    if 0 < missing <= len(_LATER):
        fields += _LATER[-missing:]
    elif missing:
        raise SealError
    return tuple.__new__(Record, fields)


def encode_order(order: int) -> bytes:
    return order.to_bytes(8, "big")


@dataclass(slots=True)
class Usage:
    """Counters of one namespace and salt, or of everything.

    num_bytes     payloads as stored, and index records
    num_bad       records without payload
    num_pinned    records that a pin protects, bad ones included
    pinned_pages  what their payloads take, in pages of ``PAGE_BYTES``
    """

    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_bad: int = 0
    num_pinned: int = 0
    pinned_pages: int = 0

    def add(self, record: Record, record_bytes: int, sign: int = 1) -> None:
        """Count a record of ``record_bytes`` in (sign 1) or out (sign -1)."""
        self.num_bytes += sign * record_bytes
        if record.is_bad:
            self.num_bad += sign
        else:
            self.num_blocks += sign
            self.num_tokens += sign * record.num_tokens
            self.num_bytes += sign * record.nbytes
        if record.num_pins:
            self.num_pinned += sign
            self.pinned_pages += sign * payload_pages(record.nbytes, PAGE_BYTES)

    def numbers(self) -> tuple[int, ...]:
        counts = (self.num_blocks, self.num_tokens, self.num_bytes, self.num_bad)
        pinned = (self.num_pinned, self.pinned_pages)
        return counts + pinned if self.num_pinned else counts

    def add_up(self, other: "Usage") -> None:
        self.num_blocks += other.num_blocks
        self.num_tokens += other.num_tokens
        self.num_bytes += other.num_bytes
        self.num_bad += other.num_bad
        self.num_pinned += other.num_pinned
        self.pinned_pages += other.pinned_pages

    def encode(self, key: bytes) -> bytes:
        return seal(key, _pack(*self.numbers()))

    @classmethod
    def decode(cls, key: bytes, value: Any) -> "Usage":
        return cls(*_unpack(unseal(key, value), (4, 6)))


def payload_pages(nbytes: int, page_bytes: int) -> int:
    """Pages that LMDB takes for a payload; a small one shares its page, and is given one here."""
    return -(-(nbytes + 16) // page_bytes)


@dataclass(slots=True)
class Head:
    """What every write transaction reads first and writes last.

    generation rises when something changes that attached processes must adopt (the capacity);
    evicted counts blocks evicted since the cache was created.
    """

    generation: int
    capacity_bytes: int
    next_order: int
    evicted: int
    total: Usage

    def encode(self) -> bytes:
        fields = (self.generation, self.capacity_bytes, self.next_order, self.evicted)
        return seal(HEAD_KEY, _pack(*fields, *self.total.numbers()))

    @classmethod
    def decode(cls, value: Any) -> "Head":
        numbers = _unpack(unseal(HEAD_KEY, value), (8, 10))
        generation, capacity_bytes, next_order, evicted, *counters = numbers
        return cls(generation, capacity_bytes, next_order, evicted, Usage(*counters))


def _pack(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _unpack(body: bytes, lengths: Collection[int]) -> tuple[int, ...]:
    """Raises ``SealError`` unless ``body`` holds one of these counts of numbers."""
    if len(body) % 8 or len(body) // 8 not in lengths:
        raise SealError
    return struct.unpack(f"<{len(body) // 8}Q", body)


def decode_identity(namespace: bytes, value: Any) -> dict[str, Any]:
    """What a namespace was registered as, in values that JSON has; empty when it was not, or cannot
    be read any more."""
    try:
        identity = msgpack.unpackb(unseal(namespace, value or b""), strict_map_key=False)
        return _readable(identity) if isinstance(identity, dict) else {}
    except (SealError, ValueError, msgpack.UnpackException, RecursionError):
        return {}


def _readable(value: Any) -> Any:
    """As JSON has it: what an identity is made of is up to its caller, and commands print it."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else str(_readable(key)): _readable(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_readable(each) for each in value]
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    is_json = value is None or isinstance(value, bool | int | str)
    return value if is_json or (isinstance(value, float) and isfinite(value)) else str(value)


def usage_key(namespace: bytes, salt: bytes) -> bytes:
    return USAGE_PREFIX + namespace + salt


def namespace_of_usage(key: bytes) -> bytes:
    return key[len(USAGE_PREFIX) :][:NAMESPACE_BYTES]


def pin_key(until: float, key: bytes) -> bytes:
    """Where a pin stands in ``meta``: in the order in which pins end."""
    return PIN_PREFIX + _PIN_END.pack(until) + key


def read_pin_key(meta_key: bytes) -> tuple[float, bytes]:
    """When the pin ends, and the key of its block."""
    start = len(PIN_PREFIX)
    end = start + _PIN_END.size
    return _PIN_END.unpack(meta_key[start:end])[0], meta_key[end:]


# Big-endian doubles that are not negative sort as the numbers do, infinity last.
_PIN_END = struct.Struct(">d")
