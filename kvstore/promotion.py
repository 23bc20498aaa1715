"""Promotion: blocks on their way to the device, each once, and who waits for them.

A transfer owns its destination until its job has ended, whatever those who waited for it do
meanwhile. A load that fails leaves a copy that nobody matches any more and that goes with its last
user.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.block import TierName
from kvstore.costs.cost import CostModel
from kvstore.errors import KVStoreError
from kvstore.eviction import Evictor
from kvstore.index import FAILED, LOADING, NONE, VALID
from kvstore.lease import Lease
from kvstore.memory import Memory
from kvstore.reports.histogram import Histogram
from kvstore.tiers.base import BlockCopier
from kvstore.transfer import TransferLoop

logger = logging.getLogger(__name__)

# A long load goes in parts: the first moves while the blocks of the others are gone through, and
# each but the last is applied while the next one moves. Each is twice as long as the one before:
# handing a part over costs a third of a millisecond, in which the copying thread may run dry.
_FIRST_PART_BYTES = 16 << 20

Outcome = list[KVStoreError | None] | KVStoreError | None


@dataclass(slots=True, eq=False)
class _Load:
    """What one lease loads from one tier; it has ended when all of its parts have."""

    tier: TierName
    num_blocks: int
    began_at: float
    part_blocks: int  # of the next part
    num_parts: int = 0  # under way
    errors: list[KVStoreError] = field(default_factory=list)


class Promoter:
    """Starts loads and applies their ends. Owner thread only.

    loading_from   source tier of each slot whose device copy is on its way
    leases         leases that wait for blocks
    abandoned      private blocks that a transfer still fills although their lease has gone
    """

    def __init__(
        self,
        memory: Memory,
        copier: BlockCopier,
        transfer: TransferLoop,
        evictor: Evictor,
        cost: CostModel,
    ) -> None:
        self._index = memory.index
        self._events = memory.events
        self._device = memory.device
        self._copier = copier
        self._transfer = transfer
        self._evictor = evictor
        self._cost = cost
        self._block_bytes = memory.layout.block_bytes
        self._first_part_blocks = max(1, _FIRST_PART_BYTES // memory.layout.block_bytes)
        self._clock = memory.clock
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
        known = [index.device[slot] for slot in slots if slot != NONE]
        loads = {
            TierName.HOST: self._begin(TierName.HOST, known.count(NONE)),
            TierName.DISK: self._begin(TierName.DISK, len(slots) - len(known)),
        }
        parts: dict[TierName, list[int]] = {tier: [] for tier in loads}
        for position, slot in enumerate(slots):
            tier = None
            if slot == NONE:
                slot, tier = index.add(lookup.ref(position), lookup.salt), TierName.DISK
                index.is_written[slot] = 1
            elif index.device[slot] == NONE:
                tier = TierName.HOST
            if tier is not None:
                self._expect(slot, tier, next(fresh))
                parts[tier].append(slot)
                if len(parts[tier]) == loads[tier].part_blocks:
                    self._move(loads[tier], parts[tier])
                    parts[tier] = []
                    loads[tier].part_blocks *= 2
            if index.loading[slot] == LOADING:
                self._waiting[slot].append(lease)
                lease.num_loading += 1
            lease.slots.append(slot)
            lease.block_ids.append(index.device[slot])
        for tier, rest in parts.items():
            if rest:
                self._move(loads[tier], rest)
        if lease.num_loading:
            self.leases.add(lease)

    def _begin(self, tier: TierName, num_blocks: int) -> _Load:
        if num_blocks:
            self._cost.begin_load(tier, num_blocks * self._block_bytes)
        return _Load(tier, num_blocks, self._clock(), self._first_part_blocks)

    def _move(self, load: _Load, slots: list[int]) -> None:
        """Submit a part of a load."""
        index, block_ids = self._index, [self._index.device[slot] for slot in slots]
        load.num_parts += 1

        def done(outcome: Outcome) -> None:
            self._end(slots, self._account(load, len(slots), outcome))

        if load.tier is TierName.HOST:
            self._transfer.promote([index.host[slot] for slot in slots], block_ids, done)
        else:
            self._transfer.read([index.ref(slot) for slot in slots], block_ids, done)

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
        load = self._begin(partial.tier, 1)
        load.num_parts = 1

        def done(outcome: Outcome) -> None:
            self._end_partial(lease, block_id, self._account(load, 1, outcome))

        if partial.tier is TierName.HOST:
            self._index.transfers[partial.slot] += 1
            self._transfer.promote([self._index.host[partial.slot]], [block_id], done)
        else:
            self._transfer.read([partial.ref], [block_id], done)

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

    def _expect(self, slot: int, tier: TierName, block_id: int) -> None:
        index = self._index
        index.device[slot] = block_id
        index.loading[slot] = LOADING
        index.transfers[slot] += 1
        index.refcount[slot] += 1
        index.hits[slot] += 1
        self._waiting[slot] = []
        self.loading_from[slot] = tier

    def _account(self, load: _Load, num_blocks: int, outcome: Outcome) -> list[KVStoreError | None]:
        """A part of a load has ended, with this outcome; with the last part the load is counted."""
        outcomes = outcome if isinstance(outcome, list) else [outcome] * num_blocks
        load.errors += [error for error in outcomes if error is not None]
        load.num_parts -= 1
        if load.num_parts == 0:
            num_good, ended_at = load.num_blocks - len(load.errors), self._transfer.finished_at
            queue_s = self._cost.end_load(
                load.tier,
                load.num_blocks * self._block_bytes,
                began_at=load.began_at,
                ended_at=ended_at,
                is_good=num_good > 0,
            )
            self.seconds[load.tier].observe(ended_at - load.began_at)
            self.queue_seconds[load.tier].observe(queue_s)
            self.promoted_blocks[load.tier] += num_good
            self.failed_loads.update(
                getattr(error, "reason", type(error).__name__) for error in load.errors
            )
            if load.errors:
                num_failed, why = len(load.errors), load.errors[0]
                logger.warning("loads failed src=%s blocks=%d: %s", load.tier, num_failed, why)
        return outcomes

    def _end(self, slots: list[int], outcomes: Sequence[KVStoreError | None]) -> None:
        index = self._index
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
