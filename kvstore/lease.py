"""What a request has of the store: first a lookup of its prefix, then a lease on device blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvstore.block import BlockRef, TierName
from kvstore.cost import LoadDecision


class LookupState(Enum):
    PROBING = auto()  # a reader thread walks the disk index
    READY = auto()


@dataclass(slots=True, eq=False)
class Lookup:
    """One request's prefix and what is known of where its blocks are.

    keys, runs     of all full blocks that may be reused, in order
    seed           parent of the first block
    salt           the salt's digest
    on_disk        keys the probe found
    given_up       keys whose load failed for this request: never tried again
    sources        tier that held each block of the prefix when the request was matched or probed
    is_counted     whether its hits are part of the store's statistics
    decision       how much of the prefix is loaded and how much computed, once that is known
    has_probed     whether a slow tier was tried for this request
    """

    keys: Sequence[bytes]
    runs: Sequence[bytes]
    seed: bytes
    salt: bytes
    is_counted: bool = True
    state: LookupState = LookupState.READY
    on_disk: set[bytes] = field(default_factory=set)
    given_up: set[bytes] = field(default_factory=set)
    sources: list[TierName] = field(default_factory=list)
    decision: LoadDecision | None = None
    has_probed: bool = False

    @property
    def is_ready(self) -> bool:
        return self.state is LookupState.READY

    def ref(self, position: int) -> BlockRef:
        parent = self.keys[position - 1] if position else self.seed
        return BlockRef(self.keys[position], parent, self.runs[position], position)


@dataclass(slots=True, eq=False)
class Lease:
    """Device blocks that one sequence uses, from ``reserve`` until ``release``.

    block_ids      the sequence's block table: positions [i * block_size, …) lie in block_ids[i]
    slots          index slot of each block that has a key, a prefix of ``block_ids``; blocks after
                   it are private to the sequence
    keys           of the blocks in ``slots`` and, while known, of the prompt's blocks after them
    num_cached     blocks at the front that were found and not computed
    num_loading    of those, blocks whose bytes are still on their way
    failed_keys    blocks whose load failed
    is_probe       loads a few blocks to see how fast their tier is
    """

    lookup: Lookup
    block_ids: list[int]
    slots: list[int]
    num_cached: int
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
