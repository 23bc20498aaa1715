"""``check``: walks every invariant of a store and says which ones do not hold.

It costs O(blocks) and runs between operations, in tests and behind a debugging switch. It reads the
pools and arrays directly, not through the code it checks.
"""

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.block import TierName
from kvstore.index import NONE, VALID
from kvstore.lease import Lease

if TYPE_CHECKING:
    from kvstore.store import BlockStore


def check(store: "BlockStore") -> list[str]:
    """Sentences, one for each violated invariant; empty when all hold."""
    parts = (_slots, _ids, _users, _orders, _pins, _events)
    return [sentence for part in parts for sentence in part(store)]


def _slots(store: "BlockStore") -> list[str]:
    """Each key has one slot, each used slot has a copy, children hang on their parent's key."""
    index, wrong = store.index, []
    children = {parent: set(index.children(parent)) for parent in set(index.parent_key)}
    for key, slot in index.slots.items():
        if index.key[slot] != key:
            wrong.append(f"slot {slot} is filed under another block's key")
        if index.device[slot] == index.host[slot] == NONE:
            wrong.append(f"slot {slot} has no copy")
        if slot not in children[index.parent_key[slot]]:
            wrong.append(f"slot {slot} is not among its parent's children")
        is_root = index.depth[slot] == 0 or index.parent_key[slot] in index.slots
        if is_root == (slot in index.cut_off):
            wrong.append(f"slot {slot}: has its parent or is a root {is_root}, cut off {is_root}")
    if not index.cut_off.keys() <= set(index.slots.values()):
        wrong.append("an unused slot is cut off")
    if sum(bool(key) for key in index.key) != len(index.slots):
        wrong.append("an unused slot has a key")
    return wrong


def _ids(store: "BlockStore") -> list[str]:
    """Used, free and in-flight blocks add up to the capacity, and none has two owners."""
    index, wrong = store.index, []
    in_flight = store.host_ids_in_flight()
    users: dict[int, list[Lease]] = {}
    for lease in store.leases:
        for block in lease.block_ids[len(lease.slots) :]:
            users.setdefault(block, []).append(lease)
    for block, leases in users.items():
        if len(leases) > 1 and set(leases) != set(store.sharers.get(block, ())):
            wrong.append(f"device block {block} has {len(leases)} users that do not share it")
    wrong += [f"nobody shares device block {block}" for block in store.sharers.keys() - users]
    private = [*users, *store.abandoned_blocks()]
    owners = {
        "device": (store.device, [index.device[slot] for slot in index.used_slots()] + private),
        "host": (store.host, [index.host[slot] for slot in index.used_slots()] + in_flight),
    }
    for name, (pool, owned) in owners.items():
        if pool is None:
            continue
        used = [block for block in owned if block != NONE]
        counts = Counter([*used, *pool.free_ids()])
        wrong += [f"{name} block {block} has {n} owners" for block, n in counts.items() if n > 1]
        if len(counts) != pool.capacity:
            wrong.append(f"{name}: {pool.capacity - len(counts)} blocks are lost")
    return wrong


def _users(store: "BlockStore") -> list[str]:
    """Reference counts are the leases' uses; a ready lease reads only valid copies."""
    index, wrong = store.index, []
    uses = Counter(slot for lease in store.leases for slot in lease.slots)
    for slot in index.used_slots():
        if index.refcount[slot] != uses[slot]:
            wrong.append(f"slot {slot}: refcount {index.refcount[slot]}, {uses[slot]} users")
        if index.transfers[slot] < 0:
            wrong.append(f"slot {slot}: {index.transfers[slot]} transfers")
    for lease in store.leases:
        for slot, block_id in zip(lease.slots, lease.block_ids, strict=False):
            if index.device[slot] != block_id:
                wrong.append(f"a lease reads block {block_id}, slot {slot} lies elsewhere")
            if lease.is_ready and not lease.failed_keys and index.loading[slot] != VALID:
                wrong.append(f"a lease is ready, slot {slot} is not")
    return wrong


def _orders(store: "BlockStore") -> list[str]:
    """Exactly the unused blocks may be evicted, exactly those in host memory are in its order."""
    index, wrong = store.index, []
    for slot in index.used_slots():
        is_unused = (
            index.device[slot] != NONE and not index.refcount[slot] and index.loading[slot] == VALID
        )
        if is_unused != (slot in store.policy):
            wrong.append(f"slot {slot}: evictable {is_unused}, in the order {not is_unused}")
        if (index.host[slot] != NONE) != (slot in index.host_lru):
            wrong.append(f"slot {slot}: host order and host copy disagree")
    for order, members in (
        (store.policy, list(store.policy.victims())),
        (index.host_lru, list(index.host_lru)),
        (index.dirty, list(index.dirty)),
    ):
        if len(members) != len(order) or len(set(members)) != len(members):
            wrong.append("an order's links are broken")
        if any(not index.key[slot] for slot in members):
            wrong.append("an order holds an unused slot")
    return wrong


def _pins(store: "BlockStore") -> list[str]:
    """What is held has a copy in memory; pins take at most half of the slowest memory tier."""
    index, pinning = store.index, store.pinning
    wrong = [
        f"slot {slot} is held and has no copy"
        for slot in pinning.held
        if not index.key[slot] or index.device[slot] == index.host[slot] == NONE
    ]
    capacity = store.memory.slowest.capacity
    if len(pinning.pinned) > capacity // 2:
        wrong.append(f"{len(pinning.pinned)} of {capacity} blocks are pinned")
    if not pinning.pinned.keys() <= pinning.held.keys():
        wrong.append("a pinned block is not held")
    return wrong


def _events(store: "BlockStore") -> list[str]:
    """What came to a memory tier and did not leave it is there."""
    index, log, wrong = store.index, store.events, []
    held = {
        TierName.DEVICE: sum(
            index.device[slot] != NONE and index.loading[slot] == VALID
            for slot in index.used_slots()
        ),
        TierName.HOST: sum(index.host[slot] != NONE for slot in index.used_slots()),
    }
    for tier, count in held.items():
        stayed = log.stored_blocks[tier] - log.removed_blocks[tier]
        if stayed != count:
            wrong.append(f"{tier}: {stayed} blocks were stored and not removed, {count} are there")
    return wrong
