"""Attention of one query token per sequence, or of a few each, to its paged context.

The checks only; the kernel is in ``attention_triton.py``, its torch twin in ``reference.py``
(see ``paged_prefill.py`` for why they are apart).
"""

from torch import Tensor

from kernels import checks, reference


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    split_len: int | None = None,
) -> Tensor:
    """Attention of each sequence's last token to all its tokens in the pool.

    q             [num_seqs, num_heads, head_dim], float32, float16 or bfloat16; or
                  [num_seqs · m, …] for the last m tokens of each sequence (speculative decoding)
    k_pool        [num_blocks, block_size, num_kv_heads, head_dim], one layer's keys, a strided
                  view of the pool; holds the new token's key already
    v_pool        like k_pool
    block_tables  [num_seqs, max_blocks] int32, block ids in order of position; entries beyond
                  ceil(seq_len / block_size) are never read
    seq_lens      [num_seqs] int32, the new token included; 0 (padding of a batch) gives zeros
    scale, window, softcap, sinks, out, split_len
                  as in ``paged_prefill``

    Returns ``out``. On CUDA enqueued on the current stream, no synchronisation, and safe to capture
    in a graph: the grid follows the shapes, never the lengths. On the CPU the twin runs. Memory
    traffic: each visible key and value once, 2 · seq_len · num_kv_heads · head_dim elements a
    sequence. Raises ValueError on shapes, dtypes, devices, strides.
    """
    checks.check_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        cu_seqlens_q=None,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=out,
    )
    if out is None:
        out = q.new_empty(q.shape)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    operands = (q, k_pool, v_pool, block_tables, None, seq_lens)
    if not checks.runs_triton(q):
        return reference.attend(*operands, scale, window, softcap, sinks, split_len, out)
    from kernels import attention_launch

    checks.check_triton_attention(q, k_pool, v_pool, out)
    return attention_launch.attend(*operands, scale, window, softcap, sinks, split_len, out)
