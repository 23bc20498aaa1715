"""Forgetting what a running engine has cached (``LLM.reset_prefix_cache``)."""

from collections.abc import Callable
from typing import TypeVar

from engine.core import EngineCore
from engine.scheduling.sequence import check_salt
from kvstore.block import TierName
from kvstore.errors import ConfigError, KVStoreError

T = TypeVar("T")

_TRANSFERS_S = 5.0  # that forgetting waits for transfers to end


def reset_cache(core: EngineCore, tier: str | None, salt: str) -> int:
    """The blocks of one salt, in one tier or, with None, in all; how many copies were skipped.

    Waits: what disk does not hold yet is written first. Raises ``ConfigError`` for a tier or salt
    that is none, ``TierBrokenError`` when disk cannot be changed now.
    """
    name = None if tier is None else _tier_name(tier)
    check_salt(salt)
    store, skipped = core.store, 0
    core.call(store.urge)
    core.wait_for(lambda: store.is_clean)
    if name is not TierName.DISK:
        skipped = call_when_quiet(core, lambda: store.reset(name, salt))
    if name in (None, TierName.DISK):
        kept: list[int | KVStoreError] = []
        core.call(lambda: store.clear_disk(salt, kept.append))
        core.wait_for(lambda: bool(kept))
        if isinstance(kept[0], KVStoreError):
            raise kept[0]
        skipped += kept[0]
    return skipped


def call_when_quiet(core: EngineCore, function: Callable[[], T]) -> T:
    """Run a function on the step thread when no transfer is under way, or they do not end.

    What is just being copied or written counts as in use: better to wait for it.
    """
    results: list[T] = []

    def call_once() -> None:
        if not results:
            results.append(function())

    def call_if_quiet() -> bool:
        if core.store.num_pending == 0:
            call_once()
        return bool(results)

    if not core.wait_for(call_if_quiet, _TRANSFERS_S):
        core.call(call_once)
    return results[0]


def _tier_name(tier: str) -> TierName:
    try:
        return TierName(tier)
    except ValueError:
        names = ", ".join(name.value for name in TierName)
        raise ConfigError(f"tier: expected one of {names}, got {tier!r}") from None
