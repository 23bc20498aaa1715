"""Forgetting: one sequence leaves the memory tiers on purpose, with what continues it.

What anybody else needs stays: blocks in use, on their way, pinned, or continued by other sequences,
and all that leads to them.
"""

from collections import Counter
from collections.abc import Container, Sequence

from kvstore.block import TierName
from kvstore.eviction import Evictor
from kvstore.index import NONE, BlockIndex


def forget_in_memory(
    index: BlockIndex,
    evictor: Evictor,
    held: Container[int],
    keys: Sequence[bytes],
    end: bytes,
    beginning: bytes,
) -> tuple[Counter[TierName], set[bytes]]:
    """Drop the sequence ``keys``, root first, and what continues ``end``, its last key or the seed,
    with tokens that begin so.

    Returns how many copies went, by tier, and the keys of what stays. Dirty blocks are lost.
    """
    below = [slot for slot in index.children(end) if index.tokens[slot].startswith(beginning)]
    for slot in below:  # grows: parents before children
        below += index.children(index.key[slot])
    path = [index.slots[key] for key in keys if key in index.slots]
    dropped: Counter[TierName] = Counter()
    kept: set[bytes] = set()
    for slot in [*reversed(below), *reversed(path)]:
        key = index.key[slot]
        is_needed = index.refcount[slot] or index.transfers[slot] or slot in held
        if is_needed or any(True for _ in index.children(key)):
            kept.add(key)
            continue
        on_device, on_host = index.device[slot] != NONE, index.host[slot] != NONE
        if on_device:
            evictor.drop_device(slot)
        if on_host:
            evictor.drop_host(slot)
        dropped[TierName.DEVICE] += on_device
        dropped[TierName.HOST] += on_host
    is_continued = not kept.issubset(keys)
    last = max((i for i, key in enumerate(keys) if is_continued or key in kept), default=-1)
    return dropped, kept.union(keys[: last + 1])
