"""Reporting: puts the store's statistics together from what its parts have counted."""

from kvstore.backing import Backing
from kvstore.block import TierName
from kvstore.eviction import Evictor
from kvstore.finding import Finder
from kvstore.leasing import Leasing
from kvstore.memory import Memory
from kvstore.pinning import Pinning
from kvstore.promotion import Promoter
from kvstore.stats import StoreStats, TierStats
from kvstore.tiers.base import BlockCopier
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind


class Reporter:
    """Owner thread only. Reads the other parts; changes nothing."""

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        copier: BlockCopier,
        transfer: TransferLoop,
        finder: Finder,
        evictor: Evictor,
        promoter: Promoter,
        leasing: Leasing,
        write_behind: WriteBehind,
        pinning: Pinning,
    ) -> None:
        self._memory = memory
        self._backing = backing
        self._copier = copier
        self._transfer = transfer
        self._finder = finder
        self._evictor = evictor
        self._promoter = promoter
        self._leasing = leasing
        self._write_behind = write_behind
        self._pinning = pinning

    def stats(self) -> StoreStats:
        """See ``BlockStore.stats``."""
        memory, finder, block_bytes = self._memory, self._finder, self._memory.layout.block_bytes
        tiers = {}
        for name, pool in ((TierName.DEVICE, memory.device), (TierName.HOST, memory.host)):
            used = pool.capacity - pool.num_free if pool else 0
            wrong = ""
            if name is TierName.HOST:
                wrong = self._evictor.host_failure or self._copier.stats().reason
            tiers[name.value] = TierStats(
                state=("degraded" if wrong else "ok") if pool else "off",
                reason=wrong if pool else f"{name}_cache is 0",
                capacity_bytes=pool.capacity * block_bytes if pool else 0,
                used_bytes=used * block_bytes,
                used_blocks=used,
                hits=finder.hits[name],
                evicted_blocks=self._evictor.evicted_blocks[name],
                misses=finder.misses[name],
                stored_blocks=memory.events.stored_blocks[name],
                removed_blocks=memory.events.removed_blocks[name],
                pinned_blocks=self._pinning.count(name),
            )
        tiers["disk"] = self._disk_stats()
        return StoreStats(
            tiers=tiers,
            looked_up_blocks=finder.looked_up_blocks,
            promoted_blocks=dict(self._promoter.promoted_blocks),
            demoted_blocks=self._evictor.demoted_blocks,
            failed_loads=dict(self._promoter.failed_loads),
            merged_blocks=self._leasing.merged_blocks,
            unreachable_blocks=len(self._evictor.unreachable()),
            dirty_blocks=len(memory.index.dirty),
            oldest_dirty_age_s=self._write_behind.oldest_age_s(),
            written=self._write_behind.counters,
            pending_transfers=self._transfer.num_pending,
            load_decisions=dict(self._leasing.decisions),
            block_bytes=block_bytes,
            promote_seconds={tier.value: h.stats() for tier, h in self._promoter.seconds.items()},
            queue_seconds={
                tier.value: h.stats() for tier, h in self._promoter.queue_seconds.items()
            },
            write_seconds=self._write_behind.seconds.stats(),
            written_bytes_last_day=self._write_behind.bytes_last_day.total(),
        )

    def _disk_stats(self) -> TierStats:
        backing, events, finder = self._backing, self._memory.events, self._finder
        disk = backing.tier.stats() if backing.tier is not None else None
        return TierStats(
            state=disk.state if disk else "off",
            reason=(disk.reason or "") if disk else backing.why_off or "disk_cache is not set",
            capacity_bytes=disk.capacity_bytes if disk else 0,
            used_bytes=disk.used_bytes if disk else 0,
            used_blocks=disk.blocks if disk else 0,
            hits=finder.hits["disk"],
            evicted_blocks=disk.evictions if disk else 0,
            misses=finder.misses["disk"],
            stored_blocks=events.stored_blocks["disk"],
            removed_blocks=events.removed_blocks["disk"],
            pinned_blocks=disk.pinned_blocks if disk else 0,
        )
