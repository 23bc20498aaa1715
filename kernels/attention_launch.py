"""How the Triton attention kernel is launched: tile shape, grid, number of splits, scratch.

The grid follows the shapes and never the lengths, which are on the device: nothing here waits for
it, and a launch can be captured in a CUDA graph. What the grid has too much of ends at once.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention_triton import attention_kernel, reduce_kernel
from kernels.configs import AttentionConfig, attention_config
from kernels.launch import Launch

# Programs per multiprocessor worth splitting for; fewer leave a part of the GPU idle.
PROGRAMS_PER_SM = 2
# Positions below which another split costs more (scratch, reduction) than it saves.
MIN_SPLIT_POSITIONS = 256
MAX_SPLITS = 128
LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice of tile and splits depends on. ``compute_capability``: major × 10 + minor."""

    compute_capability: int
    num_sms: int


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor | None,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    split_len: int | None,
    out: Tensor,
) -> Tensor:
    """Arguments as in ``kernels.paged_prefill``, or as in ``kernels.paged_decode`` when
    ``cu_seqlens_q`` is None; checked there."""
    if q.shape[0] and seq_lens.shape[0]:
        operands = (q, k_pool, v_pool, block_tables, cu_seqlens_q, seq_lens)
        options = (scale, window, softcap, sinks, split_len)
        for launch in attention_launches(*operands, *options, out, gpu_of(q.device)):
            launch.run()
    return out


def attention_launches(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor | None,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    split_len: int | None,
    out: Tensor,
    gpu: Gpu,
    config: AttentionConfig | None = None,
) -> list[Launch]:
    """The kernel, and the reduction if the keys are split. ``config`` overrides the table's."""
    num_tokens, num_heads, head_dim = q.shape
    num_seqs = seq_lens.shape[0]
    _, block_size, num_kv_heads, _ = k_pool.shape
    heads_per_kv = num_heads // num_kv_heads
    is_ragged = cu_seqlens_q is not None
    num_new_each = 0 if is_ragged else num_tokens // num_seqs
    config = config or tile_shape(q, block_size, heads_per_kv, num_new_each, gpu)
    num_blocks = num_seqs
    if is_ragged:
        num_blocks += num_tokens // (config.rows // heads_per_kv)
    max_len = block_tables.shape[1] * block_size
    if split_len is None:
        split_tiles = 0
        num_splits = choose_num_splits(num_blocks * num_kv_heads, max_len, gpu.num_sms)
    else:
        split_tiles = max(1, split_len // config.keys)
        num_splits = triton.cdiv(max_len, split_tiles * config.keys)
    is_split = num_splits > 1

    target, lse = out, None
    target_strides: tuple[int, ...] = (0, *out.stride()[:2])
    lse_strides: tuple[int, ...] = (0, 0)
    if is_split:
        shape = (num_splits, num_tokens, num_heads)
        target = q.new_empty((*shape, head_dim), dtype=torch.float32)
        lse = q.new_empty(shape, dtype=torch.float32)
        target_strides, lse_strides = target.stride()[:3], lse.stride()[:2]
    k_operand, v_operand = k_pool, v_pool
    if config.tma:
        k_operand, v_operand = _descriptor(k_pool, config), _descriptor(v_pool, config)
    d0, d1 = split_head_dim(head_dim)
    attention = Launch(
        attention_kernel,
        (num_blocks, num_kv_heads, num_splits),
        (
            *(q, k_operand, v_operand, target, lse, block_tables, cu_seqlens_q, seq_lens, sinks),
            scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap,
            0.0 if softcap is None else softcap * LOG2E,
            *(num_seqs, num_new_each, window or 0, split_tiles, num_splits),
            block_tables.stride(0),
            *q.stride()[:2],
            *k_pool.stride()[:3],
            *target_strides,
            *lse_strides,
        ),
        {
            "HEADS_PER_KV": heads_per_kv,
            "HEAD_DIM": head_dim,
            "D0": d0,
            "D1": d1,
            "BLOCK_SIZE": block_size,
            "M": config.rows,
            "N": config.keys,
            "RAGGED": is_ragged,
            "SPLIT": is_split,
            "HAS_WINDOW": window is not None,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_SINKS": sinks is not None,
            # float32 is the exact path; the default would round its operands to 10 bits (tf32).
            "PRECISION": "ieee",
            "TMA": config.tma,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
    )
    if not is_split:
        return [attention]
    reduction = Launch(
        reduce_kernel,
        (num_tokens, num_heads),
        (
            *(target, lse, sinks, out, num_splits),
            *target_strides,
            *lse_strides,
            *out.stride()[:2],
        ),
        {
            "HEAD_DIM": head_dim,
            "D": triton.next_power_of_2(head_dim),
            "SPLITS": triton.next_power_of_2(num_splits),
            "HAS_SINKS": sinks is not None,
            "num_warps": 2,
        },
    )
    return [attention, reduction]


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Two powers of two that hold it, the second 0 if it is one itself: 80 is 64 + 16."""
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


def tile_shape(
    q: Tensor, block_size: int, heads_per_kv: int, num_new_each: int, gpu: Gpu
) -> AttentionConfig:
    """The table's tile, as tall as the call needs. ``num_new_each`` 0 for a ragged batch."""
    head_dim = q.shape[-1]
    rows = heads_per_kv * max(1, num_new_each)
    regime = "decode" if num_new_each and rows <= 16 else "prefill"
    config = attention_config(regime, gpu.compute_capability, head_dim, q.dtype)
    # A box of the descriptor is one power of two, inside one block.
    fits_tma = block_size % config.keys == 0 and head_dim & (head_dim - 1) == 0
    return AttentionConfig(
        rows=max(config.rows, triton.next_power_of_2(rows)),
        keys=config.keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        tma=config.tma and fits_tma,
    )


def choose_num_splits(num_programs: int, max_len: int, num_sms: int) -> int:
    """As many as fill the device, unless the parts would be too short."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, num_programs)
    return max(1, min(int(wanted), max_len // MIN_SPLIT_POSITIONS, MAX_SPLITS))


def _descriptor(pool: Tensor, config: AttentionConfig) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    box = [1, config.keys, 1, pool.shape[-1]]
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), box)


@lru_cache(maxsize=8)
def gpu_of(device: torch.device) -> Gpu:
    """The interpreter counts as a new GPU, so that it runs the branches that need one, with few
    multiprocessors, so that splitting happens at a few hundred positions."""
    if device.type != "cuda":
        return Gpu(compute_capability=90, num_sms=4)
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.major * 10 + properties.minor, properties.multi_processor_count)
