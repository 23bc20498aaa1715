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

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.block import BlockLayout, BlockRef, TierName
from kvstore.check import check
from kvstore.config import StoreConfig
from kvstore.cost import CostModel, LoadReason
from kvstore.disk import DiskEntry
from kvstore.errors import KVStoreError, OutOfBlocksError, StoreClosedError
from kvstore.eviction import Evictor
from kvstore.hashing import block_key, chain_keys, chain_seed, salt_digest
from kvstore.index import NONE, BlockIndex
from kvstore.lease import Lease, Lookup, LookupState
from kvstore.stats import StoreStats, TierStats
from kvstore.tiers.base import BlockCopier, BlockPool, DiskTier
from kvstore.tiers.host import HostCopier, HostPool
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind

logger = logging.getLogger(__name__)

_VALID, _LOADING, _FAILED = 0, 1, 2  # states of a device copy, BlockIndex.loading


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
        self._disk = disk
        self._disk_off = disk_off
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
            on_broken=self._lose_disk,
        )
        self._evictor = Evictor(
            self.index, device, self.host, self._transfer, self._write_behind, self.config
        )
        self._waiting: dict[int, list[Lease]] = {}  # by slot whose device copy is loading
        self._loading_from: dict[int, TierName] = {}
        self.leases: set[Lease] = set()
        self._promoting: set[Lease] = set()
        self._num_uses = 0
        self._looked_up = 0
        self._merged = 0
        self._hits: Counter[str] = Counter()
        self._promoted: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
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
        block_bytes = 4 * self.layout.block_size
        tokens = tokens[: max(0, most) * 4]
        seed = chain_seed(self.namespace, salt)
        keys = chain_keys(seed, tokens, block_bytes)
        runs = [tokens[i * block_bytes : (i + 1) * block_bytes] for i in range(len(keys))]
        lookup = Lookup(keys, runs, seed, salt_digest(salt), is_counted=not peek)
        self._note_sources(lookup)
        if len(lookup.sources) < len(keys) and self._reads_disk():
            lookup.state = LookupState.PROBING
            start = len(lookup.sources)
            refs = [lookup.ref(i) for i in range(start, len(keys))]
            self._transfer.probe(refs, lambda found: self._end_probe(lookup, found))
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
        slots = self._walk(lookup)
        num_cached = len(slots)
        if chunk_tokens is not None:
            prefix_tokens = num_cached * self.layout.block_size
            num_tokens = min(num_tokens, prefix_tokens + chunk_tokens)
        num_blocks = max(self.layout.blocks_for(num_tokens), num_cached)
        on_device = [slot for slot in slots if slot != NONE and self.index.device[slot] != NONE]
        moving = num_cached - len(on_device)
        self._check_promotion_share(num_blocks, moving)
        num_fresh = num_blocks - len(on_device)
        if not self._evictor.make_device_room(num_fresh, keep=set(on_device)):
            raise self._out_of_blocks(num_fresh, kept=on_device)
        for slot in on_device:
            self._hold(slot)
        fresh = iter(self.device.allocate(num_fresh))
        lease = Lease(lookup, [], [], num_cached)
        self.leases.add(lease)
        self._fill(lease, slots, fresh)
        lease.block_ids += fresh
        assert lookup.decision is not None
        self._decided[lookup.decision.reason] += 1
        if lease.num_loading:
            self._promoting.add(lease)
            lease.is_probe = lookup.decision.reason is LoadReason.PROBE
        return lease

    def num_reusable_blocks(self, lookup: Lookup) -> int:
        """Blocks at the front of the prefix that ``reserve`` would find now."""
        return len(self._walk(lookup))

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
        self._promoting.discard(lease)
        self._give_back(lease.slots)
        for block_id in lease.block_ids[len(lease.slots) :]:
            self.device.free(block_id)
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
        count = self._transfer.poll()
        self._write_behind.pump()
        self._evictor.pump()
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

    def reset(self, tier: TierName | None = None, salt: str | None = None) -> int:
        """Drop memory copies that nobody uses, of one tier or of both, of one salt or of all.

        Returns how many blocks were skipped because they are in use. Dirty blocks are lost, not
        written: ``flush`` first where they should not be. Disk is another matter: ``clear_disk``.
        """
        self._check_open()
        index, skipped = self.index, 0
        digest = None if salt is None else salt_digest(salt)
        for slot in list(index.used_slots()):
            if digest is not None and index.salt[slot] != digest:
                continue
            if index.transfers[slot] or index.refcount[slot]:
                skipped += 1
                continue
            on_host = index.host[slot] != NONE
            if tier in (None, TierName.DEVICE) and index.device[slot] != NONE:
                self._evictor.drop_device(slot)
            if tier in (None, TierName.HOST) and on_host:
                self._evictor.drop_host(slot)
        return skipped

    def clear_disk(self, salt: str, done: Callable[[], None]) -> None:
        """Drop this namespace's and salt's blocks from disk; ``poll()`` calls ``done`` then."""
        self._check_open()
        if self._disk is None:
            done()
            return
        self._transfer.clear(chain_seed(self.namespace, salt), lambda outcome: done())

    def residency(self, lookup: Lookup) -> dict[TierName, int]:
        """Blocks of a looked-up prefix by the fastest tier that held them."""
        return dict(Counter(lookup.sources))

    def check(self) -> list[str]:
        """Violated invariants, one sentence each; empty when all hold. O(blocks)."""
        return check(self)

    def host_ids_in_flight(self) -> list[int]:
        """Host blocks that a copy is filling, not visible yet."""
        return list(self._evictor.host_ids_in_flight)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def stats(self) -> StoreStats:
        block_bytes, evicted = self.layout.block_bytes, self._evictor.evicted_blocks
        tiers = {}
        for name, pool in ((TierName.DEVICE, self.device), (TierName.HOST, self.host)):
            used = pool.capacity - pool.num_free if pool else 0
            pageable = self._copier.stats().reason if name is TierName.HOST else ""
            tiers[name.value] = TierStats(
                state=("degraded" if pageable else "ok") if pool else "off",
                reason=pageable if pool else f"{name}_cache is 0",
                capacity_bytes=pool.capacity * block_bytes if pool else 0,
                used_bytes=used * block_bytes,
                used_blocks=used,
                hits=self._hits[name],
                evicted_blocks=evicted[name],
            )
        tiers["disk"] = self._disk_stats()
        return StoreStats(
            tiers=tiers,
            looked_up_blocks=self._looked_up,
            promoted_blocks=dict(self._promoted),
            demoted_blocks=self._evictor.demoted_blocks,
            failed_loads=dict(self._failed),
            merged_blocks=self._merged,
            dirty_blocks=len(self.index.dirty),
            oldest_dirty_age_s=self._write_behind.oldest_age_s(),
            written=self._write_behind.counters,
            pending_transfers=self._transfer.num_pending,
            load_decisions=dict(self._decided),
        )

    # ---- matching ------------------------------------------------------------------------------

    def _source(self, lookup: Lookup, position: int) -> TierName | None:
        """The fastest tier that holds a block now, as far as this lookup knows."""
        key = lookup.keys[position]
        slot = self.index.slots.get(key, NONE)
        if slot != NONE and self.index.tokens[slot] == lookup.runs[position]:
            if self.index.device[slot] != NONE and self.index.loading[slot] != _FAILED:
                return self._loading_from.get(slot, TierName.DEVICE)
            if self.index.host[slot] != NONE:
                return TierName.HOST
        return TierName.DISK if key in lookup.on_disk else None

    def _note_sources(self, lookup: Lookup) -> None:
        for position in range(len(lookup.sources), len(lookup.keys)):
            source = self._source(lookup, position)
            if source is None:
                break
            lookup.sources.append(source)

    def _end_probe(self, lookup: Lookup, found: list[DiskEntry] | KVStoreError) -> None:
        if isinstance(found, KVStoreError):
            self._lose_disk(found)
        else:
            lookup.on_disk = {entry.key for entry in found}
        self._note_sources(lookup)
        self._count_hits(lookup)
        lookup.state = LookupState.READY

    def _count_hits(self, lookup: Lookup) -> None:
        if lookup.is_counted:
            self._looked_up += len(lookup.keys)
            self._hits.update(source.value for source in lookup.sources)

    def _walk(self, lookup: Lookup) -> list[int]:
        """Slots of the blocks that can be reused now, NONE for one that only disk holds."""
        self._note_sources(lookup)
        index, slots, cut = self.index, [], self._cut(lookup)
        for position, key in enumerate(lookup.keys):
            slot = index.slots.get(key, NONE)
            if slot != NONE and index.tokens[slot] != lookup.runs[position]:
                break
            if slot != NONE and index.device[slot] != NONE:
                if index.loading[slot] == _FAILED or (
                    index.loading[slot] == _LOADING and (position >= cut or key in lookup.given_up)
                ):
                    break
            elif (
                position >= cut
                or key in lookup.given_up
                or (slot == NONE and key not in lookup.on_disk)
            ):
                break
            slots.append(slot)
        return slots

    def _cut(self, lookup: Lookup) -> int:
        """Blocks at the front that may be loaded; after them only what the device holds is used.

        Decided once for a lookup, and again when more is found or a probe has ended.
        """
        num_blocks = len(lookup.sources)
        if lookup.decision is None or lookup.decision.num_blocks < num_blocks:
            sources, queued = lookup.sources, {}
            if sources.count(TierName.DEVICE) < num_blocks:
                now = (self._source(lookup, position) for position in range(num_blocks))
                sources = [source or TierName.DISK for source in now]
                slots = (self.index.slots.get(key, NONE) for key in lookup.keys[:num_blocks])
                ours = Counter(self._loading_from.get(slot) for slot in slots)
                queued = {
                    tier: self.cost.queued_bytes(tier) - ours[tier] * self.layout.block_bytes
                    for tier in (TierName.HOST, TierName.DISK)
                }
            lookup.decision = self.cost.choose(
                sources,
                block_tokens=self.layout.block_size,
                block_bytes=self.layout.block_bytes,
                queued_bytes=queued,
                may_probe=not lookup.has_probed,
            )
        return lookup.decision.cut_blocks

    def _check_promotion_share(self, num_blocks: int, moving: int) -> None:
        """Waiting requests hold at most half of the device, or one of them holds what it needs."""
        held = sum(len(lease.block_ids) for lease in self._promoting)
        if moving and held and held + num_blocks > self.device.capacity // 2:
            raise self._out_of_blocks(num_blocks)

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
        if index.refcount[slot] == 0:
            index.device_lru.discard(slot)
        index.refcount[slot] += 1
        index.hits[slot] += 1

    def _give_back(self, slots: Sequence[int]) -> None:
        """End a use of each block, leaf first, so that the root is the most recently used."""
        index = self.index
        for slot in reversed(slots):
            self._num_uses += 1
            index.used_at[slot] = self._num_uses
            index.refcount[slot] -= 1
            index.host_lru.renew(slot)
            if index.refcount[slot] or index.loading[slot] == _LOADING:
                continue
            if index.loading[slot] == _FAILED:
                self._evictor.drop_device(slot)
            else:
                index.device_lru.append(slot)

    def _fill(self, lease: Lease, slots: list[int], fresh: Iterator[int]) -> None:
        """Put the prefix into the lease and start the transfers it needs."""
        index, lookup = self.index, lease.lookup
        from_host: list[int] = []
        from_disk: list[int] = []
        for position, slot in enumerate(slots):
            if slot == NONE:
                slot = index.add(lookup.ref(position), lookup.salt)
                from_disk.append(slot)
            elif index.device[slot] == NONE:
                from_host.append(slot)
            if index.device[slot] == NONE:
                index.device[slot] = next(fresh)
                index.loading[slot] = _LOADING
                index.transfers[slot] += 1
                index.refcount[slot] += 1
                index.hits[slot] += 1
                self._waiting[slot] = []
                self._loading_from[slot] = (
                    TierName.DISK if index.host[slot] == NONE else TierName.HOST
                )
            if index.loading[slot] == _LOADING:
                self._waiting[slot].append(lease)
                lease.num_loading += 1
            lease.slots.append(slot)
            lease.block_ids.append(index.device[slot])
        if from_host:
            self._transfer.promote(
                [index.host[slot] for slot in from_host],
                [index.device[slot] for slot in from_host],
                self._begin_load(TierName.HOST, from_host),
            )
        if from_disk:
            self._transfer.read(
                [index.ref(slot) for slot in from_disk],
                [index.device[slot] for slot in from_disk],
                self._begin_load(TierName.DISK, from_disk),
            )

    def _begin_load(
        self, tier: TierName, slots: list[int]
    ) -> Callable[[list[KVStoreError | None] | KVStoreError | None], None]:
        """Count a load as under way; the result is to be called with its outcome."""
        num_bytes, began_at = len(slots) * self.layout.block_bytes, self._clock()
        self.cost.begin_load(tier, num_bytes)

        def done(outcome: list[KVStoreError | None] | KVStoreError | None) -> None:
            outcomes = outcome if isinstance(outcome, list) else [outcome] * len(slots)
            self.cost.end_load(
                tier,
                num_bytes,
                began_at=began_at,
                ended_at=self._transfer.finished_at,
                is_good=None in outcomes,
            )
            self._end_load(slots, outcomes)

        return done

    def _end_load(self, slots: list[int], outcomes: Sequence[KVStoreError | None]) -> None:
        index = self.index
        for slot, outcome in zip(slots, outcomes, strict=True):
            index.transfers[slot] -= 1
            index.loading[slot] = _VALID if outcome is None else _FAILED
            source = self._loading_from.pop(slot)
            if outcome is None:
                self._promoted[source] += 1
            else:
                self._failed[getattr(outcome, "reason", type(outcome).__name__)] += 1
                logger.warning(
                    "load failed src=%s key=%s: %s", source, index.key[slot].hex()[:16], outcome
                )
            for lease in self._waiting.pop(slot):
                lease.num_loading -= 1
                if outcome is not None:
                    lease.failed_keys.append(index.key[slot])
                    lease.lookup.given_up.add(index.key[slot])
                if lease.is_ready:
                    self._promoting.discard(lease)
            if index.refcount[slot] == 0:  # everybody gave up meanwhile
                if outcome is None:
                    index.device_lru.append(slot)
                else:
                    self._evictor.drop_device(slot)

    def _commit_block(self, lease: Lease, position: int, ref: BlockRef) -> bool:
        """Give one full private block its key. False when it has to stay private for now."""
        index, block_id = self.index, lease.block_ids[position]
        slot = index.slots.get(ref.key, NONE)
        if slot == NONE:
            slot = index.add(ref, lease.lookup.salt)
        elif index.tokens[slot] != ref.tokens or index.loading[slot] != _VALID:
            return False
        elif index.device[slot] != NONE:
            lease.block_ids[position] = index.device[slot]
            self.device.free(block_id)
            self._merged += 1
            block_id = index.device[slot]
        is_new = index.device[slot] == index.host[slot] == NONE
        index.device[slot] = block_id
        self._hold(slot)
        lease.slots.append(slot)
        if is_new and self._writes_disk():
            self._write_behind.add(slot)
            index.touched_s[slot] = self._clock()  # writing it is what tells disk
        return True

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
            if index.touched_s[slot] < stale_before and slot not in index.dirty
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

    def _disk_stats(self) -> TierStats:
        if self._disk is None:
            reason = self._disk_off or "disk_cache is not set"
            return TierStats("off", reason, 0, 0, 0, self._hits["disk"], 0)
        disk = self._disk.stats()
        return TierStats(
            state=disk.state,
            reason=disk.reason or "",
            capacity_bytes=disk.capacity_bytes,
            used_bytes=disk.used_bytes,
            used_blocks=disk.blocks,
            hits=self._hits["disk"],
            evicted_blocks=disk.evictions,
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
