"""How much of a GPU's memory the pool of blocks may take.

A forward needs memory of its own, and so do decode graphs, which keep what their kernels write. How
much depends on the model, the kernels and the limits, so it is not computed but tried: before the
pool is made, a runner on one block does the longest prefill and captures the largest graph. Smaller
graphs reuse its memory. What that took is left free beside the pool. (The other order, the pool
first and graphs into the rest, fails at start on a small GPU, where it can be helped least.)
"""

import gc
import logging

import torch

from engine.config import EngineConfig
from engine.model.loader import LoadedModel
from engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def free_bytes_for_pool(config: EngineConfig, loaded: LoadedModel) -> int:
    """Of the memory that is free on the model's device, which has nothing else to do meanwhile."""
    needed = _rehearse(config, loaded)
    free, _ = torch.cuda.mem_get_info(loaded.device)
    size = pool_bytes(free, needed, config.gpu_memory_utilization)
    logger.info("device memory free=%d forward=%d pool=%d", free, needed, size)
    return size


def pool_bytes(free: int, needed: int, utilization: float) -> int:
    """``utilization`` of what is free, or less where the rest is too little for a forward."""
    return max(0, min(int(free * utilization), free - needed))


def _rehearse(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes that the longest prefill and the largest decode graph take beside the pool."""
    device, layout = loaded.device, loaded.layout
    _give_back()  # also what an engine that was closed has left
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    pool = torch.zeros((1, *layout.shape), dtype=loaded.dtype, device=device)
    runner = ModelRunner(
        loaded,
        pool,
        attention_backend=config.attention_backend,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.enforce_eager,
        fixed_shapes=loaded.fixed_shapes,
    )
    runner.warm_up(config.max_num_batched_tokens, is_rehearsal=True)
    needed = torch.cuda.max_memory_reserved(device) - before
    del runner, pool
    _give_back()
    return needed


def _give_back() -> None:
    """Memory that nobody uses, to the device. A runner and its graphs hold each other, so they wait
    for the garbage collector; meanwhile their memory would count twice, as needed and as taken."""
    gc.collect()
    torch.cuda.empty_cache()
