"""What prefill and loads cost on this machine: a short run of a model, and of the store.

The same forwards and the same loads from which an idle engine learns what to load and what to
compute, on a cache in a temporary directory.
"""

import tempfile
import time
from collections.abc import Callable

import numpy as np

from engine.config import EngineConfig
from engine.measuring.calibration import Calibration
from engine.model.loader import load_model
from engine.parts import build_parts
from kvstore.block import TierName
from kvstore.errors import ConfigError
from kvstore.planning import HardwareProfile
from kvstore.store import BlockStore

_CHUNK_TOKENS = 2048
_MEASURED = (TierName.HOST, TierName.DISK)
_NUM_SEQUENCES = 16  # of one block each, for the loads from disk
_LONGEST_S = 30.0  # for what should take milliseconds


def measure_machine(
    model: str, *, max_model_len: int = 4096, clock: Callable[[], float] = time.perf_counter
) -> HardwareProfile:
    """Load ``model`` and run it for a second or two, with up to a quarter of ``max_model_len``
    positions before a token.

    Raises ``ConfigError`` for a model that cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-") as directory:
        config = EngineConfig.of(
            model=model,
            max_model_len=max_model_len,
            host_cache="64MiB",
            disk_cache=directory,
            disk_cache_size="256MiB",
            load_policy="auto",
        )
        loaded = load_model(config.model, max_model_len=max_model_len, skip_tokenizer_init=True)
        store, runner = build_parts(config, loaded, lambda: None)
        try:
            for _ in range(2):  # the first forwards of a process are slow
                calibration = Calibration(store, runner, clock, chunk_tokens=_CHUNK_TOKENS)
                while not calibration.is_done:
                    calibration.advance()
            _fill(store)
            store.measure()
            store.run_until_idle(_LONGEST_S)
            compute = store.cost.compute_estimate()
            loads = {tier: store.cost.load_estimate(tier) for tier in _MEASURED}
        finally:
            store.close(_LONGEST_S)
    if compute is None:
        raise ConfigError(f"{model} is too slow here to be measured; name a smaller one")
    device = str(loaded.device)
    return HardwareProfile(
        "this machine",
        loaded.name,
        loaded.layout.bytes_per_token,
        compute,
        loads,
        f"measured just now on {device}, blocks on disk in the page cache",
        _CHUNK_TOKENS,
    )


def _fill(store: BlockStore) -> None:
    """Write a few blocks to disk."""
    size = store.layout.block_size
    for number in range(_NUM_SEQUENCES):
        tokens = np.full(size, number, "<u4").tobytes()
        lease = store.reserve(store.lookup(tokens, num_reusable=0), size)
        store.commit(lease, tokens, size)
        store.release(lease)
    store.flush(_LONGEST_S)
