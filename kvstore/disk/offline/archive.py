"""The format in which blocks travel: one file, or a pipe.

    file    magic, version, frames
    frame   u32 header length, u64 payload length, xxh3-128 of header ‖ payload, header, payload
    header  msgpack map with "kind": "namespace" {id, identity}, "block" {fields of its record}, or
            "end" {blocks, bytes}, which comes last

Numbers are little-endian. Blocks come depth first: the parent of each is the one before it, or one
of that one's ancestors. So neither side remembers more than one path.

The reader believes nothing: no more is allocated than there is, checksums are compared before
anything is decoded, keys are computed anew from parent and tokens. Does not know caches.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgpack
import xxhash

from kvstore.disk import schema
from kvstore.disk.codec import get_codec
from kvstore.disk.ledger import Prepared
from kvstore.disk.schema import NAMESPACE_BYTES, Record
from kvstore.errors import ConfigError
from kvstore.hashing import KEY_BYTES, block_key, chain_seed

_MAGIC = b"KVSTORE EXPORT\0\0"
_VERSION = 1
_START = struct.Struct("<16sI")
_FRAME = struct.Struct("<IQ16s")
_MAX_HEADER_BYTES = 1 << 20
_MAX_PAYLOAD_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20  # read at a time, so that a length that lies costs no memory

_FIELDS = {  # of a block's header: what each must be
    "parent": bytes,
    "tokens": bytes,
    "depth": int,
    "namespace": bytes,
    "salt": bytes,
    "num_tokens": int,
    "payload_bytes": int,
    "codec": str,
    "checksum": bytes,
}


class RefusedError(Exception):
    """What is wrong with a file."""


class ForeignError(RefusedError):
    """It is no export, or one of another version."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What an id stands for."""

    id: bytes
    identity: dict[str, Any]


class TreePath:
    """The keys from a root to the last block that was let in, all of one namespace and salt."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._owner = (b"", b"")

    def admit(self, key: bytes, block: Record | Prepared) -> bool:
        """Whether the block continues one on the path, or is a root; then it is the last.

        Without a salt a root must hang below its namespace's seed; a salt is not known.
        """
        owner, depth = (block.namespace, block.salt), block.depth
        if depth == 0:
            if not block.salt and block.parent != chain_seed(block.namespace):
                return False
            self._owner = owner
        elif depth > len(self._keys) or (self._keys[depth - 1], self._owner) != (
            block.parent,
            owner,
        ):
            return False
        self._keys[depth:] = [key]
        return True


def write_start(out: IO[bytes]) -> None:
    out.write(_START.pack(_MAGIC, _VERSION))


def begins_one(start: bytes) -> bool:
    """Whether these are the first bytes of an export, of any version."""
    return start.startswith(_MAGIC)


def write_namespace(out: IO[bytes], namespace: Namespace) -> None:
    header = {"kind": "namespace", "id": namespace.id, "identity": namespace.identity}
    _write(out, header, b"")


def write_block(out: IO[bytes], record: Record, payload: bytes) -> None:
    """``payload`` as stored, and as the record describes it."""
    header = {name: getattr(record, name) for name in _FIELDS}
    _write(out, {"kind": "block", **header}, payload)


def write_end(out: IO[bytes], num_blocks: int, num_bytes: int) -> None:
    _write(out, {"kind": "end", "blocks": num_blocks, "bytes": num_bytes}, b"")


def _write(out: IO[bytes], header: dict[str, Any], payload: bytes) -> None:
    packed: bytes = msgpack.packb(header)
    out.write(_FRAME.pack(len(packed), len(payload), _checksum(packed, payload)))
    out.write(packed)
    out.write(payload)


def _checksum(packed: bytes, payload: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128(packed)
    digest.update(payload)
    return digest.digest()


def read_items(source: IO[bytes]) -> Iterator[Prepared | Namespace]:
    """The items, each checked. Raises ``RefusedError`` for anything but a whole export."""
    start = _read(source, _START.size, at_most=True)
    if len(start) < _START.size or start[: len(_MAGIC)] != _MAGIC:
        raise ForeignError("none begins like this" if start else "it is empty")
    version = _START.unpack(start)[1]
    if version != _VERSION:
        raise ForeignError(f"version {version}, this program reads {_VERSION}")
    num_blocks = num_bytes = 0
    path = TreePath()
    while True:
        header, payload = _read_frame(source)
        kind = header.get("kind")
        if kind == "end":
            if (header.get("blocks"), header.get("bytes")) != (num_blocks, num_bytes):
                raise RefusedError("it lacks blocks")
            return
        if kind == "namespace":
            yield _namespace(header)
        elif kind == "block":
            block = _block(header, payload)
            if not path.admit(block.key, block):
                raise RefusedError("a block comes without its parent, or under another namespace")
            num_blocks += 1
            num_bytes += len(payload)
            yield block
        else:
            raise RefusedError(f"an item of kind {kind}")


def _read_frame(source: IO[bytes]) -> tuple[dict[str, Any], bytearray]:
    header_bytes, payload_bytes, checksum = _FRAME.unpack(_read(source, _FRAME.size))
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
        raise RefusedError("an item is too large")
    packed, payload = bytes(_read(source, header_bytes)), _read(source, payload_bytes)
    if _checksum(packed, payload) != checksum:
        raise RefusedError("a checksum does not match")
    try:
        header = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise RefusedError("a header cannot be read") from error
    if not isinstance(header, dict):
        raise RefusedError("a header is no map")
    return header, payload


def _read(source: IO[bytes], size: int, *, at_most: bool = False) -> bytearray:
    data = bytearray()
    while len(data) < size:
        chunk = source.read(min(size - len(data), _CHUNK_BYTES))
        if not chunk:
            if at_most:
                break
            raise RefusedError("it ends too early")
        data += chunk
    return data


def _namespace(header: dict[str, Any]) -> Namespace:
    namespace, identity = header.get("id"), header.get("identity")
    if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
        raise RefusedError("a namespace without a proper id")
    if not isinstance(identity, dict):
        raise RefusedError("a namespace without an identity")
    try:
        json.dumps(identity, allow_nan=False)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # what commands print as JSON, for ever after
        raise RefusedError(f"a namespace whose identity is no JSON: {error}") from error
    return Namespace(namespace, identity)


def _block(header: dict[str, Any], payload: bytearray) -> Prepared:
    fields: dict[str, Any] = {name: header.get(name) for name in _FIELDS}
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise RefusedError(f"a block whose {name} is {type(fields[name]).__name__}")
    parent, tokens, salt = fields["parent"], fields["tokens"], fields["salt"]
    if len(parent) != KEY_BYTES or len(fields["namespace"]) != NAMESPACE_BYTES:
        raise RefusedError("a block without a proper parent or namespace")
    if len(salt) not in (0, 16) or not 0 <= fields["depth"] < 1 << 32:
        raise RefusedError("a block with an impossible salt or depth")
    if fields["num_tokens"] not in (0, len(tokens) // 4):
        raise RefusedError("a block whose number of tokens is not that of its tokens")
    if not 0 <= fields["payload_bytes"] <= _MAX_PAYLOAD_BYTES:
        raise RefusedError("a block of impossible size")
    if schema.checksum(payload) != fields["checksum"]:
        raise RefusedError("a block whose payload does not match its checksum")
    try:
        codec = get_codec(fields["codec"])
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    if codec is None and fields["payload_bytes"] != len(payload):
        raise RefusedError("a block whose size is not that of its payload")
    return Prepared(key=block_key(parent, tokens), stored=payload, nbytes=len(payload), **fields)
