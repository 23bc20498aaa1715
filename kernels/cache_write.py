"""Writing the new tokens' keys and values into the paged pool.

The checks only; the kernel is in ``movement_triton.py``, its torch twin in ``reference.py``
(see ``paged_prefill.py`` for why they are apart).
"""

import torch
from torch import Tensor

from kernels import checks, reference


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's key and value of one layer into its slot.

    k, v          [num_tokens, num_kv_heads, head_dim], any strides but the last, which is 1
    k_pool        [num_blocks, block_size, num_kv_heads, head_dim], a strided view; written
    v_pool        like k_pool; written
    slot_mapping  [num_tokens] int64, block id · block_size + offset, each in the pool and none
                  twice; negative for padding, which is skipped

    On CUDA enqueued on the current stream, no synchronisation. Memory traffic: k and v read and
    written once. Raises ValueError on shapes, dtypes, devices.
    """
    checks.expect("k", "number of axes", 3, k.ndim)
    checks.expect("v", "shape of k", tuple(k.shape), tuple(v.shape))
    checks.expect("v", "dtype of k", k.dtype, v.dtype)
    for name, tensor in (("k", k), ("v", v)):
        checks.expect(name, "last stride", 1, tensor.stride(-1))
    checks.check_pools(k_pool, v_pool, k.dtype)
    checks.expect("k", "heads and head_dim of k_pool", tuple(k_pool.shape[2:]), tuple(k.shape[1:]))
    checks.check_int("slot_mapping", slot_mapping, torch.int64, (k.shape[0],))
    checks.check_same_device(k, v=v, k_pool=k_pool, v_pool=v_pool, slot_mapping=slot_mapping)
    run = reference.write_kv
    if checks.runs_triton(k):
        from kernels.movement_launch import write_kv as run
    run(k, v, k_pool, v_pool, slot_mapping)
