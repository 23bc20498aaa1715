"""What a block is: its shape, its identity, and where it may live.

A block holds ``block_size`` consecutive positions of one token sequence: keys and values of every
layer, as one contiguous run of bytes that is the same in every tier::

    [num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]

Layers are stored full attention first and sliding window after, so that what no query can see any
more is one run at the end. That order and the axes above are ``LAYOUT_VERSION``.

Does not know torch: dtypes are names.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum

from kvstore.errors import ConfigError

LAYOUT_VERSION = 1

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class TierName(StrEnum):
    """The tiers, fastest first. The value is what metrics, JSON and ``stats()`` print."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The shape of one block. ``dtype`` is a torch dtype's name without ``torch.``."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ConfigError(f"dtype: expected one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")
        for name in ("num_layers", "block_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bytes_per_token

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions, the partial last one included."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block's content identity, enough to find it and to check that it is the right one.

    key        32 bytes, ``sha256(parent ‖ tokens)``
    parent     32 bytes: the key of the block before, or the seed of namespace and salt for a root
    tokens     ``block_size`` little-endian uint32
    depth      0 for a root, parent's depth + 1 otherwise
    """

    key: bytes
    parent: bytes
    tokens: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block on its way to a slower tier; ``payload`` is borrowed until the write returns.

    namespace  32 bytes, the digest of the model identity (``hashing.namespace_id``)
    salt       digest of the tenant's salt (``hashing.salt_digest``), empty for none
    """

    ref: BlockRef
    namespace: bytes
    salt: bytes
    payload: bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of blocks that were to be dropped: so many went, so many stayed, being pinned."""

    num_blocks: int
    num_pinned: int


class PutOutcome(Enum):
    """What became of one block of a group that was put."""

    STORED = "stored"
    PRESENT = "present"  # was there already, with the same tokens and a good payload
    ORPHAN = "orphan"  # its parent has no record in the tier: put the parent first
    FULL = "full"  # no room, and nothing may be evicted for it
