"""Reporting: counts what requests find, and puts the store's statistics together."""

from collections import Counter

from kvstore.block import TierName
from kvstore.eviction import Evictor
from kvstore.lease import Lookup
from kvstore.leasing import Leasing
from kvstore.memory import Memory
from kvstore.pinning import Pinning
from kvstore.promotion import Promoter
from kvstore.stats import StoreStats, TierStats
from kvstore.tiers.base import BlockCopier, DiskTier
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind


class Reporter:
    """Owner thread only. Reads the other parts; changes nothing but its own counts."""

    def __init__(
        self,
        memory: Memory,
        copier: BlockCopier,
        transfer: TransferLoop,
        evictor: Evictor,
        promoter: Promoter,
        leasing: Leasing,
        write_behind: WriteBehind,
        pinning: Pinning,
    ) -> None:
        self._layout = memory.layout
        self._device = memory.device
        self._host = memory.host
        self._copier = copier
        self._transfer = transfer
        self._evictor = evictor
        self._promoter = promoter
        self._leasing = leasing
        self._write_behind = write_behind
        self._pinning = pinning
        self._events = memory.events
        self._looked_up = 0
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()

    def count(self, lookup: Lookup, *, has_disk: bool) -> None:
        """A request's prefix is known: count where its blocks were."""
        if not lookup.is_counted:
            return
        missing = len(lookup.keys)
        self._looked_up += missing
        tiers = {TierName.DEVICE: self._device, TierName.HOST: self._host, TierName.DISK: has_disk}
        for tier, is_on in tiers.items():
            num_found = lookup.sources.count(tier) if missing else 0
            self._hits[tier] += num_found
            missing -= num_found
            if is_on:
                self._misses[tier] += missing
        self._events.matched(
            lookup.keys, lookup.sources, num_tokens=lookup.num_tokens, salt=lookup.salt
        )

    def stats(self, disk: DiskTier | None, disk_off: str, num_dirty: int) -> StoreStats:
        """A snapshot. ``disk_off`` says why there is no disk tier."""
        block_bytes, evicted = self._layout.block_bytes, self._evictor.evicted_blocks
        tiers = {}
        for name, pool in ((TierName.DEVICE, self._device), (TierName.HOST, self._host)):
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
                hits=self._hits[name],
                evicted_blocks=evicted[name],
                misses=self._misses[name],
                stored_blocks=self._events.stored_blocks[name],
                removed_blocks=self._events.removed_blocks[name],
                pinned_blocks=self._pinning.count(name),
            )
        tiers["disk"] = self._disk_stats(disk, disk_off)
        return StoreStats(
            tiers=tiers,
            looked_up_blocks=self._looked_up,
            promoted_blocks=dict(self._promoter.promoted_blocks),
            demoted_blocks=self._evictor.demoted_blocks,
            failed_loads=dict(self._promoter.failed_loads),
            merged_blocks=self._leasing.merged_blocks,
            unreachable_blocks=len(self._evictor.unreachable()),
            dirty_blocks=num_dirty,
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

    def _disk_stats(self, tier: DiskTier | None, disk_off: str) -> TierStats:
        disk = tier.stats() if tier else None
        return TierStats(
            state=disk.state if disk else "off",
            reason=(disk.reason or "") if disk else disk_off or "disk_cache is not set",
            capacity_bytes=disk.capacity_bytes if disk else 0,
            used_bytes=disk.used_bytes if disk else 0,
            used_blocks=disk.blocks if disk else 0,
            hits=self._hits["disk"],
            evicted_blocks=disk.evictions if disk else 0,
            misses=self._misses["disk"],
            stored_blocks=self._events.stored_blocks["disk"],
            removed_blocks=self._events.removed_blocks["disk"],
            pinned_blocks=disk.pinned_blocks if disk else 0,
        )
