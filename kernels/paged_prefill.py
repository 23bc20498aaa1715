"""Attention of a ragged batch of query chunks to their paged prefix and to themselves, causal.

The checks only; the kernel is in ``attention_triton.py``, its torch twin in ``reference.py``. The
Triton side lives in modules of its own because importing Triton takes 0.4 s, which a process that
only runs the twin need not pay.
"""

from torch import Tensor

from kernels import checks, reference


def paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    split_len: int | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens to all its tokens in the pool.

    q             [num_tokens, num_heads, head_dim], float32, float16 or bfloat16; the new tokens of
                  all sequences one after the other
    k_pool        [num_blocks, block_size, num_kv_heads, head_dim], one layer's keys, a strided
                  view of the pool; holds the new tokens' keys already
    v_pool        like k_pool
    block_tables  [num_seqs, max_blocks] int32, block ids in order of position; entries beyond
                  ceil(seq_len / block_size) are never read
    cu_seqlens_q  [num_seqs + 1] int32: sequence i owns rows cu[i] to cu[i + 1] of q, its last
                  positions; none is fine
    seq_lens      [num_seqs] int32, prefix plus new tokens; 0 gives zeros
    scale         of the products, head_dim ** -0.5 when None
    window        number of positions a query sees, itself included; None for all
    softcap       scores become softcap · tanh(score / softcap)
    sinks         [num_heads] float32, logits that take part in the softmax and carry no value
    out           like q, caller-owned; allocated when None. Rows no sequence owns are undefined
    split_len     positions that one program walks before another takes over, so that the order of
                  additions does not depend on what else is in the batch (deterministic mode); None
                  for as many as keep the device busy. The twin never splits; given a length, it
                  does not batch short sequences either

    Returns ``out``. On CUDA enqueued on the current stream, no synchronisation; on the CPU the twin
    runs. Memory traffic: each sequence's keys and values once per 128 rows of packed queries, q
    and out once. Raises ValueError on shapes, dtypes, devices, strides.
    """
    checks.check_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        window=window,
        softcap=softcap,
        sinks=sinks,
        out=out,
    )
    if out is None:
        out = q.new_empty(q.shape)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    operands = (q, k_pool, v_pool, block_tables, cu_seqlens_q, seq_lens)
    if not checks.runs_triton(q):
        return reference.attend(*operands, scale, window, softcap, sinks, split_len, out)
    from kernels import attention_launch

    checks.check_triton_attention(q, k_pool, v_pool, out)
    return attention_launch.attend(*operands, scale, window, softcap, sinks, split_len, out)
