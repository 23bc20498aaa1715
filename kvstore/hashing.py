"""Block keys: what content a block has, independent of process, machine and device.

    tokens_i   block_size token ids, little-endian uint32
    namespace  sha256 of the model identity as canonical msgpack (keys sorted at every level)
    seed       sha256(b"kvstore\\0" ‖ version ‖ namespace ‖ u32 len(salt) ‖ salt)
    key_i      sha256(key_{i-1} ‖ tokens_i), with key_{-1} = seed

``version`` and lengths are little-endian uint32. Keys are the full 32 bytes. Python's ``hash()`` is
never used: it differs from process to process. ``tests/data/block_keys.json`` holds golden vectors;
a change that moves one of them makes every cache on disk miss and must raise ``KEY_VERSION``.
"""

import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgpack
import numpy as np

from kvstore.block import BlockRef
from kvstore.errors import ConfigError

KEY_VERSION = 1
KEY_BYTES = 32
MAX_TOKEN_ID = 2**32 - 1


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32. Raises ``ConfigError`` for an id outside [0, 2**32)."""
    try:
        ids = np.asarray(token_ids, dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError("token ids: expected a flat sequence of integers") from None
    if ids.ndim != 1 or (ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN_ID)):
        raise ConfigError("token ids: expected integers in [0, 2**32) in one dimension")
    return ids.astype("<u4").tobytes()


def num_equal_tokens(one: bytes, other: bytes) -> int:
    """How many leading tokens two encoded sequences share."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end // 4
    first = next(i for i in range(end) if one[i] != other[i])
    return first // 4


def namespace_id(identity: Mapping[str, Any]) -> bytes:
    """Digest of a model identity: equal dictionaries give equal ids in any insertion order."""
    packed: bytes = msgpack.packb(_canonical(identity), use_bin_type=True)
    return sha256(packed).digest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


def chain_seed(namespace: bytes, salt: str = "") -> bytes:
    """The parent of every root block of one namespace and salt."""
    encoded = salt.encode()
    head = b"kvstore\0" + struct.pack("<I", KEY_VERSION) + namespace
    return sha256(head + struct.pack("<I", len(encoded)) + encoded).digest()


def salt_digest(salt: str) -> bytes:
    """What is stored of a salt: empty for none, else 16 bytes that do not reveal it."""
    return sha256(b"kvstore salt\0" + salt.encode()).digest()[:16] if salt else b""


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of the block with these ``tokens`` after ``parent``."""
    return sha256(parent + tokens).digest()


def chain_keys(parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Keys of all full blocks of ``tokens`` in order, the first one chained to ``parent``.

    ``block_bytes`` is 4 * block_size; a partial block at the end has no key.
    """
    return chain_blocks(parent, tokens, block_bytes)[0]


def chain_blocks(parent: bytes, tokens: bytes, block_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """Like ``chain_keys``, with each block's tokens beside its key."""
    ends = range(block_bytes, len(tokens) + 1, block_bytes)
    runs = [tokens[end - block_bytes : end] for end in ends]
    keys = []
    for run in runs:
        parent = sha256(parent + run).digest()
        keys.append(parent)
    return keys, runs


def chain_refs(parent: bytes, tokens: bytes, block_bytes: int, depth: int = 0) -> list[BlockRef]:
    """Like ``chain_keys``, as records; the first block has the given ``depth``."""
    keys, runs = chain_blocks(parent, tokens, block_bytes)
    parents = [parent, *keys[:-1]]
    return [
        BlockRef(*identity, depth + i)
        for i, identity in enumerate(zip(keys, parents, runs, strict=True))
    ]
