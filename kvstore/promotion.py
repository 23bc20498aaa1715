"""Promotion: blocks on their way to the device, each once, and who waits for them.

A transfer owns its destination until its job has ended, whatever those who waited for it do
meanwhile. A load that fails leaves a copy that nobody matches any more and that goes with its last
user.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.block import BlockLayout, TierName
from kvstore.cost import CostModel
from kvstore.errors import KVStoreError
from kvstore.events import EventLog
from kvstore.eviction import Evictor
from kvstore.histogram import Histogram
from kvstore.index import FAILED, LOADING, NONE, VALID, BlockIndex
from kvstore.lease import Lease
from kvstore.tiers.base import BlockCopier, BlockPool
from kvstore.transfer import TransferLoop

logger = logging.getLogger(__name__)

Outcome = list[KVStoreError | None] | KVStoreError | None


class Promoter:
    """Starts loads and applies their ends. Owner thread only.

    loading_from   source tier of each slot whose device copy is on its way
    leases         leases that wait for blocks
    abandoned      private blocks that a transfer still fills although their lease has gone
    """

    def __init__(
        self,
        index: BlockIndex,
        device: BlockPool,
        copier: BlockCopier,
        transfer: TransferLoop,
        evictor: Evictor,
        cost: CostModel,
        layout: BlockLayout,
        clock: Callable[[], float],
        events: EventLog,
    ) -> None:
        self._index = index
        self._events = events
        self._device = device
        self._copier = copier
        self._transfer = transfer
        self._evictor = evictor
        self._cost = cost
        self._block_bytes = layout.block_bytes
        self._clock = clock
        self._waiting: dict[int, list[Lease]] = {}  # by slot
        self._filling: dict[int, Lease] = {}  # by private block
        self.loading_from: dict[int, TierName] = {}
        self.leases: set[Lease] = set()
        self.abandoned: set[int] = set()
        self.promoted_blocks: Counter[str] = Counter()
        self.failed_loads: Counter[str] = Counter()
        self.seconds = {tier: Histogram() for tier in (TierName.HOST, TierName.DISK)}
        self.queue_seconds = {tier: Histogram() for tier in (TierName.HOST, TierName.DISK)}

    def fill(self, lease: Lease, slots: Sequence[int], fresh: Iterator[int]) -> None:
        """Put the prefix into the lease, and start moving what is not on the device.

        ``slots`` as ``Matcher.walk`` found them; those on the device are held already.
        """
        index, lookup = self._index, lease.lookup
        from_host: list[int] = []
        from_disk: list[int] = []
        for position, slot in enumerate(slots):
            if slot == NONE:
                slot = index.add(lookup.ref(position), lookup.salt)
                index.is_written[slot] = 1
                from_disk.append(slot)
            elif index.device[slot] == NONE:
                from_host.append(slot)
            if index.device[slot] == NONE:
                self._expect(slot, next(fresh))
            if index.loading[slot] == LOADING:
                self._waiting[slot].append(lease)
                lease.num_loading += 1
            lease.slots.append(slot)
            lease.block_ids.append(index.device[slot])
        if from_host:
            self._transfer.promote(
                [index.host[slot] for slot in from_host],
                [index.device[slot] for slot in from_host],
                self._begin(TierName.HOST, len(from_host), lambda o: self._end(from_host, o)),
            )
        if from_disk:
            self._transfer.read(
                [index.ref(slot) for slot in from_disk],
                [index.device[slot] for slot in from_disk],
                self._begin(TierName.DISK, len(from_disk), lambda o: self._end(from_disk, o)),
            )
        if lease.num_loading:
            self.leases.add(lease)

    def copy_partial(self, lease: Lease) -> None:
        """Copy the block of a partial match into the lease's first private block.

        The whole block, as one run: positions after the match are written before they are read.
        """
        partial, block_id = lease.partial, lease.block_ids[lease.num_cached]
        assert partial is not None
        if partial.tier is TierName.DEVICE:
            self._copier.copy_within([self._index.device[partial.slot]], [block_id])
            return
        lease.num_loading += 1
        self._filling[block_id] = lease
        self.leases.add(lease)
        if partial.tier is TierName.HOST:
            self._index.transfers[partial.slot] += 1
            self._transfer.promote(
                [self._index.host[partial.slot]],
                [block_id],
                self._begin(partial.tier, 1, lambda o: self._end_partial(lease, block_id, o)),
            )
        else:
            self._transfer.read(
                [partial.ref],
                [block_id],
                self._begin(partial.tier, 1, lambda o: self._end_partial(lease, block_id, o)),
            )

    def give_up(self, lease: Lease) -> None:
        """The lease's request does not wait any longer: it never tries these blocks again."""
        index, given_up = self._index, lease.lookup.given_up
        given_up.update(index.key[slot] for slot in lease.slots if index.loading[slot] == LOADING)
        if lease.partial is not None:
            given_up.add(lease.partial.ref.key)

    def leave(self, lease: Lease) -> None:
        """The lease ends; transfers it waited for go on."""
        self.leases.discard(lease)
        if lease.num_loading == 0:
            return
        for slot in lease.slots:
            if self._index.loading[slot] == LOADING:
                self._waiting[slot].remove(lease)

    def free_private(self, block_id: int) -> None:
        """Free a lease's private block, at once or when the transfer that fills it has ended."""
        if block_id in self._filling:
            self.abandoned.add(block_id)
        else:
            self._device.free(block_id)

    def _expect(self, slot: int, block_id: int) -> None:
        index = self._index
        index.device[slot] = block_id
        index.loading[slot] = LOADING
        index.transfers[slot] += 1
        index.refcount[slot] += 1
        index.hits[slot] += 1
        self._waiting[slot] = []
        self.loading_from[slot] = TierName.DISK if index.host[slot] == NONE else TierName.HOST

    def _begin(
        self, tier: TierName, num_blocks: int, end: Callable[[list[KVStoreError | None]], None]
    ) -> Callable[[Outcome], None]:
        """Count a load as under way; the result is to be called with its outcome."""
        num_bytes, began_at = num_blocks * self._block_bytes, self._clock()
        self._cost.begin_load(tier, num_bytes)

        def done(outcome: Outcome) -> None:
            outcomes = outcome if isinstance(outcome, list) else [outcome] * num_blocks
            ended_at = self._transfer.finished_at
            queue_s = self._cost.end_load(
                tier, num_bytes, began_at=began_at, ended_at=ended_at, is_good=None in outcomes
            )
            self.seconds[tier].observe(ended_at - began_at)
            self.queue_seconds[tier].observe(queue_s)
            end(outcomes)

        return done

    def _end(self, slots: list[int], outcomes: Sequence[KVStoreError | None]) -> None:
        index = self._index
        self._count(self.loading_from[slots[0]], outcomes)
        for slot, error in zip(slots, outcomes, strict=True):
            index.transfers[slot] -= 1
            index.loading[slot] = VALID if error is None else FAILED
            del self.loading_from[slot]
            if error is None:
                self._events.stored(TierName.DEVICE, slot)
            for lease in self._waiting.pop(slot):
                self._arrive(lease, index.key[slot], error)
            if index.refcount[slot] == 0:  # everybody gave up meanwhile
                if error is None:
                    self._evictor.policy.add(slot)
                else:
                    self._evictor.drop_device(slot)

    def _end_partial(
        self, lease: Lease, block_id: int, outcomes: Sequence[KVStoreError | None]
    ) -> None:
        partial, (error,) = lease.partial, outcomes
        assert partial is not None
        del self._filling[block_id]
        if partial.slot != NONE:
            self._index.transfers[partial.slot] -= 1
        self._count(partial.tier, outcomes)
        if block_id in self.abandoned:
            self.abandoned.remove(block_id)
            self._device.free(block_id)
        else:
            self._arrive(lease, partial.ref.key, error)

    def _arrive(self, lease: Lease, key: bytes, error: KVStoreError | None) -> None:
        lease.num_loading -= 1
        if error is not None:
            lease.failed_keys.append(key)
            lease.lookup.given_up.add(key)
        if lease.is_ready:
            self.leases.discard(lease)

    def _count(self, source: TierName, outcomes: Sequence[KVStoreError | None]) -> None:
        """Count a job's blocks, all from one tier; failures are one line in the log."""
        errors = [error for error in outcomes if error is not None]
        self.promoted_blocks[source] += len(outcomes) - len(errors)
        self.failed_loads.update(getattr(error, "reason", type(error).__name__) for error in errors)
        if errors:
            logger.warning("loads failed src=%s blocks=%d: %s", source, len(errors), errors[0])
