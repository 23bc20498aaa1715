"""The disk tier: one LMDB environment per directory, checked, bounded, shared by processes.

A synchronous library of its own: needs numpy, lmdb, msgpack and xxhash, knows no
torch, no asyncio, and nothing of the memory tiers.
"""

from kvstore.disk.library import DiskCache, open_disk
from kvstore.disk.schema import DiskEntry
from kvstore.disk.store import DiskStats, DiskStore

__all__ = ["DiskCache", "DiskEntry", "DiskStats", "DiskStore", "open_disk"]
