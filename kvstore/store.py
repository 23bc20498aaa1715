"""The block store: finds, loads, keeps and gives up KV blocks for one owner thread.

The life of a request's blocks::

    lookup    which blocks of the prefix are known, memory at once, disk by a probe
    reserve   all device blocks of prefix and first chunk, or none; promotions start
    extend    room for the tokens that are computed next
    commit    full blocks get their key, become findable, and dirty
    release   the blocks stay cached until their room is needed

One thread owns a store: it calls the methods, and ``poll()`` now and then to apply what the
transfer side has finished. Nothing here waits except ``run_until_idle``, ``flush`` and ``close``.
"""

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvstore.block import BlockLayout, BlockRef, TierName
from kvstore.check import check
from kvstore.config import StoreConfig
from kvstore.cost import CostModel, LoadReason
from kvstore.errors import CapacityError, KVStoreError, OutOfBlocksError, StoreClosedError
from kvstore.event_file import EventFile
from kvstore.events import EventLog
from kvstore.eviction import Evictor
from kvstore.hashing import block_key, chain_seed, salt_digest
from kvstore.index import FAILED, LOADING, NONE, VALID, BlockIndex
from kvstore.lease import Lease, Lookup, LookupState, Pin
from kvstore.matching import Matcher
from kvstore.policy import VictimPolicy
from kvstore.promotion import Promoter
from kvstore.self_measurement import SelfMeasurement
from kvstore.stats import StoreStats, TierStats
from kvstore.tiers.base import BlockCopier, BlockPool, DiskTier, RemovedBlock
from kvstore.tiers.host import HostCopier, HostPool
from kvstore.transfer import Probed, TransferLoop
from kvstore.write_behind import WriteBehind

logger = logging.getLogger(__name__)


class BlockStore:
    """KV blocks of one model identity in up to three tiers.

    layout        shape of a block
    namespace     digest of the model identity (``hashing.namespace_id``)
    device        the pool whose block ids leases hold
    copier        moves blocks between ``device`` and host memory; the default serves a host pool
    host_blocks   capacity of the host tier, 0 for none
    disk          the disk tier, None for none; the store closes it
    disk_off      why there is no disk tier although one was asked for
    cost          decides what is loaded and what is computed; by default by ``config.load_policy``
    on_event      called from the transfer thread when ``poll()`` has something to do

    ``events`` is where to subscribe to what happens to blocks; ``poll()`` hands it over.
    """

    def __init__(
        self,
        layout: BlockLayout,
        namespace: bytes,
        device: BlockPool,
        *,
        copier: BlockCopier | None = None,
        host_blocks: int = 0,
        disk: DiskTier | None = None,
        disk_off: str = "",
        config: StoreConfig | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[], None] | None = None,
    ) -> None:
        self.layout = layout
        self.namespace = namespace
        self.config = config or StoreConfig()
        self.cost = cost or CostModel(self.config.load_policy, clock=clock)
        self.device = device
        self.host = HostPool(host_blocks, layout.block_bytes) if host_blocks else None
        self.index = BlockIndex()
        self.events = EventLog(self.index, namespace=namespace, block_size=layout.block_size)
        self._event_file: EventFile | None = None
        if self.config.event_file is not None:
            self._event_file = EventFile(self.config.event_file)
            self.events.subscribe(self._event_file)
        self._disk = disk
        self._disk_off = disk_off
        self._removed: deque[RemovedBlock] = deque()  # from disk; the transfer thread appends
        if disk is not None:
            disk.watch_removals(self._removed.extend)
        self._clock = clock
        self._owner = threading.get_ident()
        self._closed = False
        self._wake = threading.Condition()
        self._on_event = on_event
        if copier is None:
            assert isinstance(device, HostPool), "another device brings its own copier"
            copier = HostCopier(device)
        self._copier = copier
        staging = None
        if disk is not None and not isinstance(device, HostPool):
            blocks = max(2, self.config.staging_bytes // layout.block_bytes)
            staging = HostPool(blocks, layout.block_bytes)
        self._transfer = TransferLoop(
            device,
            copier,
            host=self.host.rows if self.host else None,
            disk=disk,
            staging=staging,
            block_bytes=layout.block_bytes,
            write_bytes_per_s=self.config.write_bytes_per_s,
            on_completion=self._notify,
            clock=clock,
        )
        self._write_behind = WriteBehind(
            self.index,
            device,
            self.host,
            self._transfer,
            self.config,
            namespace=namespace,
            block_bytes=layout.block_bytes,
            clock=clock,
            events=self.events,
            on_broken=self._lose_disk,
        )
        self._evictor = Evictor(
            self.index,
            device,
            self.host,
            self._transfer,
            self._write_behind,
            self.config,
            clock,
            self.events,
        )
        self._promoter = Promoter(
            self.index,
            device,
            copier,
            self._transfer,
            self._evictor,
            self.cost,
            layout,
            clock,
            self.events,
        )
        self._matcher = Matcher(
            self.index, self.cost, self._promoter.loading_from, layout, namespace, self.config
        )
        self._self_measurement = SelfMeasurement(
            self._transfer, copier, device, self.host, self.cost, layout.block_bytes, clock
        )
        self.leases: set[Lease] = set()
        self._prefetches: list[tuple[Lookup, Lease | None]] = []
        self._num_uses = 0
        self._looked_up = 0
        self._merged = 0
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._decided: Counter[str] = Counter()

    # ---- the life of a request -----------------------------------------------------------------

    def lookup(
        self,
        tokens: bytes,
        salt: str = "",
        *,
        num_reusable: int | None = None,
        peek: bool = False,
    ) -> Lookup:
        """Start finding the blocks of ``tokens`` (little-endian uint32).

        Memory is matched at once; where that ends early and there is a disk tier, a probe starts
        and the lookup is ``PROBING`` until ``poll()`` has seen its answer. At most the first
        ``num_reusable`` tokens are looked for: by default all but the last, whose logits a request
        wants to compute. ``peek`` counts no hits.
        """
        self._check_open()
        most = len(tokens) // 4 - 1 if num_reusable is None else num_reusable
        lookup = self._matcher.prefix(tokens[: max(0, most) * 4], salt, is_counted=not peek)
        lookup.num_tokens = len(tokens) // 4
        if len(lookup.sources) < len(lookup.keys) and self._reads_disk():
            lookup.state = LookupState.PROBING
            start = len(lookup.sources)
            refs = [lookup.ref(i) for i in range(start, len(lookup.keys))]
            below = self.config.min_partial_tokens < self.layout.block_size
            self._transfer.probe(refs, below, lambda found: self._end_probe(lookup, found))
        else:
            self._count_hits(lookup)
        return lookup

    def reserve(self, lookup: Lookup, num_tokens: int, *, chunk_tokens: int | None = None) -> Lease:
        """Device blocks for the matched prefix and the tokens computed first, or none at all.

        Covers ``num_tokens`` positions, or the prefix and ``chunk_tokens`` more if that is less.
        Blocks found in slower tiers start moving to the device; the lease is ready when they have
        arrived. Raises ``OutOfBlocksError`` when there is no room now: no block is held or evicted
        then, and trying again after ``poll()`` may succeed.
        """
        self._check_open()
        assert lookup.state is LookupState.READY, "the probe has not ended"
        size, slots = self.layout.block_size, self._matcher.walk(lookup)
        num_cached = len(slots)
        partial = self._matcher.partial(lookup, num_cached)
        num_found = num_cached * size + (partial.num_tokens if partial else 0)
        if chunk_tokens is not None:
            num_tokens = min(num_tokens, num_found + chunk_tokens)
        num_blocks = max(self.layout.blocks_for(num_tokens), num_cached)
        if num_blocks == num_cached:
            partial = None
        on_device = [slot for slot in slots if slot != NONE and self.index.device[slot] != NONE]
        moving = num_cached - len(on_device)
        num_fresh, keep = num_blocks - len(on_device), set(on_device)
        if moving:
            self._check_promotion_share(num_fresh)
        spared = {partial.slot} if partial else set()
        if not self._evictor.make_device_room(num_fresh, keep | spared):
            partial = None  # its room may be what is missing
            if not self._evictor.make_device_room(num_fresh, keep):
                raise self._out_of_blocks(num_fresh, kept=on_device)
        for slot in on_device:
            self._hold(slot)
            self.index.hits[slot] += 1
            self._write_if_hit_enough(slot)
        fresh = iter(self.device.allocate(num_fresh))
        lease = Lease(lookup, [], [], num_cached, partial)
        self.leases.add(lease)
        self._promoter.fill(lease, slots, fresh)
        lease.block_ids += fresh
        if partial:
            self._promoter.copy_partial(lease)
        assert lookup.decision is not None
        self._decided[lookup.decision.reason.value] += 1
        lease.is_probe = not lease.is_ready and lookup.decision.reason is LoadReason.PROBE
        return lease

    def give_up(self, lease: Lease) -> None:
        """The request waits no longer for the blocks on their way: release its lease and reserve
        again, and it gets what has arrived. The transfers go on, for others and for later."""
        self._check_open()
        self._promoter.give_up(lease)

    def prefer(self, lease: Lease, priority: int, ttl_s: float | None = None) -> None:
        """Give the lease's cached blocks a priority: lower ones are evicted first, 0 is ordinary.

        It ends after ``ttl_s`` seconds, or with the blocks' stay on the device.
        """
        self._check_open()
        for slot in lease.slots:
            self._evictor.policy.prefer(slot, priority, ttl_s)

    def pin(self, lookup: Lookup) -> Pin:
        """Keep the blocks of a prefix that memory holds now from being lost.

        They may be demoted to host memory, but the slowest memory tier does not evict them before
        the pin is released. In this process only: disk evicts by its own order. Raises
        ``CapacityError`` when pins would take more than half of that tier.
        """
        self._check_open()
        pins, pool = self._evictor.pins, self.host or self.device
        slots = self.index.match(lookup.keys, lookup.runs)
        num_pinned = len(pins.keys() | set(slots))
        if num_pinned > pool.capacity // 2:
            raise CapacityError(
                f"pins would hold {num_pinned} of {pool.capacity} blocks; at most half of a tier "
                f"may be pinned: raise {'host' if self.host else 'device'}_cache, or unpin"
            )
        for slot in slots:
            pins[slot] = pins.get(slot, 0) + 1
        return Pin(len(slots), lambda: self._unpin(slots))

    def prefetch(self, tokens: bytes, salt: str = "") -> None:
        """Bring what is cached of a prefix to the device, before somebody asks for it.

        Takes free and evictable blocks only; gives up quietly when there are too few.
        """
        whole = len(tokens) // 4
        lookup = self.lookup(tokens, salt, num_reusable=whole, peek=True)
        self._prefetches.append((lookup, None))

    def num_reusable_blocks(self, lookup: Lookup) -> int:
        """Blocks at the front of the prefix that ``reserve`` would find now."""
        return len(self._matcher.walk(lookup))

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Make the lease cover ``num_tokens`` positions. Raises ``OutOfBlocksError`` unchanged."""
        missing = self.layout.blocks_for(num_tokens) - len(lease.block_ids)
        if missing <= 0:
            return
        if not self._evictor.make_device_room(missing):
            raise self._out_of_blocks(missing)
        lease.block_ids += self.device.allocate(missing)

    def commit(self, lease: Lease, tokens: bytes | bytearray, num_computed: int) -> None:
        """Give keys to the blocks that are full now.

        ``tokens`` are the sequence's tokens from its start, of which the K and V of the first
        ``num_computed`` are in the lease's blocks. A block that somebody else computed meanwhile
        is merged: the lease uses the other copy, whose bytes differ at most by rounding.
        """
        index, block_bytes = self.index, 4 * self.layout.block_size
        keys = lease.lookup.keys
        for i in range(len(lease.slots), num_computed // self.layout.block_size):
            parent = index.key[lease.slots[-1]] if lease.slots else lease.lookup.seed
            run = bytes(tokens[i * block_bytes : (i + 1) * block_bytes])
            key = keys[i] if i < len(keys) else block_key(parent, run)
            if not self._commit_block(lease, i, BlockRef(key, parent, run, i)):
                break

    def release(self, lease: Lease) -> None:
        """Give the blocks back: those with a key stay cached, leaf first in line for eviction."""
        self.leases.remove(lease)
        self._promoter.leave(lease)
        self._give_back(lease.slots)
        for block_id in lease.block_ids[len(lease.slots) :]:
            self._promoter.free_private(block_id)
        self._touch_disk(lease.slots)
        lease.block_ids, lease.slots = [], []
        if lease.is_probe:
            lease.lookup.decision, lease.lookup.has_probed = None, True

    # ---- what runs beside requests -------------------------------------------------------------

    def poll(self, *, model_is_busy: bool = False) -> int:
        """Apply what transfers have finished and start what is due; returns how many finished.

        ``model_is_busy`` until the next call: what is not urgent leaves the processor to the model.
        """
        self._check_open()
        self._transfer.is_model_busy = model_is_busy
        num_removed = len(self._removed)
        count = self._transfer.poll()  # among it, whatever stored what has been removed since
        for removed in (self._removed.popleft() for _ in range(num_removed)):
            if removed.namespace == self.namespace:
                self.events.removed_key(TierName.DISK, removed.key, removed.salt)
        if self._prefetches:
            self._advance_prefetches()
        self._write_behind.pump()
        self._evictor.pump()
        self.events.flush()
        return count

    def has_events(self) -> bool:
        """Whether ``poll()`` would apply something. Any thread."""
        return self._transfer.has_completions()

    @property
    def num_pending(self) -> int:
        """Transfers under way."""
        return self._transfer.num_pending

    def next_deadline(self) -> float:
        """Clock time of the next cleaning; ``poll()`` then. Infinity for none."""
        return self._write_behind.next_deadline()

    def run_until_idle(self, timeout: float | None = None) -> bool:
        """Poll until no transfer is under way and none is due; False when time ran out."""
        return self._run_until(lambda: True, timeout)

    def urge(self) -> None:
        """Start writing every dirty block to disk; ``is_clean`` tells when that is done."""
        self._write_behind.urge_all()

    @property
    def is_clean(self) -> bool:
        """Disk, where there is one, holds every cached block."""
        return self._write_behind.is_idle

    def flush(self, timeout: float | None = None) -> bool:
        """Write every dirty block to disk; False when time ran out first."""
        self.urge()
        return self._run_until(lambda: self.is_clean, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush within ``timeout`` seconds, then end the threads and close the disk tier."""
        if self._closed:
            return
        if not self.flush(timeout):
            logger.warning("closed with unwritten blocks=%d", len(self.index.dirty))
        self._transfer.close()
        self._closed = True
        self.events.flush()
        if self._event_file is not None:
            self._event_file.close()

    def reset(self, tier: TierName | None = None, salt: str | None = None) -> int:
        """Drop memory copies that nobody uses, of one tier or of both, of one salt or of all.

        Returns how many blocks were skipped because they are in use. Dirty blocks are lost, not
        written: ``flush`` first where they should not be. Pinned blocks are in use. Disk is another
        matter: ``clear_disk``.
        """
        self._check_open()
        index, skipped = self.index, 0
        digest = None if salt is None else salt_digest(salt)
        for slot in list(index.used_slots()):
            if digest is not None and index.salt[slot] != digest:
                continue
            if index.transfers[slot] or index.refcount[slot] or slot in self._evictor.pins:
                skipped += 1
                continue
            on_host = index.host[slot] != NONE
            if tier in (None, TierName.DEVICE) and index.device[slot] != NONE:
                self._evictor.drop_device(slot)
            if tier in (None, TierName.HOST) and on_host:
                self._evictor.drop_host(slot)
        for each in (TierName.DEVICE, TierName.HOST):
            if not skipped and tier in (None, each):
                self.events.cleared(each, digest)
        return skipped

    def clear_disk(self, salt: str, done: Callable[[], None]) -> None:
        """Drop this namespace's and salt's blocks from disk; ``poll()`` calls ``done`` then."""
        self._check_open()
        if self._disk is None:
            done()
            return

        def end(outcome: int | KVStoreError) -> None:
            if isinstance(outcome, int):
                self.events.cleared(TierName.DISK, salt_digest(salt))
            done()

        self._transfer.clear(chain_seed(self.namespace, salt), end)

    @property
    def weighs_loads(self) -> bool:
        """Whether what to load is decided by what loads and steps are measured to cost."""
        has_slower_tier = self.host is not None or self._disk is not None
        return self.config.load_policy == "auto" and has_slower_tier

    def measure(self) -> None:
        """Measure what loads from tiers cost that were not measured yet. Does not wait."""
        self._check_open()
        if self.weighs_loads:
            self._self_measurement.start(self._disk, chain_seed(self.namespace))

    def residency(self, lookup: Lookup) -> dict[TierName, int]:
        """Blocks of a looked-up prefix by the fastest tier that held them."""
        return dict(Counter(lookup.sources))

    def check(self) -> list[str]:
        """Violated invariants, one sentence each; empty when all hold. O(blocks)."""
        return check(self)

    @property
    def policy(self) -> VictimPolicy:
        """The order in which unused device blocks are given up."""
        return self._evictor.policy

    def pinned_slots(self) -> set[int]:
        return set(self._evictor.pins)

    def abandoned_blocks(self) -> list[int]:
        """Device blocks that only a transfer owns: their lease has gone, or never was."""
        return [*self._promoter.abandoned, *self._self_measurement.block_ids]

    def host_ids_in_flight(self) -> list[int]:
        """Host blocks that a copy is filling, not visible yet."""
        return [*self._evictor.host_ids_in_flight, *self._self_measurement.host_ids]

    @property
    def is_closed(self) -> bool:
        return self._closed

    def stats(self) -> StoreStats:
        block_bytes, evicted = self.layout.block_bytes, self._evictor.evicted_blocks
        tiers = {}
        for name, pool in ((TierName.DEVICE, self.device), (TierName.HOST, self.host)):
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
                stored_blocks=self.events.stored_blocks[name],
                removed_blocks=self.events.removed_blocks[name],
            )
        tiers["disk"] = self._disk_stats()
        return StoreStats(
            tiers=tiers,
            looked_up_blocks=self._looked_up,
            promoted_blocks=dict(self._promoter.promoted_blocks),
            demoted_blocks=self._evictor.demoted_blocks,
            failed_loads=dict(self._promoter.failed_loads),
            merged_blocks=self._merged,
            dirty_blocks=len(self.index.dirty),
            oldest_dirty_age_s=self._write_behind.oldest_age_s(),
            written=self._write_behind.counters,
            pending_transfers=self._transfer.num_pending,
            load_decisions=dict(self._decided),
            block_bytes=block_bytes,
            promote_seconds={tier.value: h.stats() for tier, h in self._promoter.seconds.items()},
            queue_seconds={
                tier.value: h.stats() for tier, h in self._promoter.queue_seconds.items()
            },
            write_seconds=self._write_behind.seconds.stats(),
            written_bytes_last_day=self._write_behind.bytes_last_day.total(),
        )

    # ---- matching ------------------------------------------------------------------------------

    def _end_probe(self, lookup: Lookup, found: Probed | KVStoreError) -> None:
        if isinstance(found, KVStoreError):
            self._lose_disk(found)
        else:
            lookup.on_disk = {entry.key for entry in found.entries}
            lookup.below = found.below
        self._matcher.note_sources(lookup)
        self._count_hits(lookup)
        lookup.state = LookupState.READY

    def _count_hits(self, lookup: Lookup) -> None:
        if not lookup.is_counted:
            return
        missing = len(lookup.keys)
        self._looked_up += missing
        tiers = {TierName.DEVICE: self.device, TierName.HOST: self.host, TierName.DISK: self._disk}
        for tier, is_on in tiers.items():
            num_found = lookup.sources.count(tier)
            self._hits[tier] += num_found
            missing -= num_found
            if is_on:
                self._misses[tier] += missing
        self.events.matched(
            lookup.keys, lookup.sources, num_tokens=lookup.num_tokens, salt=lookup.salt
        )

    def _check_promotion_share(self, num_fresh: int) -> None:
        """Waiting requests hold at most half of the device, or one of them holds what it needs."""
        held = {block for lease in self._promoter.leases for block in lease.block_ids}
        if held and len(held) + num_fresh > self.device.capacity // 2:
            raise self._out_of_blocks(num_fresh)

    def _out_of_blocks(self, needed: int, kept: Sequence[int] = ()) -> OutOfBlocksError:
        unused = sum(self.index.refcount[slot] == 0 for slot in kept)
        return OutOfBlocksError(
            needed_blocks=needed,
            available_blocks=self._evictor.available_blocks - unused,
            capacity_blocks=self.device.capacity,
        )

    # ---- holding and filling -------------------------------------------------------------------

    def _hold(self, slot: int) -> None:
        index = self.index
        if index.refcount[slot] == 0 and slot in self._evictor.policy:
            self._evictor.policy.take(slot)
        index.refcount[slot] += 1

    def _give_back(self, slots: Sequence[int]) -> None:
        """End a use of each block, leaf first, so that the root is the most recently used."""
        index, policy = self.index, self._evictor.policy
        for slot in reversed(slots):
            self._num_uses += 1
            index.used_at[slot] = self._num_uses
            index.refcount[slot] -= 1
            index.host_lru.renew(slot)
            if index.refcount[slot] or index.loading[slot] == LOADING:
                continue
            if index.loading[slot] == FAILED:
                self._evictor.drop_device(slot)
            else:
                policy.add(slot)

    def _unpin(self, slots: Sequence[int]) -> None:
        pins = self._evictor.pins
        for slot in slots:
            pins[slot] -= 1
            if pins[slot] == 0:
                del pins[slot]

    def _advance_prefetches(self) -> None:
        going, self._prefetches = self._prefetches, []
        for lookup, lease in going:
            if lease is None and lookup.is_ready:
                with contextlib.suppress(OutOfBlocksError):
                    lease = self.reserve(lookup, 0)
                if lease is None:
                    continue
            if lease is not None and lease.is_ready:
                self.release(lease)
            else:
                self._prefetches.append((lookup, lease))

    def _commit_block(self, lease: Lease, position: int, ref: BlockRef) -> bool:
        """Give one full private block its key. False when it has to stay private for now."""
        index, block_id = self.index, lease.block_ids[position]
        slot = index.slots.get(ref.key, NONE)
        if slot == NONE:
            slot = index.add(ref, lease.lookup.salt)
        elif index.tokens[slot] != ref.tokens or index.loading[slot] != VALID:
            return False
        elif index.device[slot] != NONE:
            lease.block_ids[position] = index.device[slot]
            self.device.free(block_id)
            self._merged += 1
            block_id = index.device[slot]
        is_new = index.device[slot] == index.host[slot] == NONE
        if index.device[slot] == NONE:
            self.events.stored(TierName.DEVICE, slot)
        index.device[slot] = block_id
        self._hold(slot)
        lease.slots.append(slot)
        if is_new:
            # Computed although disk holds it: not worth writing again, unless it could not be read.
            lookup = lease.lookup
            if ref.key in lookup.on_disk and ref.key not in lookup.given_up:
                index.is_written[slot] = 1
            elif self.config.write_policy != "min_hits":
                self._become_dirty(slot)
        return True

    def _become_dirty(self, slot: int) -> None:
        if self._writes_disk():
            self._write_behind.add(slot)
            self.index.touched_s[slot] = self._clock()  # writing it is what tells disk

    def _write_if_hit_enough(self, slot: int) -> None:
        is_due = self.index.hits[slot] >= self.config.min_hits and not self.index.is_written[slot]
        if self.config.write_policy == "min_hits" and is_due:
            self._become_dirty(slot)

    # ---- disk ----------------------------------------------------------------------------------

    def _reads_disk(self) -> bool:
        return self._disk is not None and self.config.load_policy != "never"

    def _writes_disk(self) -> bool:
        return self._disk is not None and self.config.disk_mode == "rw"

    def _touch_disk(self, slots: Sequence[int]) -> None:
        """Tell disk of a use, leaf first, of blocks it was not told of lately."""
        if not slots or not self._writes_disk():
            return
        index, now = self.index, self._clock()
        stale_before = now - self.config.touch_interval_s
        stale = [
            slot
            for slot in reversed(slots)
            if index.touched_s[slot] < stale_before and index.is_written[slot]
        ]
        for slot in stale:
            index.touched_s[slot] = now
        if stale:
            self._transfer.touch([index.key[slot] for slot in stale])

    def _lose_disk(self, error: KVStoreError) -> None:
        """The disk tier broke: go on with memory alone, say so once."""
        if self._disk is None or self._disk_off:
            return
        logger.error("disk tier is off: %s", error)
        self._disk_off = str(error)
        self._disk = None
        self._write_behind.clear()
        self.events.cleared(TierName.DISK)

    def _disk_stats(self) -> TierStats:
        disk = self._disk.stats() if self._disk else None
        return TierStats(
            state=disk.state if disk else "off",
            reason=(disk.reason or "") if disk else self._disk_off or "disk_cache is not set",
            capacity_bytes=disk.capacity_bytes if disk else 0,
            used_bytes=disk.used_bytes if disk else 0,
            used_blocks=disk.blocks if disk else 0,
            hits=self._hits["disk"],
            evicted_blocks=disk.evictions if disk else 0,
            misses=self._misses["disk"],
            stored_blocks=self.events.stored_blocks["disk"],
            removed_blocks=self.events.removed_blocks["disk"],
        )

    # ---- waiting -------------------------------------------------------------------------------

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify_all()
        if self._on_event is not None:
            self._on_event()

    def _run_until(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self.poll()
            if self._transfer.num_pending == 0 and is_done():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            with self._wake:
                if not self._transfer.has_completions():
                    pause = self.next_deadline() - self._clock()
                    self._wake.wait(max(0.0, min(left, pause, 1.0)))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        assert threading.get_ident() == self._owner, "a store is used by the thread that made it"
