"""Stand-ins for tiers, time and an engine, and the suites that any tier must pass.

For tests of the store and of what is built on it. ``kvstore.testing.cuda``, which needs torch,
plays any order of events of a device.
"""

from kvstore.testing.clock import FakeClock
from kvstore.testing.disks import FaultyDisk, MemoryDisk
from kvstore.testing.engine import FakeEngine
from kvstore.testing.memory_suite import MemoryTierSuite
from kvstore.testing.suite import TierSuite

__all__ = ["FakeClock", "FakeEngine", "FaultyDisk", "MemoryDisk", "MemoryTierSuite", "TierSuite"]
