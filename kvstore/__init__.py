"""A tiered store for the KV cache of large language models.

Hot blocks lie on the device, colder ones in host memory, the rest in LMDB on disk; a block is found
by a hash of the tokens up to its end. Importing this needs neither torch nor a GPU; the public
names load when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.block import BlockLayout, TierName
    from kvstore.config import DiskConfig, StoreConfig
    from kvstore.disk import DiskStore, open_disk
    from kvstore.store import BlockStore

_MODULES = {
    "BlockLayout": "kvstore.block",
    "BlockStore": "kvstore.store",
    "DiskConfig": "kvstore.config",
    "DiskStore": "kvstore.disk",
    "StoreConfig": "kvstore.config",
    "TierName": "kvstore.block",
    "open_disk": "kvstore.disk",
}

__all__ = [
    "BlockLayout",
    "BlockStore",
    "DiskConfig",
    "DiskStore",
    "StoreConfig",
    "TierName",
    "open_disk",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
