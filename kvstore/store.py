"""The block store: finds, loads, keeps and gives up KV blocks for one owner thread.

The life of a request's blocks::

    lookup    which blocks of the prefix are known, memory at once, disk by a probe
    reserve   all device blocks of prefix and first chunk, or none; promotions start
    extend    room for the tokens that are computed next
    fork      a second sequence goes on from here
    commit    full blocks get their key, become findable, and dirty
    release   the blocks stay cached until their room is needed

One thread owns a store: it calls the methods, and ``poll()`` now and then to apply what the
transfer side has finished. Nothing here waits except ``run_until_idle``, ``flush`` and ``close``.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set

from kvstore.backing import Backing
from kvstore.block import BlockLayout, TierName
from kvstore.check import check
from kvstore.config import StoreConfig
from kvstore.costs.cost import CostModel, LoadDecision
from kvstore.costs.self_measurement import SelfMeasurement
from kvstore.errors import KVStoreError, StoreClosedError
from kvstore.eviction import Evictor
from kvstore.finding import Finder
from kvstore.forgetting import Forgetting
from kvstore.index import BlockIndex
from kvstore.lease import Lease, Lookup, LookupState, OtherSalt, Pin
from kvstore.leasing import Leasing
from kvstore.matching import Matcher
from kvstore.memory import Memory
from kvstore.pinning import Pinning
from kvstore.policy import VictimPolicy
from kvstore.prefetch import Prefetcher
from kvstore.promotion import Promoter
from kvstore.reports.event_file import EventFile
from kvstore.reports.events import EventLog
from kvstore.reports.publication import Publisher
from kvstore.reports.reporting import Reporter
from kvstore.stats import StoreStats
from kvstore.tiers.base import BlockCopier, BlockPool, DiskTier
from kvstore.tiers.host import HostCopier, HostPool
from kvstore.transfer import TransferLoop
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
    transfer_loop what moves the blocks; a simulation puts one here that moves none

    ``memory`` is what the parts share, ``pinning`` knows what is held against being lost,
    ``events`` is where to subscribe to what happens to blocks; ``poll()`` hands it over.
    ``publisher`` lets other processes read how the store is doing.
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
        transfer_loop: Callable[..., TransferLoop] = TransferLoop,
    ) -> None:
        config = config or StoreConfig()
        index = BlockIndex()
        self.memory = memory = Memory(
            layout,
            namespace,
            config,
            index,
            device,
            HostPool(host_blocks, layout.block_bytes) if host_blocks else None,
            EventLog(index, namespace=namespace, block_size=layout.block_size),
            clock,
        )
        self.layout, self.namespace, self.config = layout, namespace, config
        self.index, self.device, self.host, self.events = index, device, memory.host, memory.events
        self.cost = cost or CostModel(config.load_policy, clock=clock)
        self._backing = backing = Backing(memory, disk, disk_off)
        self._clock = clock
        self._owner = threading.get_ident()
        self._closed = False
        if copier is None:
            assert isinstance(device, HostPool), "another device brings its own copier"
            copier = HostCopier(device)
        staging = None
        if disk is not None and not isinstance(device, HostPool):
            blocks = max(2, config.staging_bytes // layout.block_bytes)
            staging = HostPool(blocks, layout.block_bytes)
        self._event_file: EventFile | None = None
        if config.event_file is not None:  # held from here on: after what a setting may refuse
            self._event_file = EventFile(config.event_file)
            self.events.subscribe(self._event_file)
        self._transfer = transfer = transfer_loop(
            device,
            copier,
            host=self.host.rows if self.host else None,
            disk=disk,
            staging=staging,
            block_bytes=layout.block_bytes,
            write_bytes_per_s=config.write_bytes_per_s,
            on_completion=on_event,
            clock=clock,
        )
        self._write_behind = WriteBehind(memory, backing, transfer)
        self.pinning = Pinning(memory, backing, transfer, self._write_behind)
        self._evictor = Evictor(memory, transfer, self._write_behind, self.pinning.held)
        self._promoter = Promoter(memory, copier, transfer, self._evictor, self.cost)
        self._matcher = Matcher(memory, self.cost, self._promoter.loading_from)
        self._finder = Finder(memory, backing, self._matcher, transfer)
        self._leasing = Leasing(
            memory, copier, self._matcher, self._evictor, self._promoter, self._write_behind
        )
        self._prefetcher = Prefetcher(
            memory, backing, self._matcher, self._finder, self._leasing, transfer
        )
        self._forgetting = Forgetting(
            memory, backing, transfer, self._evictor, self.pinning, self._write_behind
        )
        self._self_measurement = SelfMeasurement(memory, backing, transfer, copier, self.cost)
        self._reporter = Reporter(
            memory,
            backing,
            copier,
            transfer,
            self._finder,
            self._evictor,
            self._promoter,
            self._leasing,
            self._write_behind,
            self.pinning,
        )
        self.publisher = Publisher(namespace, self.stats, transfer.publish, clock)

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
        return self._finder.begin(tokens, salt, num_reusable=num_reusable, is_counted=not peek)

    def stop_probing(self, lookup: Lookup) -> None:
        """The request waits no longer for disk's answer: what memory holds is what it has found."""
        self._check_open()
        self._finder.stop_probing(lookup)

    def reserve(self, lookup: Lookup, num_tokens: int, *, chunk_tokens: int | None = None) -> Lease:
        """Device blocks for the matched prefix and the tokens computed first, or none at all.

        Covers ``num_tokens`` positions, or the prefix and ``chunk_tokens`` more if that is less.
        Blocks found in slower tiers start moving to the device; the lease is ready when they have
        arrived. Raises ``OutOfBlocksError`` when there is no room now: no block is held or evicted
        then, and trying again after ``poll()`` may succeed.
        """
        self._check_open()
        assert lookup.state is LookupState.READY, "the probe has not ended"
        return self._leasing.reserve(lookup, num_tokens, chunk_tokens)

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

    def pin(self, lookup: Lookup, *, persist: bool = False, ttl_s: float | None = None) -> Pin:
        """Keep the blocks of a prefix from being lost, until the pin is released.

        Without ``persist``: those that memory holds now. They may be demoted to host memory, but
        the slowest memory tier does not evict them. In this process only, and in memory only: what
        disk has of them goes by its own order. Raises ``CapacityError`` when such pins would take
        more than half of that tier.

        With ``persist``, or with ``ttl_s``, the seconds after which it ends: the whole prefix, on
        disk, which no process evicts there then, also after a restart. Memory evicts the blocks as
        any other once disk holds them; until then the pin is not ``is_settled``, and they stay.
        Raises ``BlockMissingError`` when a part of the prefix is in no tier, ``ConfigError``
        without a disk tier that can be written. Whether it takes more than half of the disk is
        known later, and the pin's ``error`` then.
        """
        self._check_open()
        if not persist and ttl_s is None:
            return self.pinning.in_memory(lookup)
        return self.pinning.on_disk(lookup, ttl_s)

    def unpin(self, lookup: Lookup, done: Callable[[bool], None]) -> None:
        """Release the pin of a prefix on disk, whoever holds it.

        ``poll()`` calls ``done`` when that has happened, with whether there was one.
        """
        self._check_open()
        self.pinning.unpin(lookup, done)

    def prefetch(self, keys: Sequence[bytes], salt: str = "") -> None:
        """Bring the blocks of a sequence, root first, to the device before somebody asks for them.

        As many of them from the first on as are cached, of this model and salt. Takes free and
        evictable blocks only; gives up quietly when there are too few.
        """
        self._check_open()
        self._prefetcher.add_keys(keys, salt)

    def prefetch_tokens(self, tokens: bytes, salt: str = "") -> None:
        """As ``prefetch``, for the whole blocks of ``tokens``."""
        self._check_open()
        self._prefetcher.add_tokens(tokens, salt)

    def weigh(self, lookup: Lookup) -> LoadDecision | None:
        """What would be decided about loading what a ``peek`` has found; tries no tier for it."""
        return self._finder.weigh(lookup)

    def continuations(self, lookup: Lookup) -> list[tuple[bytes, bytes]]:
        """Key and tokens of blocks in memory that continue the known part of a prefix."""
        return self._finder.continuations(lookup)

    def under_other_salts(self, lookup: Lookup) -> list[OtherSalt]:
        """What memory holds of a prefix under salts that are not its own. O(blocks in memory)."""
        return self._finder.under_other_salts(lookup)

    def num_reusable_blocks(self, lookup: Lookup) -> int:
        """Blocks at the front of the prefix that ``reserve`` would find now."""
        return len(self._matcher.walk(lookup))

    def has_lost(self, lookup: Lookup) -> bool:
        """Whether blocks that the lookup found in memory have left it since: look up again, they
        may be on disk."""
        return self._matcher.has_lost(lookup)

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Make the lease cover ``num_tokens`` positions. Raises ``OutOfBlocksError`` unchanged."""
        self._check_open()
        self._leasing.extend(lease, num_tokens)

    def fork(self, lease: Lease, num_tokens: int) -> Lease:
        """A lease of its own on the first ``num_tokens`` positions of another, which are computed.

        Full blocks are shared; what lies in the block after them is copied, so that both sequences
        may go on. The lease must be ready, and either may end first. Raises ``OutOfBlocksError``
        unchanged.
        """
        self._check_open()
        assert lease.is_ready, "what is forked must be readable"
        assert not lease.failed_keys, "what is forked must be readable"
        return self._leasing.fork(lease, num_tokens)

    def commit(self, lease: Lease, tokens: bytes | bytearray, num_computed: int) -> None:
        """Give keys to the blocks that are full now.

        ``tokens`` are the sequence's tokens from its start, of which the K and V of the first
        ``num_computed`` are in the lease's blocks. A block that somebody else computed meanwhile
        is merged: the lease uses the other copy, whose bytes differ at most by rounding.
        """
        self._check_open()
        self._leasing.commit(lease, tokens, num_computed)

    def release(self, lease: Lease) -> None:
        """Give the blocks back: those with a key stay cached, leaf first in line for eviction."""
        self._check_open()
        self._leasing.release(lease)

    # ---- what runs beside requests -------------------------------------------------------------

    def poll(self, *, model_is_busy: bool = False) -> int:
        """Apply what transfers have finished and start what is due; returns how many finished.

        ``model_is_busy`` until the next call: what is not urgent leaves the processor to the model.
        """
        self._check_open()
        self._transfer.is_model_busy = model_is_busy
        removed = self._backing.take_removed()
        count = self._transfer.poll()
        self._backing.tell_removed(removed)
        self._prefetcher.pump()
        self.pinning.pump()
        self._write_behind.pump()
        self._evictor.pump()
        if self._backing.tier is not None:
            self.publisher.pump()
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

        def is_done() -> bool:
            self.urge()  # again: blocks that disk has been cleared of meanwhile are dirty anew
            return self.is_clean

        self.urge()
        return self._run_until(is_done, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush within ``timeout`` seconds, ``write_bytes_per_s`` or not, then end the threads and
        close the disk tier."""
        if self._closed:
            return
        self._transfer.hurry()
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
        return self._forgetting.reset(tier, salt)

    def forget(
        self,
        lookup: Lookup,
        beginning: bytes,
        done: Callable[[Mapping[TierName, int] | KVStoreError], None],
    ) -> None:
        """Drop a sequence's blocks from every tier, and those that continue it with tokens that
        begin so.

        What is in use or pinned, and what other sequences continue, stays, and so does all that
        leads to it. ``poll()`` calls ``done`` then, with the number of copies that went, by tier,
        or with the reason why disk could not be changed.
        """
        self._check_open()
        self._forgetting.forget(lookup, beginning, done)

    def clear_disk(self, salt: str, done: Callable[[int | KVStoreError], None]) -> None:
        """Drop this namespace's and salt's blocks from disk, except those that are pinned there.

        ``poll()`` calls ``done`` then, with how many stayed, or with the reason why disk could not
        be changed.
        """
        self._check_open()
        self._forgetting.clear_disk(salt, done)

    @property
    def weighs_loads(self) -> bool:
        """Whether what to load is decided by what loads and steps are measured to cost."""
        has_slower_tier = self.host is not None or self._backing.tier is not None
        return self.config.load_policy == "auto" and has_slower_tier

    def measure(self) -> None:
        """Measure what loads from tiers cost that were not measured yet. Does not wait."""
        self._check_open()
        if self.weighs_loads:
            self._self_measurement.start()

    @property
    def is_closed(self) -> bool:
        return self._closed

    # ---- looking at it ------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A frozen snapshot; reading it changes nothing."""
        return self._reporter.stats()

    def check(self) -> list[str]:
        """Violated invariants, one sentence each; empty when all hold. O(blocks)."""
        return check(self)

    @property
    def leases(self) -> Set[Lease]:
        """Leases that are held now."""
        return self._leasing.leases

    @property
    def sharers(self) -> Mapping[int, Sequence[Lease]]:
        """Leases that share a device block that has no key, by its id."""
        return self._leasing.sharers

    @property
    def policy(self) -> VictimPolicy:
        """The order in which unused device blocks are given up."""
        return self._evictor.policy

    def abandoned_blocks(self) -> list[int]:
        """Device blocks that only a transfer owns: their lease has gone, or never was."""
        return [*self._promoter.abandoned, *self._self_measurement.block_ids]

    def host_ids_in_flight(self) -> list[int]:
        """Host blocks that a copy is filling, not visible yet."""
        return [*self._evictor.host_ids_in_flight, *self._self_measurement.host_ids]

    # ---- the owner -----------------------------------------------------------------------------

    def _run_until(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            self.poll()
            if self._transfer.num_pending == 0 and is_done():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            pause = self.next_deadline() - self._clock()
            self._transfer.wait(max(0.0, min(left, pause, 1.0)))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")
        assert threading.get_ident() == self._owner, "a store is used by the thread that made it"
