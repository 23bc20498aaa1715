"""Moving whole blocks between the paged pool and contiguous staging, and inside the pool.

Checks only; the kernels are in ``movement_triton.py``, their torch twins in ``reference.py``
(see ``paged_prefill.py`` for why they are apart). A pool here is
``[num_blocks, …, block_size, num_kv_heads, head_dim]`` with any strides, so the whole pool, a group
of layers ``pool[:, a:b]`` and one layer ``pool[:, l]`` are moved by the same call, in one launch.
"""

import torch
from torch import Tensor

from kernels import checks, reference


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy blocks out of the pool into one staging buffer.

    pool       [num_blocks, …, block_size, num_kv_heads, head_dim], any dtype and strides
    block_ids  [n] int32, each in [0, num_blocks); duplicates are fine
    out        [n, …] like the pool's blocks, caller-owned; allocated when None

    Returns ``out``. On CUDA enqueued on the current stream, no synchronisation. Memory traffic: the
    n blocks read and written once. Raises ValueError on shapes, dtypes, devices.
    """
    _check_ids(pool, block_ids=block_ids)
    shape = (block_ids.shape[0], *pool.shape[1:])
    if out is None:
        out = pool.new_empty(shape)
    _check_staging("out", out, pool, shape)
    run = reference.gather_blocks
    if checks.runs_triton(pool):
        from kernels.movement_launch import gather_blocks as run
    return run(pool, block_ids, out)


def scatter_blocks(src: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """Copy blocks from a staging buffer into the pool.

    src        [n, …] like the pool's blocks; read
    pool       [num_blocks, …, block_size, num_kv_heads, head_dim], any dtype and strides; written
    block_ids  [n] int32, each in [0, num_blocks), none twice

    On CUDA enqueued on the current stream, no synchronisation. Memory traffic: the n blocks read
    and written once. Raises ValueError on shapes, dtypes, devices.
    """
    _check_ids(pool, block_ids=block_ids)
    _check_staging("src", src, pool, (block_ids.shape[0], *pool.shape[1:]))
    run = reference.scatter_blocks
    if checks.runs_triton(pool):
        from kernels.movement_launch import scatter_blocks as run
    run(src, pool, block_ids)


def copy_blocks(
    pool: Tensor, src_ids: Tensor, dst_ids: Tensor, num_tokens: int | Tensor | None = None
) -> None:
    """Copy blocks inside the pool: ``dst_ids[i]`` gets the first tokens of ``src_ids[i]``.

    pool        [num_blocks, …, block_size, num_kv_heads, head_dim], any dtype and strides
    src_ids     [n] int32, each in [0, num_blocks)
    dst_ids     [n] int32, each in [0, num_blocks), none twice and none a source
    num_tokens  positions copied per block: all when None, one number, or [n] int32

    A destination that is also a source would make the result depend on the order of the copies,
    which a GPU does not have. Ids on the CPU are checked for that (and moved to the pool's device
    without waiting); ids on CUDA are the caller's promise, for reading them would wait for the
    device. Memory traffic: what is copied, read and written once. Raises ValueError on overlap,
    shapes, dtypes, devices.
    """
    _check_ids(pool, src_ids=src_ids, dst_ids=dst_ids)
    checks.expect("dst_ids", "length of src_ids", src_ids.shape[0], dst_ids.shape[0])
    block_size = pool.shape[-3]
    if isinstance(num_tokens, Tensor):
        checks.check_int("num_tokens", num_tokens, torch.int32, tuple(src_ids.shape))
    elif num_tokens is not None and not 0 <= num_tokens <= block_size:
        raise ValueError(f"num_tokens: expected 0 to {block_size}, got {num_tokens}")
    _check_no_overlap(src_ids, dst_ids)
    run = reference.copy_blocks
    if checks.runs_triton(pool):
        from kernels.movement_launch import copy_blocks as run
    if isinstance(num_tokens, Tensor):
        num_tokens = num_tokens.to(pool.device, non_blocking=True)
    run(
        pool,
        src_ids.to(pool.device, non_blocking=True),
        dst_ids.to(pool.device, non_blocking=True),
        num_tokens,
    )


def _check_ids(pool: Tensor, **ids: Tensor) -> None:
    if pool.ndim < 4:
        raise ValueError(f"pool: expected at least 4 axes, got {pool.ndim}")
    for name, tensor in ids.items():
        checks.check_int(name, tensor, torch.int32, (tensor.numel(),))


def _check_staging(name: str, staging: Tensor, pool: Tensor, shape: tuple[int, ...]) -> None:
    checks.expect(name, "shape", shape, tuple(staging.shape))
    checks.expect(name, "dtype", pool.dtype, staging.dtype)
    checks.check_same_device(pool, **{name: staging})


def _check_no_overlap(src_ids: Tensor, dst_ids: Tensor) -> None:
    if src_ids.is_cuda or dst_ids.is_cuda:
        return
    sources, destinations = set(src_ids.tolist()), dst_ids.tolist()
    if len(set(destinations)) < len(destinations):
        raise ValueError("dst_ids: expected no block twice, got duplicates")
    both = sources.intersection(destinations)
    if both:
        raise ValueError(f"dst_ids: expected none of src_ids, got block {min(both)} in both")
