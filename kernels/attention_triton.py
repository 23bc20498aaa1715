"""Paged attention in Triton: one kernel for prefill and decode, and the reduction of its splits.

Grid ``(query blocks, num_kv_heads, num_splits)``. One program takes a block of consecutive query
tokens of one sequence, with all query heads of one KV head packed as rows (row r is token r // G,
head r % G), so that each key and value is loaded once for all of them; it walks key tiles of N
positions with a running maximum and sum (flash attention) and writes its rows.

- Key tiles start at multiples of N from position 0, whatever the chunk: a tile that a query does
  not see changes nothing in its result, so the result does not depend on where the chunk began.
- The walk is three loops: tiles cut by the window's left edge (masked), tiles that every query
  sees (unmasked, most of them), tiles on the diagonal (masked).
- A tile's block ids are loaded one iteration ahead and carried in a loop variable. With the lookup
  inside the iteration the loads of K and V would depend on it, and the compiler's pipeline would
  silently be two stages deep instead of ``num_stages``.
- With splits, each program walks a part of the tiles and writes its normalised rows and the
  base-2 logarithm of their sum to scratch; ``reduce_kernel`` merges them. That keeps a GPU busy
  when there are few query blocks: decoding, or a short question on a long prefix.
- A head_dim that is no power of two is two dots (80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64) rather
  than one padded dot, which would waste up to 37 % of the products.
- Exponentials are base 2, with log2(e) folded into the scale. Ids are widened to 64 bits before
  they meet a stride: a pool of an 8B model passes 2^31 elements at 2,048 blocks.
"""

# mypy: ignore-errors
# (the language of kernels has no types that a checker knows)

import triton
import triton.language as tl

_INDEX_POINTERS = ["block_tables_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "sinks_ptr"]
_COUNTS = ["num_seqs", "num_new_each", "window", "split_tiles", "num_splits", "stride_table"]


@triton.jit
def _find_sequence(cu_seqlens_ptr, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first block, ``cu[seq] // BLOCK_Q + seq``, is not after ``block``.

    Giving sequence i its blocks from there on leaves each enough of them, at most one too many.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tiles(
    acc0,
    acc1,
    total,
    top,
    q0,
    q1,
    k_ptr,  # of this KV head; a tensor descriptor when TMA
    v_ptr,
    table_ptr,  # of this sequence
    kv_head,
    begin,  # tiles
    end,
    num_keys,  # positions from here on are not visible to the block, nor is their memory touched
    position,  # [M], of each row
    window,
    scale,
    softcap,
    stride_kb,  # of both pools
    stride_ks,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Walk the key tiles ``begin`` to ``end``; see the module for what a tile does."""
    column = tl.arange(0, N)
    d0 = tl.arange(0, D0)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
    if TMA:
        ids = tl.load(table_ptr + begin * N // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        first = begin * N + column
        ids = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < num_keys, other=0)
    for tile in range(begin, end):
        key = tile * N + column
        seen = (key < num_keys)[:, None]
        if TMA:
            next_ids = tl.load(
                table_ptr + (tile + 1) * N // BLOCK_SIZE, mask=tile + 1 < end, other=0
            )
            where = tile * N % BLOCK_SIZE
            k0 = k_ptr.load([ids, where, kv_head, 0]).reshape(N, D0)
        else:
            next_ids = tl.load(
                table_ptr + (key + N) // BLOCK_SIZE, mask=key + N < num_keys, other=0
            )
            row = (ids.to(tl.int64) * stride_kb + (key % BLOCK_SIZE) * stride_ks)[:, None]
            if MASKED:
                k0 = tl.load(k_ptr + row + d0[None, :], mask=seen, other=0.0)
            else:
                k0 = tl.load(k_ptr + row + d0[None, :])
        scores = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            if MASKED or D0 + D1 > HEAD_DIM:
                k1 = tl.load(
                    k_ptr + row + d1[None, :], mask=seen & (d1 < HEAD_DIM)[None, :], other=0.0
                )
            else:
                k1 = tl.load(k_ptr + row + d1[None, :])
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision=PRECISION)
        if HAS_SOFTCAP:
            # scale is 2 log2(e) scale / softcap here, so that the exponential is e^(2x).
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0))
        else:
            scores = scores * scale
        if MASKED:
            visible = key[None, :] <= position[:, None]
            if HAS_WINDOW:
                visible = visible & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = new_top
        if MASKED:
            # A row may have seen nothing yet, and -inf minus -inf is NaN.
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        top = new_top
        if TMA:
            v0 = v_ptr.load([ids, where, kv_head, 0]).reshape(N, D0)
            if MASKED:
                # The copy engine brings the whole tile; unwritten slots may hold NaN, and 0 · NaN
                # is NaN.
                v0 = tl.where(seen, v0, 0.0)
        elif MASKED:
            v0 = tl.load(v_ptr + row + d0[None, :], mask=seen, other=0.0)
        else:
            v0 = tl.load(v_ptr + row + d0[None, :])
        weights = weights.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0 * decay[:, None], input_precision=PRECISION)
        if D1 > 0:
            if MASKED or D0 + D1 > HEAD_DIM:
                v1 = tl.load(
                    v_ptr + row + d1[None, :], mask=seen & (d1 < HEAD_DIM)[None, :], other=0.0
                )
            else:
                v1 = tl.load(v_ptr + row + d1[None, :])
            acc1 = tl.dot(weights, v1, acc1 * decay[:, None], input_precision=PRECISION)
        ids = next_ids
    return acc0, acc1, total, top


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_INDEX_POINTERS)
def attention_kernel(
    q_ptr,
    k_ptr,  # a tensor descriptor when TMA
    v_ptr,
    out_ptr,  # [num_splits, num_tokens, num_heads, head_dim] float32 scratch when SPLIT
    lse_ptr,  # [num_splits, num_tokens, num_heads] float32, when SPLIT
    block_tables_ptr,
    cu_seqlens_ptr,  # when RAGGED
    seq_lens_ptr,
    sinks_ptr,  # when HAS_SINKS
    scale,
    softcap,
    num_seqs,
    num_new_each,  # query tokens of each sequence, when not RAGGED
    window,
    split_tiles,  # tiles of one split from position 0 on; 0: share a block's tiles evenly
    num_splits,
    stride_table,
    stride_qt,
    stride_qh,
    stride_kb,  # of both pools: shared offsets save the registers of a second set
    stride_ks,
    stride_kh,
    stride_op,
    stride_ot,
    stride_oh,
    stride_lp,
    stride_lt,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    RAGGED: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = M // HEADS_PER_KV  # query tokens of a block
    LOG2E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if RAGGED:
        # Later blocks see more keys: start the longest first, so that none is left for the end.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = _find_sequence(cu_seqlens_ptr, block, num_seqs, BLOCK_Q)
        first_token = tl.load(cu_seqlens_ptr + seq)
        num_new = tl.load(cu_seqlens_ptr + seq + 1) - first_token
        first = (block - first_token // BLOCK_Q - seq) * BLOCK_Q
        if first >= num_new:
            return
    else:
        seq = tl.program_id(0)
        num_new = num_new_each
        first_token = seq * num_new
        first = 0
    prefix = tl.load(seq_lens_ptr + seq) - num_new

    row = tl.arange(0, M)
    new = first + row // HEADS_PER_KV  # among the sequence's new tokens
    head = kv_head * HEADS_PER_KV + row % HEADS_PER_KV
    is_query = (row < BLOCK_Q * HEADS_PER_KV) & (new < num_new)
    position = prefix + new
    token = (first_token + new).to(tl.int64)
    d0 = tl.arange(0, D0)
    q_row = q_ptr + token * stride_qt + head * stride_qh
    q0 = tl.load(q_row[:, None] + d0[None, :], mask=is_query[:, None], other=0.0)
    q1 = q0
    acc0 = tl.zeros([M, D0], dtype=tl.float32)
    acc1 = acc0
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1)
        in_head = is_query[:, None] & (d1 < HEAD_DIM)[None, :]
        q1 = tl.load(q_row[:, None] + d1[None, :], mask=in_head, other=0.0)
        acc1 = tl.zeros([M, D1], dtype=tl.float32)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if HAS_SINKS and not SPLIT:
        top = tl.load(sinks_ptr + head, mask=is_query, other=0.0) * LOG2E
        total += 1.0

    # Tiles that some query of the block sees, then this split's share of them.
    first_position = prefix + first
    last_position = prefix + tl.minimum(first + BLOCK_Q, num_new) - 1
    num_keys = last_position + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // N
    end = (tl.maximum(num_keys, 0) + N - 1) // N
    if SPLIT:
        if split_tiles > 0:
            begin = tl.maximum(begin, split * split_tiles)
            end = tl.minimum(end, (split + 1) * split_tiles)
        else:
            share = (end - begin + num_splits - 1) // num_splits
            begin += split * share
            end = tl.minimum(end, begin + share)
    # Of these, the tiles that every query sees whole.
    whole_begin = begin
    if HAS_WINDOW:
        left = (tl.maximum(last_position - window + 1, 0) + N - 1) // N
        whole_begin = tl.maximum(begin, tl.minimum(left, end))
    whole_end = tl.maximum(whole_begin, tl.minimum((first_position + 1) // N, end))

    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    if not TMA:
        k_ptr += kv_head * stride_kh
        v_ptr += kv_head * stride_kh
    # fmt: off
    if HAS_WINDOW:
        acc0, acc1, total, top = _attend_tiles(
            acc0, acc1, total, top, q0, q1, k_ptr, v_ptr, table_ptr, kv_head, begin, whole_begin,
            num_keys, position, window, scale, softcap, stride_kb, stride_ks,
            HEAD_DIM, D0, D1, BLOCK_SIZE, N, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, TMA)
    acc0, acc1, total, top = _attend_tiles(
        acc0, acc1, total, top, q0, q1, k_ptr, v_ptr, table_ptr, kv_head, whole_begin, whole_end,
        num_keys, position, window, scale, softcap, stride_kb, stride_ks,
        HEAD_DIM, D0, D1, BLOCK_SIZE, N, False, HAS_WINDOW, HAS_SOFTCAP, PRECISION, TMA)
    acc0, acc1, total, top = _attend_tiles(
        acc0, acc1, total, top, q0, q1, k_ptr, v_ptr, table_ptr, kv_head, whole_end, end,
        num_keys, position, window, scale, softcap, stride_kb, stride_ks,
        HEAD_DIM, D0, D1, BLOCK_SIZE, N, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION, TMA)
    # fmt: on

    # Nothing seen (a sequence of length 0, an empty split) gives zeros.
    divisor = tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + token * stride_ot + head * stride_oh
    if SPLIT:
        out_row += split.to(tl.int64) * stride_op
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor))
        lse_row = lse_ptr + split.to(tl.int64) * stride_lp + token * stride_lt + head
        tl.store(lse_row, lse, mask=is_query)
        if begin >= end:  # the reduction does not read the rest
            return
    acc0 = acc0 / divisor[:, None]
    out0 = out_row[:, None] + d0[None, :]
    tl.store(out0, acc0.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
    if D1 > 0:
        acc1 = acc1 / divisor[:, None]
        out1 = out_row[:, None] + d1[None, :]
        tl.store(out1, acc1.to(out_ptr.dtype.element_ty), mask=in_head)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["sinks_ptr"])
def reduce_kernel(
    partial_ptr,  # [num_splits, num_tokens, num_heads, head_dim] float32
    lse_ptr,  # [num_splits, num_tokens, num_heads] float32, base 2
    sinks_ptr,
    out_ptr,
    num_splits,
    stride_pp,
    stride_pt,
    stride_ph,
    stride_lp,
    stride_lt,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,  # head_dim rounded up to a power of two
    SPLITS: tl.constexpr,  # num_splits rounded up to a power of two
    HAS_SINKS: tl.constexpr,
):
    """One program a token and head: the mean of its splits' rows, weighted by their sums."""
    LOG2E: tl.constexpr = 1.4426950408889634
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    lse_row = lse_ptr + token * stride_lt + head
    lse = tl.load(
        lse_row + split.to(tl.int64) * stride_lp, mask=split < num_splits, other=float("-inf")
    )
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    d = tl.arange(0, D)
    acc = tl.zeros([D], dtype=tl.float32)
    row = partial_ptr + token * stride_pt + head * stride_ph + d
    for _ in range(num_splits):
        part_lse = tl.load(lse_row)
        # An empty split wrote no row: its memory may hold anything.
        filled = tl.where(part_lse > float("-inf"), HEAD_DIM, 0)
        acc += tl.load(row, mask=d < filled, other=0.0) * tl.exp2(part_lse - top)
        lse_row += stride_lp
        row += stride_pp
    acc = acc / tl.where(total == 0.0, 1.0, total)
    out = out_ptr + token * stride_ot + head * stride_oh + d
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
