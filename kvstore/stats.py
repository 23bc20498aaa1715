"""What ``stats()`` returns: frozen snapshots, reading changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.reports.histogram import NO_TIMES, HistogramStats
from kvstore.write_behind import WriteCounters


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Byte and block counts are exact at the time of the snapshot.

    Of disk, what is used, pinned and evicted is the directory's, which models, tenants and
    processes share; everything else is this store's own.

    state            "ok", "off", "degraded" (host memory that is not page-locked: slower copies),
                     or what the disk tier says of itself ("read_only", "checking")
    reason           why the state is not "ok", or what limits the tier; empty otherwise
    hits             blocks that requests found here, the fastest tier that held them
    evicted_blocks   blocks that left to make room for others
    misses           blocks that neither a faster tier held nor this one
    stored_blocks    blocks it came to hold since the store was opened; of disk, those this process
                     wrote
    removed_blocks   blocks that left it since; of disk, those this process evicted or cleared
    pinned_blocks    of those it holds, what pins protect; on disk, those of all processes
    """

    state: str
    reason: str
    capacity_bytes: int
    used_bytes: int
    used_blocks: int
    hits: int
    evicted_blocks: int
    misses: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    pinned_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The whole store.

    looked_up_blocks     full blocks that requests asked for
    promoted_blocks      copied to the device, by source tier
    demoted_blocks       copied from device to host
    failed_loads         by reason; each shortened a request's match
    merged_blocks        computed twice, one copy kept
    unreachable_blocks   held in memory while an ancestor is in no tier
    dirty_blocks         in memory and not on disk yet; 0 without a disk tier
    oldest_dirty_age_s   how long the oldest of them has been dirty, 0.0 for none
    written              blocks and bytes written to disk since the store was opened
    pending_transfers    under way now
    load_decisions       reservations by what was decided about loading (``LoadReason``)
    block_bytes          of one block in memory
    promote_seconds      how long loads took, by tier, and of that
    queue_seconds        how long they waited behind other loads
    write_seconds        how long writes to disk took, their waiting included
    written_bytes_last_day   bytes written to disk in the last 24 hours, for the wear of its medium
    """

    tiers: Mapping[str, TierStats]
    looked_up_blocks: int
    promoted_blocks: Mapping[str, int]
    demoted_blocks: int
    failed_loads: Mapping[str, int]
    merged_blocks: int
    unreachable_blocks: int
    dirty_blocks: int
    oldest_dirty_age_s: float
    written: WriteCounters
    pending_transfers: int
    load_decisions: Mapping[str, int]
    block_bytes: int = 0
    promote_seconds: Mapping[str, HistogramStats] = field(default_factory=dict)
    queue_seconds: Mapping[str, HistogramStats] = field(default_factory=dict)
    write_seconds: HistogramStats = NO_TIMES
    written_bytes_last_day: int = 0
