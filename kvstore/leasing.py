"""Leasing: device blocks for sequences, all a request needs or none, and what becomes of them.

A lease's first blocks have keys and are shared; those after them are private to its sequence until
they are full, or shared with the leases that were forked from it. What is given back stays cached
until its room is needed.
"""

from collections import Counter
from collections.abc import Sequence

from kvstore.block import BlockRef, TierName
from kvstore.costs.cost import LoadReason
from kvstore.errors import OutOfBlocksError
from kvstore.eviction import Evictor
from kvstore.hashing import block_key
from kvstore.index import FAILED, LOADING, NONE, VALID
from kvstore.lease import Lease, Lookup
from kvstore.matching import Matcher
from kvstore.memory import Memory
from kvstore.promotion import Promoter
from kvstore.tiers.base import BlockCopier
from kvstore.write_behind import WriteBehind


class Leasing:
    """Owner thread only.

    leases          that are held now
    sharers         leases that hold a block without a key together, by its id
    merged_blocks   computed twice, one copy kept
    decisions       leases by the reason why their prefix was loaded or computed
    """

    def __init__(
        self,
        memory: Memory,
        copier: BlockCopier,
        matcher: Matcher,
        evictor: Evictor,
        promoter: Promoter,
        write_behind: WriteBehind,
    ) -> None:
        self._index = memory.index
        self._device = memory.device
        self._copier = copier
        self._matcher = matcher
        self._evictor = evictor
        self._promoter = promoter
        self._write_behind = write_behind
        self._events = memory.events
        self._layout = memory.layout
        self._config = memory.config
        self._num_uses = 0
        self.leases: set[Lease] = set()
        self.sharers: dict[int, list[Lease]] = {}
        self.merged_blocks = 0
        self.decisions: Counter[str] = Counter()

    def reserve(self, lookup: Lookup, num_tokens: int, chunk_tokens: int | None) -> Lease:
        """See ``BlockStore.reserve``."""
        size, slots = self._layout.block_size, self._matcher.walk(lookup)
        num_cached = len(slots)
        partial = self._matcher.partial(lookup, num_cached)
        num_found = num_cached * size + (partial.num_tokens if partial else 0)
        if chunk_tokens is not None:
            num_tokens = min(num_tokens, num_found + chunk_tokens)
        num_blocks = max(self._layout.blocks_for(num_tokens), num_cached)
        if num_blocks == num_cached:
            partial = None
        in_memory = [slot for slot in slots if slot != NONE]
        on_device = [slot for slot in in_memory if self._index.device[slot] != NONE]
        num_fresh = num_blocks - len(on_device)
        keep, spared = set(in_memory), {partial.slot} if partial else set()
        if num_cached > len(on_device):
            self._check_promotion_share(num_fresh)
            # While it waits for room on the device, its blocks on host do not give way.
            self._note_use(in_memory)
        if not self._evictor.make_device_room(num_fresh, keep | spared):
            partial = None  # its room may be what is missing
            if not self._evictor.make_device_room(num_fresh, keep):
                raise self._out_of_blocks(num_fresh, kept=on_device)
        for slot in on_device:
            self._hold(slot)
            self._index.hits[slot] += 1
        fresh = iter(self._device.allocate(num_fresh))
        lease = Lease(lookup, [], [], num_cached, partial)
        self.leases.add(lease)
        self._promoter.fill(lease, slots, fresh)
        if self._config.write_policy == "min_hits":
            self._write_what_was_found(lease.slots)
        lease.block_ids += fresh
        if partial:
            self._promoter.copy_partial(lease)
        assert lookup.decision is not None
        self.decisions[lookup.decision.reason.value] += 1
        lease.is_probe = not lease.is_ready and lookup.decision.reason is LoadReason.PROBE
        return lease

    def extend(self, lease: Lease, num_tokens: int) -> None:
        """Make the lease cover ``num_tokens`` positions. Raises ``OutOfBlocksError`` unchanged."""
        missing = self._layout.blocks_for(num_tokens) - len(lease.block_ids)
        if missing <= 0:
            return
        if not self._evictor.make_device_room(missing):
            raise self._out_of_blocks(missing)
        lease.block_ids += self._device.allocate(missing)

    def fork(self, lease: Lease, num_tokens: int) -> Lease:
        """See ``BlockStore.fork``."""
        num_full, num_more = divmod(num_tokens, self._layout.block_size)
        if num_more and not self._evictor.make_device_room(1):
            raise self._out_of_blocks(1)
        slots, block_ids = lease.slots[:num_full], lease.block_ids[:num_full]
        lookup = Lookup([], [], b"", lease.lookup.seed, lease.lookup.salt, is_counted=False)
        lookup.sources = [TierName.DEVICE] * num_full
        fork = Lease(lookup, block_ids, slots, num_full)
        self.leases.add(fork)
        for slot in slots:
            self._hold(slot)
        for block_id in block_ids[len(slots) :]:
            self.sharers.setdefault(block_id, [lease]).append(fork)
        if num_more:
            copies = self._device.allocate(1)
            self._copier.copy_within([lease.block_ids[num_full]], copies)
            block_ids += copies
        return fork

    def commit(self, lease: Lease, tokens: bytes | bytearray, num_computed: int) -> None:
        """See ``BlockStore.commit``."""
        index, block_bytes = self._index, 4 * self._layout.block_size
        keys = lease.lookup.keys
        for i in range(len(lease.slots), num_computed // self._layout.block_size):
            parent = index.key[lease.slots[-1]] if lease.slots else lease.lookup.seed
            run = bytes(tokens[i * block_bytes : (i + 1) * block_bytes])
            key = keys[i] if i < len(keys) else block_key(parent, run)
            if not self._commit_block(lease, i, BlockRef(key, parent, run, i)):
                break

    def release(self, lease: Lease) -> None:
        """Give the blocks back: those with a key stay cached, leaf first in line for eviction."""
        self.leases.remove(lease)
        self._promoter.leave(lease)
        self._write_behind.touch(lease.slots)  # a block that was not readable goes with its user
        self._give_back(lease.slots)
        for block_id in lease.block_ids[len(lease.slots) :]:
            if not self._leave_to_others(lease, block_id):
                self._promoter.free_private(block_id)
        lease.block_ids, lease.slots = [], []
        if lease.is_probe:
            lease.lookup.decision, lease.lookup.has_probed = None, True

    def _leave_to_others(self, lease: Lease, block_id: int) -> bool:
        """Whether other leases hold this block without a key, too: it is theirs now."""
        sharers = self.sharers.get(block_id)
        if sharers is None:
            return False
        sharers.remove(lease)
        if len(sharers) == 1:
            del self.sharers[block_id]
        return True

    def _hold(self, slot: int) -> None:
        index = self._index
        if index.refcount[slot] == 0 and slot in self._evictor.policy:
            self._evictor.policy.take(slot)
        index.refcount[slot] += 1

    def _give_back(self, slots: Sequence[int]) -> None:
        """End a use of each block, leaf first."""
        index, policy = self._index, self._evictor.policy
        self._note_use(slots)
        for slot in reversed(slots):
            index.refcount[slot] -= 1
            if index.refcount[slot] or index.loading[slot] == LOADING:
                continue
            if index.loading[slot] == FAILED:
                self._evictor.drop_device(slot)
            else:
                policy.add(slot)

    def _note_use(self, slots: Sequence[int]) -> None:
        """Leaf first, so that the root is the most recently used."""
        index = self._index
        for slot in reversed(slots):
            self._num_uses += 1
            index.used_at[slot] = self._num_uses
            index.host_lru.renew(slot)

    def _commit_block(self, lease: Lease, position: int, ref: BlockRef) -> bool:
        """Give one full private block its key. False when it has to stay private for now.

        All leases that share the block get it with its key: their blocks before it are the same.
        """
        index, block_id = self._index, lease.block_ids[position]
        slot = index.slots.get(ref.key, NONE)
        if slot == NONE:
            slot = index.add(ref, lease.lookup.salt)
        elif index.tokens[slot] != ref.tokens or index.loading[slot] != VALID:
            return False
        elif index.device[slot] != NONE:
            self._device.free(block_id)
            self.merged_blocks += 1
        is_new = index.device[slot] == index.host[slot] == NONE
        if index.device[slot] == NONE:
            self._events.stored(TierName.DEVICE, slot)
            index.device[slot] = block_id
        for sharer in self.sharers.pop(block_id, (lease,)):
            assert len(sharer.slots) == position, "leases share a block and not those before it"
            sharer.block_ids[position] = index.device[slot]
            self._hold(slot)
            sharer.slots.append(slot)
        if is_new:
            # Computed although disk holds it: not written again, unless it could not be read.
            lookup = lease.lookup
            if ref.key in lookup.on_disk and ref.key not in lookup.given_up:
                index.is_written[slot] = 1
            elif self._config.write_policy != "min_hits":
                self._write_behind.add(slot)
        return True

    def _write_what_was_found(self, slots: Sequence[int]) -> None:
        """Write policy min_hits: disk gets what so many requests have found, in whatever tier."""
        index, least = self._index, self._config.min_hits
        for slot in slots:
            if index.hits[slot] >= least and not index.is_written[slot]:
                self._write_behind.add(slot)

    def _check_promotion_share(self, num_fresh: int) -> None:
        """Waiting requests hold at most half of the device, or one of them holds what it needs."""
        held = {block for lease in self._promoter.leases for block in lease.block_ids}
        if held and len(held) + num_fresh > self._device.capacity // 2:
            raise self._out_of_blocks(num_fresh)

    def _out_of_blocks(self, needed: int, kept: Sequence[int] = ()) -> OutOfBlocksError:
        unused = sum(self._index.refcount[slot] == 0 for slot in kept)
        return OutOfBlocksError(
            needed_blocks=needed,
            available_blocks=self._evictor.available_blocks - unused,
            capacity_blocks=self._device.capacity,
        )
