"""Carry blocks from one cache to another in one file.

    file    magic, version, frames
    frame   u32 header length, u64 payload length, xxh3-128 of header ‖ payload, header, payload
    header  msgpack map with "kind": "namespace" {id, identity}, "block" {fields of its record}, or
            "end" {blocks, bytes}, which comes last

Numbers are little-endian. The importer believes nothing: lengths are held against the file's size
before anything is allocated, checksums before anything is decoded, keys are computed anew from
parent and tokens, and nothing is stored before the whole file has passed. What it cannot know is
whether the values are what the model would have computed: import files as you would model
weights, from people you trust.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgpack

from kvstore.block import PutOutcome
from kvstore.disk import schema
from kvstore.disk.codec import get_codec
from kvstore.disk.environment import Environment
from kvstore.disk.ledger import Prepared
from kvstore.disk.places import TEMPORARY_MARK
from kvstore.disk.schema import NAMESPACE_BYTES, SealError
from kvstore.disk.selection import ancestors, continuations, find_block, read_records
from kvstore.disk.slices import reading
from kvstore.disk.store import DiskStore, open_for_change
from kvstore.errors import ConfigError
from kvstore.hashing import KEY_BYTES, block_key

_MAGIC = b"KVSTORE EXPORT\0\0"
_VERSION = 1
_START = struct.Struct("<16sI")
_FRAME = struct.Struct("<IQ16s")
_MAX_HEADER_BYTES = 1 << 20
_MAX_PAYLOAD_BYTES = 1 << 30
_GROUP_BYTES = 16 << 20

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


def export_documents(
    path: str | Path, file: str | Path, *, namespace: str | None = None, document: str | None = None
) -> dict[str, int]:
    """Write blocks of the cache to ``file``, parents first: ``{"blocks", "bytes"}``.

    namespace  the beginning of an id, or a model's name; None for all
    document   the beginning of a block's key (hex): that block, what it continues and what
               continues it; None for all

    Each payload is verified; a bad one, and what is below it, is left out. The file appears
    complete or not at all; only its owner can read it, for it holds the documents' tokens.
    """
    written: set[bytes] = set()
    num_bytes = 0
    with reading(path) as env, _new_file(Path(file)) as out:
        out.write(_START.pack(_MAGIC, _VERSION))
        if env is not None:
            records = read_records(env, namespace)
            chosen = set(records)
            if document is not None:
                key = find_block(records, document)
                chosen = {*ancestors(records, key), *continuations(records, key)}
            _write_namespaces(env, out, {records[key].namespace for key in chosen})
            for key in sorted(chosen, key=lambda key: (records[key].depth, key)):
                num_bytes += _export_block(env, key, out, written)
        _write(out, {"kind": "end", "blocks": len(written), "bytes": num_bytes}, b"")
    return {"blocks": len(written), "bytes": num_bytes}


def _write_namespaces(env: Environment, out: IO[bytes], wanted: set[bytes]) -> None:
    with env.read() as txn:
        for raw_id, value in txn.cursor(db=env.namespaces):
            namespace = bytes(raw_id)
            if namespace in wanted:
                identity = schema.decode_identity(namespace, value)
                _write(out, {"kind": "namespace", "id": namespace, "identity": identity}, b"")


def _export_block(env: Environment, key: bytes, out: IO[bytes], written: set[bytes]) -> int:
    """Bytes of payload written; 0 when the block has gone, is bad, or its parent was left out."""
    with env.read() as txn:
        value = txn.get(key, db=env.index)
        try:
            record = schema.decode_record(key, value or b"")
        except SealError:
            return 0
        payload = bytes(txn.get(key, db=env.payload) or b"")
    if schema.checksum(payload) != record.checksum:
        return 0
    if record.depth > 0 and record.parent not in written:
        return 0
    header = {name: getattr(record, name) for name in _FIELDS}
    _write(out, {"kind": "block", **header}, payload)
    written.add(key)
    return len(payload)


def _write(out: IO[bytes], header: dict[str, Any], payload: bytes) -> None:
    packed: bytes = msgpack.packb(header)
    out.write(_FRAME.pack(len(packed), len(payload), schema.checksum(packed + payload)))
    out.write(packed)
    out.write(payload)


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[IO[bytes]]:
    """A file that only its owner reads (it holds tokens), moved into place when it is complete."""
    temporary = target.with_name(f"{target.name}{TEMPORARY_MARK}{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Namespace:
    id: bytes
    identity: dict[str, Any]


def import_documents(
    path: str | Path, file: str | Path, *, capacity_bytes: int | None = None
) -> dict[str, int]:
    """Put what an export holds into the cache at ``path``: ``{"blocks", "present", "refused"}``.

    ``refused`` blocks found no room. The cache is created where there is none; what it already
    knows of a namespace stays. Raises ``ConfigError`` for a file that is not a whole, valid export;
    then nothing was stored.
    """
    source = Path(file)
    for _ in _read(source):
        pass
    counts = {"blocks": 0, "present": 0, "refused": 0}
    with open_for_change(path, capacity_bytes=capacity_bytes) as store:
        known = store.namespaces()
        group: list[Prepared] = []
        for item in _read(source):
            if isinstance(item, _Namespace):
                if item.id not in known:
                    store.register_namespace(item.id, item.identity)
                continue
            group.append(item)
            if sum(block.nbytes for block in group) >= _GROUP_BYTES:
                _put(store, group, counts)
        _put(store, group, counts)
    return counts


def _put(store: DiskStore, group: list[Prepared], counts: dict[str, int]) -> None:
    for outcome in store.put_encoded(group).values():
        if outcome is PutOutcome.STORED:
            counts["blocks"] += 1
        else:
            counts["present" if outcome is PutOutcome.PRESENT else "refused"] += 1
    group.clear()


def _read(source: Path) -> Iterator[Prepared | _Namespace]:
    """The file's items, each checked. Raises ``ConfigError`` for anything but a whole export."""
    try:
        with source.open("rb") as opened:
            yield from _read_items(opened, os.fstat(opened.fileno()).st_size)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    except _RefusedError as error:
        raise ConfigError(f"{source}: not a valid export: {error}") from error


class _RefusedError(Exception):
    """What is wrong with the file."""


def _read_items(opened: IO[bytes], size: int) -> Iterator[Prepared | _Namespace]:
    start = opened.read(_START.size)
    if len(start) < _START.size or start[: len(_MAGIC)] != _MAGIC:
        raise _RefusedError("no export begins like this")
    version = _START.unpack(start)[1]
    if version != _VERSION:
        raise _RefusedError(f"version {version}, this program reads {_VERSION}")
    num_blocks = num_bytes = 0
    known: set[bytes] = set()
    while True:
        header, payload = _read_frame(opened, size)
        kind = header.get("kind")
        if kind == "end":
            if (header.get("blocks"), header.get("bytes")) != (num_blocks, num_bytes):
                raise _RefusedError("it lacks blocks")
            return
        if kind == "namespace":
            yield _namespace(header)
        elif kind == "block":
            block = _block(header, payload)
            if block.depth > 0 and block.parent not in known:
                raise _RefusedError("a block comes before its parent")
            known.add(block.key)
            num_blocks += 1
            num_bytes += len(payload)
            yield block
        else:
            raise _RefusedError(f"an item of kind {kind!r}")


def _read_frame(opened: IO[bytes], size: int) -> tuple[dict[str, Any], bytes]:
    start = opened.read(_FRAME.size)
    if len(start) < _FRAME.size:
        raise _RefusedError("it ends too early")
    header_bytes, payload_bytes, checksum = _FRAME.unpack(start)
    if header_bytes > _MAX_HEADER_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
        raise _RefusedError("an item is too large")
    if opened.tell() + header_bytes + payload_bytes > size:
        raise _RefusedError("it ends too early")
    packed, payload = opened.read(header_bytes), opened.read(payload_bytes)
    if schema.checksum(packed + payload) != checksum:
        raise _RefusedError("a checksum does not match")
    try:
        header = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise _RefusedError("a header cannot be read") from error
    if not isinstance(header, dict):
        raise _RefusedError("a header is no map")
    return header, payload


def _namespace(header: dict[str, Any]) -> _Namespace:
    namespace, identity = header.get("id"), header.get("identity")
    if not isinstance(namespace, bytes) or len(namespace) != NAMESPACE_BYTES:
        raise _RefusedError("a namespace without a proper id")
    if not isinstance(identity, dict):
        raise _RefusedError("a namespace without an identity")
    return _Namespace(namespace, identity)


def _block(header: dict[str, Any], payload: bytes) -> Prepared:
    fields: dict[str, Any] = {name: header.get(name) for name in _FIELDS}
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise _RefusedError(f"a block whose {name} is {type(fields[name]).__name__}")
    parent, tokens, salt = fields["parent"], fields["tokens"], fields["salt"]
    if len(parent) != KEY_BYTES or len(fields["namespace"]) != NAMESPACE_BYTES:
        raise _RefusedError("a block without a proper parent or namespace")
    if len(salt) not in (0, 16) or not 0 <= fields["depth"] < 1 << 32:
        raise _RefusedError("a block with an impossible salt or depth")
    if fields["num_tokens"] not in (0, len(tokens) // 4):
        raise _RefusedError("a block whose number of tokens is not that of its tokens")
    if not 0 <= fields["payload_bytes"] <= _MAX_PAYLOAD_BYTES:
        raise _RefusedError("a block of impossible size")
    if schema.checksum(payload) != fields["checksum"]:
        raise _RefusedError("a block whose payload does not match its checksum")
    try:
        codec = get_codec(fields["codec"])
    except ConfigError as error:
        raise _RefusedError(str(error)) from error
    if codec is None and fields["payload_bytes"] != len(payload):
        raise _RefusedError("a block whose size is not that of its payload")
    return Prepared(key=block_key(parent, tokens), stored=payload, nbytes=len(payload), **fields)
