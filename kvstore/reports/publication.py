"""What a running engine lets others read of itself, once a second: for ``kvstore inspect --watch``.

Counters since the store was opened, as JSON; rates are for the reader to compute. It lies in the
cache directory, beside the slot that says who holds it (``kvstore.disk.attach``), so it ends with
the process, however that ends.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.stats import StoreStats

_EVERY_S = 1.0
_OF_A_TIER = (
    "state", "used_bytes", "capacity_bytes", "used_blocks", "hits", "misses", "stored_blocks",
    "evicted_blocks",
)  # fmt: skip
_OF_THE_STORE = (
    "looked_up_blocks", "promoted_blocks", "demoted_blocks", "dirty_blocks", "oldest_dirty_age_s",
    "pending_transfers", "failed_loads", "load_decisions", "block_bytes", "written_bytes_last_day",
)  # fmt: skip


class Publisher:
    """Owner thread only.

    publish   takes a snapshot, and does not wait
    also      what the owner adds to it, such as how many requests wait
    """

    def __init__(
        self,
        namespace: bytes,
        stats: Callable[[], StoreStats],
        publish: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._namespace = namespace.hex()
        self._stats = stats
        self._publish = publish
        self._clock = clock
        self._due_at = clock() + _EVERY_S
        self._last: dict[str, Any] = {}
        self.also: Callable[[], Mapping[str, Any]] = dict

    def pump(self) -> None:
        """Publish, at most once a second and only what has changed."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + _EVERY_S
        snapshot = {"namespace": self._namespace, **snapshot_of(self._stats()), **self.also()}
        if snapshot != self._last:
            self._last = snapshot
            self._publish({**snapshot, "at": time.time()})

    def stop(self) -> None:
        """There is nobody left to publish to."""
        self._due_at = math.inf


def snapshot_of(stats: StoreStats) -> dict[str, Any]:
    """The part of the statistics that is published."""
    return {
        "tiers": {
            name: {field: getattr(tier, field) for field in _OF_A_TIER}
            for name, tier in stats.tiers.items()
        },
        **{field: getattr(stats, field) for field in _OF_THE_STORE},
        "written_blocks": stats.written.written_blocks,
        "written_bytes": stats.written.written_bytes,
        "unwritten_blocks": stats.written.unwritten_blocks,
    }
