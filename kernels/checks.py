"""What the launchers check before a kernel runs, and which kind of kernel runs.

Every check reads shapes, strides, dtypes and devices only: never a tensor's values, which on a GPU
would wait for the device. A failed check is a ``ValueError`` of one line: name, expected, got.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_TRITON_HEAD_DIM = 256


def runs_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernel runs for this tensor: on CUDA, or interpreted when asked for.

    Triton reads ``TRITON_INTERPRET`` when it is first imported, so set it before the process does.
    """
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def expect(name: str, what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ValueError(f"{name}: expected {what} {expected}, got {got}")


def check_int(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """An index tensor of exactly this dtype and shape; a cast would hide a copy per step."""
    expect(name, "dtype", dtype, tensor.dtype)
    expect(name, "shape", tuple(shape), tuple(tensor.shape))


def check_same_device(reference: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        expect(name, "device", reference.device, tensor.device)


def check_pools(k_pool: Tensor, v_pool: Tensor, dtype: torch.dtype) -> None:
    """``[num_blocks, block_size, num_kv_heads, head_dim]``, K and V alike, last stride 1."""
    expect("k_pool", "number of axes", 4, k_pool.ndim)
    expect("v_pool", "shape of k_pool", tuple(k_pool.shape), tuple(v_pool.shape))
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        expect(name, "dtype", dtype, pool.dtype)
        expect(name, "last stride", 1, pool.stride(-1))


def check_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    """The arguments that ``paged_prefill`` and ``paged_decode`` share."""
    expect("q", "number of axes", 3, q.ndim)
    if q.dtype not in FLOATS:
        raise ValueError(f"q: expected float32, float16 or bfloat16, got {q.dtype}")
    expect("q", "last stride", 1, q.stride(-1))
    check_pools(k_pool, v_pool, q.dtype)
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[2]
    expect("k_pool", "head_dim of q", head_dim, k_pool.shape[3])
    if num_heads % num_kv_heads:
        raise ValueError(f"q: expected a multiple of {num_kv_heads} heads, got {num_heads}")
    num_seqs = seq_lens.shape[0]
    check_int("seq_lens", seq_lens, torch.int32, (num_seqs,))
    check_int("block_tables", block_tables, torch.int32, (num_seqs, *block_tables.shape[1:2]))
    if cu_seqlens_q is None:
        if q.shape[0] % max(1, num_seqs):
            raise ValueError(f"q: expected a multiple of {num_seqs} rows, got {q.shape[0]}")
    else:
        check_int("cu_seqlens_q", cu_seqlens_q, torch.int32, (num_seqs + 1,))
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 (the query itself), got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected a positive number or None, got {softcap}")
    if sinks is not None:
        check_int("sinks", sinks, torch.float32, (num_heads,))
    if out is not None:
        expect("out", "shape", tuple(q.shape), tuple(out.shape))
        expect("out", "dtype", q.dtype, out.dtype)
        expect("out", "last stride", 1, out.stride(-1))
    others = {"cu_seqlens_q": cu_seqlens_q, "sinks": sinks, "out": out}
    check_same_device(
        q,
        k_pool=k_pool,
        v_pool=v_pool,
        block_tables=block_tables,
        seq_lens=seq_lens,
        **{name: tensor for name, tensor in others.items() if tensor is not None},
    )


def check_triton_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor) -> None:
    """What the Triton attention kernels rely on beyond the twin: 16-byte loads of whole rows."""
    head_dim = q.shape[-1]
    if head_dim % 16 or head_dim > MAX_TRITON_HEAD_DIM:
        raise ValueError(
            f"q: expected a head_dim that is a multiple of 16 up to {MAX_TRITON_HEAD_DIM}, "
            f"got {head_dim}"
        )
    expect("v_pool", "strides of k_pool", k_pool.stride(), v_pool.stride())
    for name, tensor in (("q", q), ("k_pool", k_pool), ("out", out)):
        for stride in tensor.stride()[:-1]:
            if stride % 16:
                raise ValueError(f"{name}: expected strides that are multiples of 16, got {stride}")
    block_size = k_pool.shape[1]
    if not 8 <= block_size <= 256:
        raise ValueError(f"k_pool: expected a block_size of 8 to 256, got {block_size}")
