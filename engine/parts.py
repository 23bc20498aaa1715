"""Puts an engine together: device pool, tiers, store and model runner for one configuration."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.core import CoreLimits, EngineCore
from engine.model.loader import LoadedModel
from engine.runner.memory_budget import free_bytes_for_pool
from engine.runner.model_runner import ModelRunner
from engine.scheduling.chunking import AsFits, WholeChunks
from engine.text.document_prompt import template_parts
from engine.text.tokenizer_file import keep_tokenizer
from kvstore.config import StoreConfig, parse_size
from kvstore.disk import DiskStore
from kvstore.errors import ConfigError, TierBrokenError
from kvstore.hashing import namespace_id
from kvstore.store import BlockStore
from kvstore.tiers.base import BlockCopier, BlockPool
from kvstore.tiers.disk import LmdbTier
from kvstore.tiers.host import HostPool

logger = logging.getLogger(__name__)

_CPU_DEVICE_CACHE = 2 << 30
_CUDA_HOST_CACHE = 4 << 30


def build_core(config: EngineConfig, loaded: LoadedModel) -> EngineCore:
    """The step thread, with parts of its own."""
    shapes = loaded.fixed_shapes
    return EngineCore(
        lambda on_event: build_parts(config, loaded, on_event),
        CoreLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            use_cache=config.enable_prefix_caching,
            chunking=WholeChunks(shapes) if shapes else AsFits(),
            scheduling_policy=config.scheduling_policy,
            max_num_waiting=config.max_num_waiting,
            max_total_tokens=config.max_total_tokens,
        ),
    )


def build_parts(
    config: EngineConfig, loaded: LoadedModel, on_event: Callable[[], None]
) -> tuple[BlockStore, ModelRunner]:
    """The store and the runner that shares its device pool; the caller's thread owns both."""
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)  # this thread's, where Triton starts kernels
    store_config = _store_config(config, loaded)
    namespace = namespace_id(loaded.identity)
    pool, copier, tensor = _device_pool(config, loaded)
    host_blocks = _host_blocks(config, loaded)
    disk, disk_off = _open_disk(config, loaded, namespace)
    try:
        runner = ModelRunner(
            loaded,
            tensor,
            attention_backend=config.attention_backend,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=config.enforce_eager,
            fixed_shapes=loaded.fixed_shapes,
        )
        store = BlockStore(
            loaded.layout,
            namespace,
            pool,
            copier=copier,
            host_blocks=host_blocks,
            disk=LmdbTier(disk) if disk else None,
            disk_off=disk_off,
            config=store_config,
            on_event=on_event,
        )
    except BaseException:
        if disk:
            disk.close()
        raise
    return store, runner


def _store_config(config: EngineConfig, loaded: LoadedModel) -> StoreConfig:
    """With what deterministic mode asks of the store: whole chunks, nothing of a block."""
    store_config, shapes = config.resolved_store_config(), loaded.fixed_shapes
    if shapes is None:
        return store_config
    least = config.max_num_seqs + shapes.chunk_tokens
    if config.max_num_batched_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens: deterministic mode needs {least} for a chunk of "
            f"{shapes.chunk_tokens} beside max_num_seqs ({config.max_num_seqs}), got "
            f"{config.max_num_batched_tokens}"
        )
    return replace(
        store_config,
        reuse_unit_blocks=shapes.chunk_tokens // config.block_size,
        min_partial_tokens=config.block_size,
    )


def _device_pool(
    config: EngineConfig, loaded: LoadedModel
) -> tuple[BlockPool, BlockCopier | None, torch.Tensor]:
    layout, block_bytes = loaded.layout, loaded.layout.block_bytes
    unit = loaded.reuse_tokens  # in deterministic mode the last chunk takes its padding along
    needed = layout.blocks_for(-(-loaded.max_model_len // unit) * unit)
    if config.device_cache != "auto":
        size = parse_size(config.device_cache, "device_cache")
    elif loaded.device.type == "cuda":
        size = free_bytes_for_pool(config, loaded)
    else:
        size = max(_CPU_DEVICE_CACHE, needed * block_bytes)
    if size // block_bytes < needed:
        raise ConfigError(
            f"device_cache: {size} bytes hold {size // block_bytes} blocks, one sequence of "
            f"{loaded.max_model_len} tokens needs {needed}: give at least "
            f"{-(-needed * block_bytes // 2**20)}MiB, or a smaller max_model_len"
        )
    if loaded.device.type == "cuda":
        from kernels.block_copy import gather_blocks, scatter_blocks
        from kvstore.tiers.device import CudaCopier, CudaPool

        cuda_pool = CudaPool(size // block_bytes, layout, loaded.device)
        copier = CudaCopier(cuda_pool, gather=gather_blocks, scatter=scatter_blocks)
        return cuda_pool, copier, cuda_pool.tensor
    pool = HostPool(size // block_bytes, block_bytes)
    pool.commit_memory(needed)  # one sequence's worth, so that no request waits for it
    tensor = torch.from_numpy(pool.rows).view(loaded.dtype).view(-1, *layout.shape)
    return pool, None, tensor


def _host_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    if not config.enable_prefix_caching:
        return 0
    if config.host_cache != "auto":
        size = parse_size(config.host_cache, "host_cache")
    else:
        size = _CUDA_HOST_CACHE if loaded.device.type == "cuda" else 0
    if 0 < size < loaded.layout.block_bytes:
        raise ConfigError(
            f"host_cache: {size} bytes hold no block; give at least {loaded.layout.block_bytes}, "
            "or 0 for no host tier"
        )
    return size // loaded.layout.block_bytes


def _description(loaded: LoadedModel) -> dict[str, Any]:
    """What commands show of a namespace and make texts with: its identity, what follows from it,
    the name people know the model by, and how documents become tokens."""
    description = {
        **loaded.identity,
        "model": loaded.name,
        "num_layers": loaded.layout.num_layers,
        "num_kv_heads": loaded.layout.num_kv_heads,
        "head_dim": loaded.layout.head_dim,
        "windows": list(loaded.windows),
    }
    if loaded.tokenizer is not None:
        tokenizer = keep_tokenizer(loaded.tokenizer)
        description["tokenizer"] = None if tokenizer is None else str(tokenizer)
        with contextlib.suppress(ConfigError):
            description["document_template"] = list(template_parts(loaded.tokenizer))
    return description


def _open_disk(
    config: EngineConfig, loaded: LoadedModel, namespace: bytes
) -> tuple[DiskStore | None, str]:
    """The disk store, or None and why. A directory that broke costs the tier, not the engine."""
    if config.disk_cache is None or not config.enable_prefix_caching:
        return None, ""
    default = EngineConfig.__dataclass_fields__["disk_cache_size"].default
    # Capacity belongs to the directory: only a size that was asked for changes it.
    given = config.disk_cache_size != default
    try:
        disk = DiskStore.open(
            Path(config.disk_cache),
            capacity_bytes=parse_size(config.disk_cache_size) if given else None,
            config=config.resolved_store_config(),
        )
        if config.resolved_store_config().disk_mode == "rw":
            disk.register_namespace(namespace, _description(loaded))
    except TierBrokenError as error:
        logger.warning("disk tier is off: %s", error)
        return None, str(error)
    return disk, ""
