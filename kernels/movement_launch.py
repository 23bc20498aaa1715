"""How the Triton kernels that move keys and values are launched: grid, and axes merged.

A block of the source and of the destination is described by strides, after merging axes that lie
one behind the other in both: a whole block, or a group of its layers, is a single axis.
"""

import math

import torch
import triton
from torch import Tensor

from kernels.launch import Launch
from kernels.movement_triton import move_kernel, write_kernel

# Bytes of one program: enough loads in flight to hide latency, small enough that a few blocks
# spread over all multiprocessors.
CHUNK_BYTES = 8192
MAX_AXES = 5  # layers, keys or values, positions, heads, head_dim: all the axes of a block
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Arguments as in ``kernels.cache_write``, checked there."""
    if k.shape[0]:
        write_launch(k, v, k_pool, v_pool, slot_mapping).run()


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> Tensor:
    """Arguments as in ``kernels.block_copy``, checked there, as for the next two."""
    _move(pool, out, block_ids, None, None)
    return out


def scatter_blocks(src: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    _move(src, pool, None, block_ids, None)


def copy_blocks(
    pool: Tensor, src_ids: Tensor, dst_ids: Tensor, num_tokens: int | Tensor | None
) -> None:
    counts = None
    if isinstance(num_tokens, Tensor):
        counts = num_tokens
    elif num_tokens is not None:
        pool = pool.narrow(-3, 0, num_tokens)
    _move(pool, pool, src_ids, dst_ids, counts)


def write_launch(
    k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor
) -> Launch:
    num_tokens, num_heads, head_dim = k.shape
    k, v, k_pool, v_pool = (_as_integers(tensor) for tensor in (k, v, k_pool, v_pool))
    return Launch(
        write_kernel,
        (num_tokens,),
        (
            *(k, v, k_pool, v_pool, slot_mapping),
            *k.stride()[:2],
            *v.stride()[:2],
            *k_pool.stride()[:3],
            *v_pool.stride()[:3],
        ),
        {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": k_pool.shape[1],
            "HEADS": triton.next_power_of_2(num_heads),
            "D": triton.next_power_of_2(head_dim),
            "num_warps": 4,
        },
    )


def move_launch(
    src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None, counts: Tensor | None
) -> Launch:
    """Copy block ``src_ids[i]`` of src to block ``dst_ids[i]`` of dst; no ids: 0, 1, 2, …

    counts  [n] int32, positions of each block to copy; all when None
    """
    ids = src_ids if src_ids is not None else dst_ids
    assert ids is not None
    block_shape = src.shape[1:]
    sizes, src_strides, dst_strides = merge_axes(block_shape, src.stride()[1:], dst.stride()[1:])
    if len(sizes) > MAX_AXES:
        raise ValueError(f"pool: expected at most {MAX_AXES} axes a block, got {len(sizes)}")
    num_elements = math.prod(block_shape)
    chunk = CHUNK_BYTES // src.element_size()
    return Launch(
        move_kernel,
        (ids.shape[0], triton.cdiv(num_elements, chunk)),
        (
            *(_as_integers(src), _as_integers(dst), src_ids, dst_ids, counts, num_elements),
            *(sizes, src_strides, dst_strides, src.stride(0), dst.stride(0)),
            *(math.prod(block_shape[-2:]), block_shape[-3]),
        ),
        {
            "NUM_AXES": len(sizes),
            "HAS_SRC_IDS": src_ids is not None,
            "HAS_DST_IDS": dst_ids is not None,
            "HAS_COUNTS": counts is not None,
            "CHUNK": chunk,
            "num_warps": 4,
        },
    )


def merge_axes(shape: tuple[int, ...], *strides: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """``(shape, *strides)`` with axes of size 1 dropped, and two axes made one where the first
    steps over exactly the second in every tensor."""
    axes = [axis for axis in zip(shape, *strides, strict=True) if axis[0] != 1]
    merged: list[tuple[int, ...]] = []
    for size, *steps in reversed(axes):
        if merged:
            inner_size, *inner_steps = merged[-1]
            if steps == [step * inner_size for step in inner_steps]:
                merged[-1] = (size * inner_size, *inner_steps)
                continue
        merged.append((size, *steps))
    merged = merged[::-1] or [(1,) * (1 + len(strides))]
    return tuple(zip(*merged, strict=True))


def _move(
    src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None, counts: Tensor | None
) -> None:
    launch = move_launch(src, dst, src_ids, dst_ids, counts)
    if math.prod(launch.grid):
        launch.run()


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])
