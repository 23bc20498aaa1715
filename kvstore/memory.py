"""What the parts of a store share: the memory tiers, the index over them, and the settings."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.block import BlockLayout
from kvstore.config import StoreConfig
from kvstore.index import BlockIndex
from kvstore.reports.events import EventLog
from kvstore.tiers.base import BlockPool
from kvstore.tiers.host import HostPool


@dataclass(frozen=True, slots=True)
class Memory:
    """Owner thread only.

    namespace   digest of the model identity
    device      the pool whose block ids leases hold
    host        the host tier, None without one
    """

    layout: BlockLayout
    namespace: bytes
    config: StoreConfig
    index: BlockIndex
    device: BlockPool
    host: HostPool | None
    events: EventLog
    clock: Callable[[], float]

    @property
    def slowest(self) -> BlockPool:
        return self.host or self.device
