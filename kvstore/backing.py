"""What stands behind a store's memory: the disk tier, until it breaks, and why there is none."""

import logging
from collections import deque

from kvstore.block import TierName
from kvstore.errors import KVStoreError
from kvstore.memory import Memory
from kvstore.tiers.base import DiskTier, RemovedBlock

logger = logging.getLogger(__name__)


class Backing:
    """What the parts of a store share of disk. Owner thread only.

    tier          None where there is none, or none any more
    why_off       why there is none although one was asked for; empty otherwise
    is_searched   requests ask it: what it has may be loaded
    is_written    it takes blocks: what it does not hold is dirty
    is_read_only  it is there, and takes none
    """

    def __init__(self, memory: Memory, tier: DiskTier | None, why_off: str) -> None:
        self._index = memory.index
        self._events = memory.events
        self._namespace = memory.namespace
        self._removed: deque[RemovedBlock] = deque()  # the transfer thread appends
        self.tier, self.why_off = tier, why_off
        mode, policy = memory.config.disk_mode, memory.config.load_policy
        self.is_searched = tier is not None and policy != "never"
        self.is_written = tier is not None and mode == "rw"
        self.is_read_only = tier is not None and mode == "ro"
        if tier is not None:
            tier.watch_removals(self._removed.extend)

    @property
    def is_checking(self) -> bool:
        """It takes no block yet, and will: its file is being checked."""
        return self.tier is not None and self.tier.is_checking

    def lose(self, error: KVStoreError) -> None:
        """The tier broke: the store goes on with memory alone. Said once, in the log."""
        if self.tier is None:
            return
        logger.error("disk tier is off: %s", error)
        self.tier, self.why_off = None, str(error)
        self.is_searched = self.is_written = self.is_read_only = False
        for slot in list(self._index.dirty):  # there is no slower tier to hold it
            self._index.dirty.remove(slot)
        self._events.cleared(TierName.DISK)

    def take_removed(self) -> list[RemovedBlock]:
        """Blocks that have left disk since the last call.

        What stored them was posted before: tell of them after the ``poll()`` that applies it.
        """
        return [self._removed.popleft() for _ in range(len(self._removed))]

    def tell_removed(self, blocks: list[RemovedBlock]) -> None:
        """Events of those that are this model's."""
        for block in blocks:
            if block.namespace == self._namespace:
                self._events.removed_key(TierName.DISK, block.key, block.salt)
