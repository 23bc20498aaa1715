"""What ``stats()`` returns: frozen snapshots, reading changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.write_behind import WriteCounters


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Byte and block counts are exact at the time of the snapshot.

    state    "ok", "off", "degraded" (host memory that is not page-locked: slower copies), or what
             the disk tier says of itself ("read_only", "checking")
    reason   why the state is not "ok", empty otherwise
    hits     blocks that requests found here, the fastest tier that held them
    """

    state: str
    reason: str
    capacity_bytes: int
    used_bytes: int
    used_blocks: int
    hits: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store.

    looked_up_blocks     full blocks that requests asked for
    promoted_blocks      copied to the device, by source tier
    demoted_blocks       copied from device to host
    failed_loads         by reason; each shortened a request's match
    merged_blocks        computed twice, one copy kept
    unreachable_blocks   held in memory while an ancestor is in no tier
    load_decisions       reservations by what was decided about loading (``cost.LoadReason``)
    """

    tiers: Mapping[str, TierStats]
    looked_up_blocks: int
    promoted_blocks: Mapping[str, int]
    demoted_blocks: int
    failed_loads: Mapping[str, int]
    merged_blocks: int
    dirty_blocks: int
    oldest_dirty_age_s: float
    written: WriteCounters
    pending_transfers: int
    load_decisions: Mapping[str, int]
