"""How the Triton attention kernel is launched: tile shape, grid, number of splits, scratch.

The grid follows the shapes and never the lengths, which are on the device: nothing here waits for
it, and a launch can be captured in a CUDA graph. What the grid has too much of ends at once.
"""

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from kernels.attention_triton import attention_kernel, reduce_kernel
from kernels.configs import AttentionConfig, attention_config

# Programs per multiprocessor worth splitting for; fewer leave a part of the GPU idle.
PROGRAMS_PER_SM = 2
# Positions below which another split costs more (scratch, reduction) than it saves.
MIN_SPLIT_POSITIONS = 256
MAX_SPLITS = 128
LOG2E = math.log2(math.e)


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
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    heads_per_kv = num_heads // num_kv_heads
    num_new_each = num_tokens // num_seqs
    one_block = cu_seqlens_q is None
    config = tile_shape(
        q, heads_per_kv, num_new_each * heads_per_kv if one_block else None, block_size
    )
    num_blocks = num_seqs
    if not one_block:
        num_blocks += num_tokens // (config.rows // heads_per_kv)
    max_len = block_tables.shape[1] * block_size
    split_tiles = 0
    if split_len is None:
        num_splits = _num_splits(num_blocks * num_kv_heads, max_len, num_sms(q.device))
    else:
        split_tiles = max(1, split_len // config.keys)
        num_splits = triton.cdiv(max_len, split_tiles * config.keys)
    is_split = num_splits > 1

    target, target_strides = out, (0, *out.stride()[:2])
    lse = out  # not read unless split
    if is_split:
        shape = (num_splits, num_tokens, num_heads)
        target = q.new_empty((*shape, head_dim), dtype=torch.float32)
        lse = q.new_empty(shape, dtype=torch.float32)
        target_strides = target.stride()[:3]
    d0, d1 = split_head_dim(head_dim)
    attention_kernel[(num_blocks, num_kv_heads, num_splits)](
        q,
        *pool_operands(k_pool, v_pool, config),
        target,
        lse,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        sinks,
        scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap,
        0.0 if softcap is None else softcap * LOG2E,
        num_seqs,
        num_new_each,
        window or 0,
        split_tiles,
        num_splits,
        block_tables.stride(0),
        *q.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        *target_strides,
        *lse.stride()[:2],
        HEADS_PER_KV=heads_per_kv,
        HEAD_DIM=head_dim,
        D0=d0,
        D1=d1,
        BLOCK_SIZE=block_size,
        M=config.rows,
        N=config.keys,
        RAGGED=not one_block,
        SPLIT=is_split,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        # float32 is the exact path; the default would round its operands to 10 bits (tf32).
        PRECISION="ieee",
        TMA=config.tma,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if is_split:
        reduce_kernel[(num_tokens, num_heads)](
            target,
            lse,
            sinks,
            out,
            num_splits,
            *target_strides,
            *lse.stride()[:2],
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            D=triton.next_power_of_2(head_dim),
            SPLITS=triton.next_power_of_2(num_splits),
            HAS_SINKS=sinks is not None,
            num_warps=4 if head_dim > 128 else 2,
        )
    return out


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Two powers of two that hold it, the second 0 if it is one itself: 80 is 64 + 16."""
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    return first, max(16, triton.next_power_of_2(rest)) if rest else 0


def tile_shape(
    q: Tensor, heads_per_kv: int, packed_rows: int | None, block_size: int
) -> AttentionConfig:
    """The configured tile, as tall as the call needs; ``packed_rows`` None for a ragged batch."""
    needed = heads_per_kv if packed_rows is None else packed_rows
    regime = "decode" if packed_rows is not None and packed_rows <= 16 else "prefill"
    config = attention_config(regime, compute_capability(q.device), q.shape[-1], q.dtype)
    head_dim = q.shape[-1]
    return AttentionConfig(
        rows=max(config.rows, triton.next_power_of_2(needed)),
        keys=config.keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # One descriptor box is one block's tile of one power of two.
        tma=config.tma and block_size % config.keys == 0 and head_dim & (head_dim - 1) == 0,
    )


def pool_operands(k_pool: Tensor, v_pool: Tensor, config: AttentionConfig) -> tuple[object, object]:
    if not config.tma:
        return k_pool, v_pool
    from triton.tools.tensor_descriptor import TensorDescriptor

    def describe(pool: Tensor) -> TensorDescriptor:
        box = [1, config.keys, 1, pool.shape[-1]]
        return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), box)

    return describe(k_pool), describe(v_pool)


def _num_splits(num_programs: int, max_len: int, sms: int) -> int:
    """As many as fill the device, unless the parts would be too short."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * sms, num_programs)
    return max(1, min(wanted, max_len // MIN_SPLIT_POSITIONS, MAX_SPLITS))


@lru_cache(maxsize=8)
def compute_capability(device: torch.device) -> int:
    """Of the interpreter: the newest, so that it runs the branches that need one."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@lru_cache(maxsize=8)
def num_sms(device: torch.device) -> int:
    """Of the interpreter: few, so that splitting happens at a few hundred positions."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
