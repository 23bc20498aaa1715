"""The exceptions of the store.

    KVStoreError
    ├── ConfigError            a setting is wrong; the message says which and what would do
    ├── CapacityError          may pass later
    │   ├── TierFullError      a tier cannot take the block now
    │   ├── OutOfBlocksError   the device pool has too few blocks that may be evicted
    │   └── QueueFullError     an engine has accepted as many requests as it may
    ├── BlockMissingError      a block promised to be there is not (a plain miss is a result)
    ├── CorruptBlockError      checksum or format; the caller sees a miss, the block is written anew
    ├── TraceError             a trace of requests cannot be read; the message says where and why
    ├── StoreClosedError       you closed it (or forked: a child does not inherit the store)
    └── TierBrokenError        the world broke it (disk gone, newer schema); the cause is attached
                               and the other tiers go on

Facts ride in attributes (``exc.tier``, ``exc.needed_blocks``); messages name the setting to change.
"""


class KVStoreError(Exception):
    """Base of everything the store raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """A setting is wrong. Also a ``ValueError``, so that callers need not know this package."""


class CapacityError(KVStoreError):
    """There is no room now; freeing something may help."""


class TierFullError(CapacityError):
    """A tier cannot take the block now."""

    def __init__(self, message: str, *, tier: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes


class OutOfBlocksError(CapacityError):
    """The device pool has fewer free and evictable blocks than were asked for.

    Raised before anything changed: a failed reservation has no side effect.
    """

    def __init__(self, *, needed_blocks: int, available_blocks: int, capacity_blocks: int) -> None:
        super().__init__(
            f"{needed_blocks} device blocks are needed, {available_blocks} of {capacity_blocks} "
            "are free or may be evicted; wait for running requests, or raise device_cache"
        )
        self.needed_blocks = needed_blocks
        self.available_blocks = available_blocks
        self.capacity_blocks = capacity_blocks


class QueueFullError(CapacityError):
    """An engine has accepted as many requests, or tokens of requests, as ``setting`` allows."""

    def __init__(self, message: str, *, setting: str, limit: int) -> None:
        super().__init__(message)
        self.setting = setting
        self.limit = limit


class BlockMissingError(KVStoreError):
    """A block that was promised to be in a tier is not there."""


class CorruptBlockError(KVStoreError):
    """A block's bytes or record do not match their checksum. ``reason`` is a short label."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class TraceError(KVStoreError):
    """A trace of requests is not what its format asks for."""


class StoreClosedError(KVStoreError):
    """The store was closed, or belongs to the parent of a forked process."""


class TierBrokenError(KVStoreError):
    """A tier stopped working for a reason outside the program; ``__cause__`` has the original."""

    def __init__(self, message: str, *, tier: str) -> None:
        super().__init__(message)
        self.tier = tier
