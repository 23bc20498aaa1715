"""What stands in the environment: databases, records, counters, and how each is sealed.

    index       key → sealed Record                every block, and bad ones with children
    payload     key → the block's bytes, as the codec left them
    children    parent → key, several per parent    roots stand under their seed
    recency     order → key                         leaves only: the first is the next victim
    namespaces  id → sealed msgpack identity        what ``inspect`` prints
    meta        "schema", "uuid", "head" → sealed Head,
                "usage/" ‖ namespace ‖ salt → sealed Usage

A *sealed* value begins with the xxh3-128 of its key and its body, so a flipped bit, or a value
that a damaged tree hands out under another key, is found before anything believes it.

A block with children needs no place in ``recency``: it cannot be a victim. It comes back there,
with its own order, when its last child goes. So the first entry is always one that may be
evicted, and no scan ever steps over entries that may not.

Does not know LMDB's pages, processes or files.
"""

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import xxhash

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

SCHEMA_KEY, UUID_KEY, HEAD_KEY, USAGE_PREFIX = b"schema", b"uuid", b"head", b"usage/"

SEAL_BYTES = 16
NAMESPACE_BYTES = 32


class SealError(Exception):
    """A value does not match its checksum, or its body is not what it should be."""


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
    is_bad         the payload is gone; the record stays for its children, until it is put anew
    hits           uses that were recorded, at most one in each touch interval
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
    hits: int


_NUM_FIELDS = len(Record._fields)
_WITHOUT_HITS = _NUM_FIELDS - 1


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A block that is on disk: the bytes it takes there, and decoded."""

    key: bytes
    nbytes: int
    codec: str
    payload_bytes: int


def encode_record(key: bytes, record: Record) -> bytes:
    # Without the last field while it is 0: most blocks, and all those of older caches.
    body: bytes = msgpack.packb(record if record.hits else record[:-1])
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
    if isinstance(fields, tuple) and len(fields) == _WITHOUT_HITS:
        fields += (0,)
    if not isinstance(fields, tuple) or len(fields) != _NUM_FIELDS:
        raise SealError
    return tuple.__new__(Record, fields)


def encode_order(order: int) -> bytes:
    return order.to_bytes(8, "big")


_HEAD = struct.Struct("<8Q")
_USAGE = struct.Struct("<4Q")


@dataclass(slots=True)
class Usage:
    """Counters of one namespace and salt, or of everything.

    num_bytes counts payloads as stored and index records; num_bad counts records without payload.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_bad: int = 0

    def add(self, record: Record, record_bytes: int, sign: int = 1) -> None:
        """Count a record of ``record_bytes`` in (sign 1) or out (sign -1)."""
        self.num_bytes += sign * record_bytes
        if record.is_bad:
            self.num_bad += sign
        else:
            self.num_blocks += sign
            self.num_tokens += sign * record.num_tokens
            self.num_bytes += sign * record.nbytes

    def add_up(self, other: "Usage") -> None:
        self.num_blocks += other.num_blocks
        self.num_tokens += other.num_tokens
        self.num_bytes += other.num_bytes
        self.num_bad += other.num_bad

    def encode(self, key: bytes) -> bytes:
        fields = (self.num_blocks, self.num_tokens, self.num_bytes, self.num_bad)
        return seal(key, _USAGE.pack(*fields))

    @classmethod
    def decode(cls, key: bytes, value: Any) -> "Usage":
        try:
            return cls(*_USAGE.unpack(unseal(key, value)))
        except struct.error as error:
            raise SealError from error


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
        total = self.total
        fields = (self.generation, self.capacity_bytes, self.next_order, self.evicted)
        counters = (total.num_blocks, total.num_tokens, total.num_bytes, total.num_bad)
        return seal(HEAD_KEY, _HEAD.pack(*fields, *counters))

    @classmethod
    def decode(cls, value: Any) -> "Head":
        try:
            fields = _HEAD.unpack(unseal(HEAD_KEY, value))
        except struct.error as error:
            raise SealError from error
        generation, capacity_bytes, next_order, evicted, *counters = fields
        return cls(generation, capacity_bytes, next_order, evicted, Usage(*counters))


def decode_identity(namespace: bytes, value: Any) -> dict[str, Any]:
    """What a namespace was registered as; empty when it was not, or cannot be read any more."""
    try:
        identity = msgpack.unpackb(unseal(namespace, value or b""))
    except (SealError, ValueError, msgpack.UnpackException):
        return {}
    return identity if isinstance(identity, dict) else {}


def usage_key(namespace: bytes, salt: bytes) -> bytes:
    return USAGE_PREFIX + namespace + salt


def namespace_of_usage(key: bytes) -> bytes:
    return key[len(USAGE_PREFIX) :][:NAMESPACE_BYTES]
