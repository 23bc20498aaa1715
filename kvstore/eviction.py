"""Making room: who is evicted from device and host memory, and what must happen before.

    device victim   copied to host first when there is a host tier that does not hold it;
                    without a host tier, written to disk first when dirty
    host victim     dropped when clean, written to disk first when dirty

Who is a victim is the policy's to say, but a prefix is always given up from its end, and what no
lookup can reach any more, since an ancestor is in no tier, goes before all others. A block that is
held (``pinning``) never leaves the slowest memory tier.
"""

import logging
from collections.abc import Collection, Mapping, Set
from itertools import chain, islice

from kvstore.block import TierName
from kvstore.errors import KVStoreError
from kvstore.index import FAILED, NONE, VALID
from kvstore.memory import Memory
from kvstore.policy import POLICIES, Prioritised
from kvstore.transfer import TransferLoop
from kvstore.write_behind import WriteBehind

logger = logging.getLogger(__name__)

_AHEAD_BLOCKS = 64  # copied to host together before their room is needed


class Evictor:
    """Takes blocks out of the memory tiers. Owner thread only."""

    def __init__(
        self,
        memory: Memory,
        transfer: TransferLoop,
        write_behind: WriteBehind,
        held: Mapping[int, int],
    ) -> None:
        self._index = memory.index
        self._events = memory.events
        make_policy, capacity = POLICIES[memory.config.policy], memory.device.capacity
        self.policy = Prioritised(lambda: make_policy(memory.index, capacity), memory.clock)
        self._held = held
        self._device = memory.device
        self._host = memory.host
        self._transfer = transfer
        self._write_behind = write_behind
        self._config = memory.config
        self.evicted_blocks = {"device": 0, "host": 0}
        self.demoted_blocks = 0  # copied to host
        self.host_ids_in_flight: set[int] = set()  # being filled, not visible yet
        self.host_failure = ""  # why host takes no victims any more

    @property
    def available_blocks(self) -> int:
        """Device blocks that are free, or can be once copies under way have ended."""
        num_staying = 0
        if not self._may_demote:
            on_host = self._index.host
            num_staying = sum(slot in self.policy and on_host[slot] == NONE for slot in self._held)
        return self._device.num_free + len(self.policy) - num_staying

    @property
    def _may_demote(self) -> bool:
        """Whether host takes victims."""
        return self._host is not None and not self.host_failure

    def make_device_room(self, count: int, keep: Set[int] = frozenset()) -> bool:
        """Whether ``count`` device blocks are free now, evicting victims if that makes them so.

        Slots in ``keep`` are no victims, nor do they give way to victims on host. When too few can
        be made free, nothing is evicted: copies that make victims evictable are started, and the
        caller tries again when they have ended.
        """
        missing = count - self._device.num_free
        if missing <= 0:
            return True
        moving, held = self._index.transfers, self._held
        lost = {slot: None for slot in self.unreachable() if not moving[slot] and slot not in held}
        victims = self._choose(missing, keep, lost)
        if len(victims) < missing:
            return False
        unready = [slot for slot in victims if not (slot in lost or self._is_on_host(slot))]
        passing = {slot for slot in self._demote(unready, keep) if slot not in held}
        unready = [slot for slot in unready if slot not in passing or not self._may_go(slot)]
        self._write_behind.urge(slot for slot in unready if slot in passing)
        if unready:
            return False
        for slot in victims:
            self.drop_device(slot)
            self.evicted_blocks["device"] += 1
        return True

    def pump(self) -> None:
        """Copy the next victims to host ahead of need once the device is nearly full."""
        if self._host is None:
            return
        reserve = int((1 - self._config.high_watermark) * self._device.capacity)
        wanted = min(reserve - self._device.num_free, _AHEAD_BLOCKS)
        if wanted > 0:
            victims, lost = islice(self.policy.victims(), wanted), set(self.unreachable())
            self._demote([slot for slot in victims if not (slot in lost or self._is_on_host(slot))])

    def unreachable(self) -> list[int]:
        """Blocks that no lookup finds: an ancestor is in no tier. Each before what it continues."""
        may_have_parent = self._write_behind.may_have_parent
        roots = [slot for slot in self._index.cut_off if not may_have_parent(slot)]
        return list(self._index.subtrees(roots))[::-1]

    def drop_device(self, slot: int) -> None:
        """Give up the device copy of a block that nobody uses.

        Transfers that go on beside a copy that failed are from the block's host copy.
        """
        index = self._index
        assert index.refcount[slot] == 0, "a victim is in use"
        assert index.transfers[slot] == 0 or index.loading[slot] == FAILED, "a victim is moving"
        if slot in self.policy:
            self.policy.drop(slot)
        else:  # a copy that failed: its priority is not the slot's next block's
            self.policy.forget(slot)
        if index.loading[slot] == VALID:
            self._events.removed(TierName.DEVICE, slot)
        self._device.free(index.device[slot])
        index.device[slot] = NONE
        index.loading[slot] = VALID
        if index.host[slot] == NONE:
            index.drop(slot)

    def drop_host(self, slot: int) -> None:
        index = self._index
        assert self._host is not None
        assert index.transfers[slot] == 0, "a copy from or to the host block is under way"
        self._events.removed(TierName.HOST, slot)
        index.host_lru.remove(slot)
        self._host.free(index.host[slot])
        index.host[slot] = NONE
        if index.device[slot] == NONE:
            index.drop(slot)

    def _choose(self, count: int, keep: Set[int], lost: Collection[int]) -> list[int]:
        """Victims in the policy's order after those that are ``lost``, but no block before its
        children on the device."""
        index, chosen, passed_over = self._index, dict[int, None](), list[int]()
        may_demote = self._may_demote
        first = (slot for slot in lost if slot in self.policy)
        for slot in chain(first, self.policy.victims()):
            if len(chosen) == count:
                break
            if slot in chosen:
                continue
            is_last_copy = not may_demote and index.host[slot] == NONE
            if slot in keep or (slot in self._held and is_last_copy):
                continue
            has_child = any(
                index.device[child] != NONE and child not in chosen
                for child in index.children(index.key[slot])
            )
            if has_child:
                passed_over.append(slot)
            else:
                chosen[slot] = None
        # Their children have been chosen since, or are held by a transfer that nobody waits for.
        chosen.update(dict.fromkeys(passed_over[::-1][: count - len(chosen)]))
        return list(chosen)

    def _is_on_host(self, slot: int) -> bool:
        return self._index.host[slot] != NONE and not self._index.transfers[slot]

    def _may_go(self, slot: int) -> bool:
        return not (self._index.transfers[slot] or self._write_behind.needs_writing(slot))

    def _demote(self, victims: list[int], keep: Set[int] = frozenset()) -> list[int]:
        """Start copying victims, oldest first, to host. Returns those that pass the host tier by.

        A victim displaces only blocks used longer ago than itself. So one that is older than all of
        the host tier, or has none, passes it by, and victims never push each other out in turn. A
        held one displaces any block that is not held. None displaces what is in ``keep``.
        """
        if self._host is None or self.host_failure:
            return victims
        index, room = self._index, self._host.num_free
        lost = dict.fromkeys(slot for slot in self.unreachable() if index.host[slot] != NONE)
        oldest_on_host = (
            slot
            for slot in chain(lost, (slot for slot in index.host_lru if slot not in lost))
            if not (index.transfers[slot] or slot in self._held or slot in keep)
        )
        staying, displaced, passing = [], [], []
        held_last = sorted(victims, key=self._held.__contains__)
        for victim in reversed(held_last):
            if index.transfers[victim]:
                continue
            if room:
                room -= 1
                staying.append(victim)
                continue
            oldest = next(oldest_on_host, NONE)
            may_go = oldest in lost or victim in self._held
            if oldest == NONE or not (may_go or index.used_at[oldest] < index.used_at[victim]):
                passing.append(victim)
            elif self._write_behind.needs_writing(oldest):
                self._write_behind.urge((oldest,))
            else:
                displaced.append(oldest)
                staying.append(victim)
        for slot in displaced:
            self.drop_host(slot)
            self.evicted_blocks["host"] += 1
        if staying:
            self._copy_to_host(staying)
        return passing

    def _stop_demoting(self, error: KVStoreError) -> None:
        """A copy to host failed. The next would, too, and its victim be tried for ever."""
        if not self.host_failure:
            self.host_failure = f"copies to host memory fail: {error}"
            logger.error("host tier takes no blocks any more: %s", error)

    def _copy_to_host(self, slots: list[int]) -> None:
        assert self._host is not None
        host, index = self._host, self._index
        slots.sort(key=index.used_at.__getitem__)
        # Side by side on the device, side by side in host memory: few, long copies, both ways.
        by_place = sorted(slots, key=index.device.__getitem__)
        host_id_of = dict(zip(by_place, host.allocate(len(slots)), strict=True))
        host_ids = [host_id_of[slot] for slot in slots]
        self.host_ids_in_flight.update(host_ids)
        for slot in slots:
            index.transfers[slot] += 1

        def done(outcome: KVStoreError | None) -> None:
            self.host_ids_in_flight.difference_update(host_ids)
            if outcome is not None:
                self._stop_demoting(outcome)
            for slot, host_id in zip(slots, host_ids, strict=True):
                index.transfers[slot] -= 1
                if outcome is None:
                    index.host[slot] = host_id
                    index.host_lru.append(slot)
                    self.demoted_blocks += 1
                else:
                    host.free(host_id)
            for slot in reversed(slots) if outcome is None else ():  # parents first: fewer events
                self._events.stored(TierName.HOST, slot)

        self._transfer.demote([index.device[slot] for slot in slots], host_ids, done)
