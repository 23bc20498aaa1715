"""Run every kernel on operands that end at an unmapped page; run by test_memory.py, interpreted."""

import ctypes
import mmap
import sys

import torch
from attention_oracle import Case, expected_attention, make_case

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last one before a page that may not be touched."""
    size = tensor.numel() * tensor.element_size()
    readable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, readable + mmap.PAGESIZE)  # lives as long as the tensor
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + readable
    if _libc.mprotect(ctypes.c_void_p(guard), mmap.PAGESIZE, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=readable - size
    )
    return flat.view(tensor.shape).copy_(tensor)


def guard_case(case: Case) -> Case:
    """``case`` has adjacent blocks, and its longest sequence is the last and ends with a block."""
    block_size = case.k_pool.shape[1]
    counts = [-(-length // block_size) for length in case.seq_lens.tolist()]
    return Case(
        q=guarded(case.q),
        k_pool=guarded(case.k_pool[: sum(counts)]),
        v_pool=guarded(case.v_pool[: sum(counts)]),
        block_tables=guarded(case.block_tables[:, : counts[-1]]),
        cu_seqlens_q=guarded(case.cu_seqlens_q),
        seq_lens=guarded(case.seq_lens),
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        sinks=guarded(case.sinks),
    )


def run_attention(head_dim: int, block_size: int, num_new: int) -> None:
    length = 12 * block_size
    case = make_case(
        [(5, num_new), (length - num_new, num_new)],
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float16,
        with_sinks=True,
        adjacent=True,
    )
    case = guard_case(case)
    out = guarded(torch.empty(case.q.shape, dtype=case.q.dtype))
    pools, tables = (case.k_pool, case.v_pool), case.block_tables
    print(f"prefill-{head_dim}", flush=True)
    paged_prefill(case.q, *pools, tables, case.cu_seqlens_q, case.seq_lens, **case.options, out=out)
    torch.testing.assert_close(out.double(), expected_attention(case), rtol=0, atol=4e-3)
    print(f"decode-{head_dim}", flush=True)
    paged_decode(case.q, *pools, tables, case.seq_lens, **case.options, out=out)
    torch.testing.assert_close(out.double(), expected_attention(case), rtol=0, atol=4e-3)


def run_movement() -> None:
    """Sizes that fill no chunk and no power of two."""
    pool = guarded(torch.randn(5, 3, 2, 7, 3, 20))
    ids = guarded(torch.tensor([4, 0], dtype=torch.int32))
    others = guarded(torch.tensor([3, 1], dtype=torch.int32))
    staged = guarded(torch.empty(2, *pool.shape[1:]))
    print("gather", flush=True)
    gather_blocks(pool, ids, staged)
    assert torch.equal(staged, pool[[4, 0]])
    print("scatter", flush=True)
    scatter_blocks(staged, pool, ids)
    print("copy", flush=True)
    copy_blocks(pool, others, ids, guarded(torch.tensor([7, 2], dtype=torch.int32)))
    print("write", flush=True)
    k_pool, v_pool = (guarded(torch.zeros(4, 7, 3, 20)) for _ in range(2))
    k, v = (guarded(torch.randn(3, 3, 20)) for _ in range(2))
    write_kv(k, v, k_pool, v_pool, guarded(torch.tensor([27, -1, 0])))
    assert torch.equal(k_pool[3, 6], k[0])


if sys.argv[1] == "kernels":
    run_attention(head_dim=64, block_size=16, num_new=3)
    run_attention(head_dim=80, block_size=24, num_new=1)
    run_attention(head_dim=128, block_size=64, num_new=5)
    run_attention(head_dim=192, block_size=8, num_new=2)
    run_movement()
    print("done", flush=True)
else:
    ctypes.string_at(guarded(torch.zeros(4)).data_ptr() + 16, 1)
