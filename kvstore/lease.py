"""What a request has of the store: first a lookup of its prefix, then a lease on device blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore.block import BlockRef, TierName
from kvstore.costs.cost import LoadDecision
from kvstore.errors import KVStoreError


class LookupState(Enum):
    PROBING = auto()  # a reader thread walks the disk index
    READY = auto()


@dataclass(slots=True, eq=False)
class Lookup:
    """One request's prefix and what is known of where its blocks are.

    keys, runs     of all full blocks that may be reused, in order
    tail           tokens after them that may be reused, less than a block
    seed           parent of the first block
    salt           the salt's digest
    on_disk        keys the probe found
    below          children on disk of the last block the probe found, for the tokens after it
    given_up       keys whose load failed or came too late for this request: never tried again
    resident       slots of the blocks at the front that were on the device when last looked at
    sources        tier that held each block of the prefix when the request was matched or probed
    is_counted     whether its hits are part of the store's statistics
    num_tokens     of the whole prompt
    decision       how much of the prefix is loaded and how much computed, once that is known
    has_probed     whether a slow tier was tried for this request
    skips_disk     whether there is a disk that is not asked, since nothing is loaded from it
    """

    keys: Sequence[bytes]
    runs: Sequence[bytes]
    tail: bytes
    seed: bytes
    salt: bytes
    is_counted: bool = True
    num_tokens: int = 0
    state: LookupState = LookupState.READY
    on_disk: set[bytes] = field(default_factory=set)
    below: list[BlockRef] = field(default_factory=list)
    given_up: set[bytes] = field(default_factory=set)
    resident: list[int] = field(default_factory=list)
    sources: list[TierName] = field(default_factory=list)
    decision: LoadDecision | None = None
    has_probed: bool = False
    skips_disk: bool = False

    @property
    def is_ready(self) -> bool:
        return self.state is LookupState.READY

    def parent(self, position: int) -> bytes:
        """The key before a block, the seed before the first."""
        return self.keys[position - 1] if position else self.seed

    def ref(self, position: int) -> BlockRef:
        return BlockRef(self.keys[position], self.parent(position), self.runs[position], position)


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """A cached block whose first ``num_tokens`` positions, and not all, are those of a prefix."""

    ref: BlockRef
    slot: int  # NONE for one that only disk holds
    tier: TierName
    num_tokens: int


@dataclass(frozen=True, slots=True)
class OtherSalt:
    """What a cache holds of a prefix under another salt, of which only the digest is known.

    seed         parent of its first block
    num_blocks   that memory holds, from the first on
    """

    salt: bytes
    seed: bytes
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """Device blocks that one sequence uses, from ``reserve`` until ``release``.

    block_ids      the sequence's block table: positions [i * block_size, …) lie in block_ids[i]
    slots          index slot of each block that has a key, a prefix of ``block_ids``; blocks after
                   it are private to the sequence, or to it and those that were forked from it
    num_cached     blocks at the front that were found and not computed
    partial        the block whose head is copied into the first block after those
    num_loading    blocks whose bytes are still on their way
    failed_keys    blocks whose load failed
    is_probe       loads a few blocks to see how fast their tier is
    """

    lookup: Lookup
    block_ids: list[int]
    slots: list[int]
    num_cached: int
    partial: PartialMatch | None = None
    num_loading: int = 0
    failed_keys: list[bytes] = field(default_factory=list)
    is_probe: bool = False

    @property
    def is_provisional(self) -> bool:
        """Ready, but not what the request needs: release it and reserve again."""
        return self.is_probe or bool(self.failed_keys)

    @property
    def is_ready(self) -> bool:
        """All bytes of the prefix are on the device, or are known not to come."""
        return self.num_loading == 0

    def cached_tokens(self, block_size: int) -> dict[TierName, int]:
        """Tokens that need not be computed, by the tier they were found in."""
        counts: dict[TierName, int] = {}
        for tier in self.lookup.sources[: self.num_cached]:
            counts[tier] = counts.get(tier, 0) + block_size
        if self.partial is not None:
            counts[self.partial.tier] = counts.get(self.partial.tier, 0) + self.partial.num_tokens
        return counts

    def num_cached_tokens(self, block_size: int) -> int:
        return sum(self.cached_tokens(block_size).values())


class Pin:
    """Keeps blocks from being lost, until ``release`` or the end of a ``with`` block.

    is_settled   False while disk is not told of it yet, its blocks are being written, or of its end
    error        why it holds nothing although it is settled, None when all is well
    """

    def __init__(
        self,
        num_blocks: int,
        release: Callable[[], None],
        *,
        is_settled: bool = True,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_blocks = num_blocks
        self.is_settled = is_settled
        self.error: KVStoreError | None = None
        self._release: Callable[[], None] | None = release
        self._has_ended = has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its time is over: it holds nothing any more, released or not."""
        return self._has_ended()

    def release(self) -> None:
        """End the hold; calling it again does nothing.

        Raises ``StoreClosedError`` for one on disk whose store is closed: that stays.
        """
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "held" if self.is_settled else "being written"
        if self.error is not None:
            state = "failed"
        elif self._release is None:
            state = "released"
        elif self.has_ended:
            state = "ended"
        return f"Pin(num_blocks={self.num_blocks}, {state})"
