"""The torch twins: what runs on CPU, and the oracle the Triton kernels are held to.

Exact in float32 (1e-5 of float64) for any head_dim and block size. In bfloat16 the two products
run in bfloat16 as the eager attention of transformers does: scores are rounded once to bfloat16
before a softmax that is computed in float32. That is what makes them fast: on a CPU, torch's own
flash attention multiplies bfloat16 no faster than float32, while its plain matrix product runs on
the bfloat16 units (see docs/kernels.md for the measurements behind each choice here).

A call goes in three steps. *Plan*: read the metadata tensors once and turn block tables into runs
of adjacent blocks; the plan is kept while the metadata stays equal, that is for all layers of a
step. *Gather*: K and V of a sequence into one buffer ``[num_kv_heads, positions, head_dim]`` that
is reused from call to call, a run at a time. *Attend*: for a tile of query positions two batched
matrix products around one softmax over the whole visible row, all query heads of a KV head packed
as rows of the same product, so that K and V are never repeated.

Memory traffic of one call: each visible K and V byte is read once, written once and read once per
tile; scores are written and read three times.
"""

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Rows of one tile (query positions × heads per KV head): enough to keep the matrix units busy, few
# enough that a tile's scores over a few thousand positions stay in the cache. Measured: 192 and 768
# are both slower for 3,000 tokens of SmolLM2-135M.
TILE_ROWS = 384
# Most scores of one tile, in elements; a longer context gets tiles of fewer rows.
MAX_TILE_SCORES = 1 << 24
# Decode batches sequences of similar length into one padded product; the part that may be padding.
MAX_PADDING = 0.25
# Most positions gathered for one padded decode product, padding included.
MAX_GROUP_POSITIONS = 1 << 15


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks that some queries see, in order of position.

    origin   position of the first slot of the first block
    runs     (first block id, index of the first block, number of blocks), adjacent ids merged;
             empty when so fragmented that picking block by block is cheaper
    """

    origin: int
    count: int
    ids: Tensor
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several query tokens of one sequence: rows ``first_row`` to ``last_row`` of q."""

    first_row: int
    last_row: int
    seq_len: int
    blocks: _Blocks


@dataclass(frozen=True, slots=True)
class _Group:
    """One query token each of several sequences, padded to the same number of blocks.

    rows     rows of q, int64 [num_seqs]
    length   gathered positions per sequence
    hidden   bool [num_seqs, length], positions that the query does not see; None when there is none
    """

    rows: Tensor
    length: int
    hidden: Tensor | None
    blocks: _Blocks


@dataclass(frozen=True, slots=True)
class _Plan:
    chunks: tuple[_Chunk, ...]
    groups: tuple[_Group, ...]
    zero_rows: Tensor | None


class _Scratch(threading.local):
    """Buffers and plans that a thread's calls reuse; they grow to the largest call and stay."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.plans: dict[tuple[int, int | None, bool], tuple[tuple[Tensor | None, ...], _Plan]] = {}

    def buffer(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with undefined contents, valid until the next call by that name."""
        size = math.prod(shape)
        flat = self.buffers.get(name)
        if flat is None or flat.dtype != dtype or flat.device != like.device or len(flat) < size:
            flat = self.buffers[name] = torch.empty(size, dtype=dtype, device=like.device)
        return flat[:size].view(*shape)


_scratch = _Scratch()


def paged_prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Twin of the Triton prefill kernel; arguments as in ``kernels.paged_prefill``."""
    plan = _plan(block_tables, cu_seqlens_q, seq_lens, k_pool.shape[1], window)
    return _attend(q, k_pool, v_pool, plan, scale, window, softcap, sinks, out)


def paged_decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Twin of the Triton decode kernel; arguments as in ``kernels.paged_decode``."""
    plan = _plan(block_tables, None, seq_lens, k_pool.shape[1], window)
    return _attend(q, k_pool, v_pool, plan, scale, window, softcap, sinks, out)


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Twin of the Triton cache write; arguments as in ``kernels.cache_write``."""
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block_size = k_pool.shape[1]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    k_pool.index_put_(where, k)
    v_pool.index_put_(where, v)


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> Tensor:
    return torch.index_select(pool, 0, block_ids, out=out)


def scatter_blocks(src: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    pool.index_copy_(0, block_ids.long(), src)


def copy_blocks(
    pool: Tensor, src_ids: Tensor, dst_ids: Tensor, num_tokens: int | Tensor | None
) -> None:
    if num_tokens is None or isinstance(num_tokens, int):
        part = pool if num_tokens is None else pool.narrow(-3, 0, num_tokens)
        part.index_copy_(0, dst_ids.long(), part[src_ids.long()])
        return
    for src, dst, count in zip(
        src_ids.tolist(), dst_ids.tolist(), num_tokens.tolist(), strict=True
    ):
        pool[dst].narrow(-3, 0, count).copy_(pool[src].narrow(-3, 0, count))


# --- plan ---------------------------------------------------------------------------------------


def _plan(
    block_tables: Tensor,
    cu_seqlens_q: Tensor | None,
    seq_lens: Tensor,
    block_size: int,
    window: int | None,
) -> _Plan:
    """The plan of this metadata, kept from the previous call when the metadata is equal.

    Equal by content, not by identity: a caller may rewrite the same tensors every step (through
    numpy even, where no version counter moves), and a stale plan would be a wrong answer. Comparing
    costs a few microseconds, planning anew per layer about a millisecond per 100 sequences.
    """
    key = (block_size, window, cu_seqlens_q is None)
    metadata = (block_tables, cu_seqlens_q, seq_lens)
    kept = _scratch.plans.get(key)
    if kept is not None and all(map(_same, kept[0], metadata)):
        return kept[1]
    lengths = seq_lens.tolist()
    firsts = list(range(len(lengths) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    plan = _make_plan(block_tables, firsts, lengths, block_size, window)
    if len(_scratch.plans) >= 8:
        _scratch.plans.clear()
    _scratch.plans[key] = (tuple(None if t is None else t.clone() for t in metadata), plan)
    return plan


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.device == b.device and torch.equal(a, b)


def _make_plan(
    tables: Tensor, firsts: list[int], lengths: list[int], block_size: int, window: int | None
) -> _Plan:
    chunks: list[_Chunk] = []
    singles: list[tuple[int, int, int]] = []  # (number of blocks seen, sequence, row of q)
    device = tables.device
    tables = tables.to("cpu")
    zero_rows: list[int] = []
    for seq, seq_len in enumerate(lengths):
        first, last = firsts[seq], firsts[seq + 1]
        num_new = last - first
        if seq_len == 0:
            zero_rows.extend(range(first, last))
            continue
        if num_new > seq_len:
            raise ValueError(
                f"seq_lens: expected at least the {num_new} new tokens of sequence {seq}, "
                f"got {seq_len}"
            )
        if num_new == 0:
            continue
        begin = _first_block(seq_len - num_new, block_size, window)
        end = -(-seq_len // block_size)
        if num_new == 1:
            singles.append((end - begin, seq, first))
        else:
            blocks = _blocks(tables[seq, begin:end], begin * block_size, device)
            chunks.append(_Chunk(first, last, seq_len, blocks))
    groups = [
        _group(members, tables, lengths, block_size, window, device)
        for members in _group_by_length(sorted(singles), block_size)
    ]
    rows = torch.tensor(zero_rows, device=device) if zero_rows else None
    return _Plan(tuple(chunks), tuple(groups), rows)


def _first_block(first_query: int, block_size: int, window: int | None) -> int:
    """Index of the first block that a query at this position sees."""
    return 0 if window is None else max(0, first_query - window + 1) // block_size


def _blocks(ids: Tensor, origin: int, device: torch.device) -> _Blocks:
    """``ids``: int32 on the CPU, one sequence's or several of equal number one after the other."""
    ids = ids.long()
    starts = [0, *((ids[1:] - ids[:-1] != 1).nonzero().squeeze(1) + 1).tolist(), len(ids)]
    runs = tuple(
        (int(ids[first]), first, last - first)
        for first, last in itertools.pairwise(starts)
        if len(starts) <= max(2, len(ids) // 8)
    )
    return _Blocks(origin, len(ids), ids.to(device), runs)


def _group_by_length(
    singles: list[tuple[int, int, int]], block_size: int
) -> list[list[tuple[int, int, int]]]:
    """Cut the list, sorted by length, where padding or the buffer would grow too large."""
    groups: list[list[tuple[int, int, int]]] = []
    used = 0
    for single in singles:
        used += single[0]
        padded = single[0] * (len(groups[-1]) + 1) if groups else 0
        if (
            not groups
            or padded - used > MAX_PADDING * padded
            or padded * block_size > MAX_GROUP_POSITIONS
        ):
            groups.append([])
            used = single[0]
        groups[-1].append(single)
    return groups


def _group(
    members: list[tuple[int, int, int]],
    tables: Tensor,
    lengths: list[int],
    block_size: int,
    window: int | None,
    device: torch.device,
) -> _Group:
    rows = torch.tensor([row for _, _, row in members])
    width = members[-1][0]
    lens = torch.tensor([lengths[seq] for _, seq, _ in members])
    origins = torch.tensor(
        [_first_block(lengths[seq] - 1, block_size, window) * block_size for _, seq, _ in members]
    )
    if len(members) == 1:
        seq, begin = members[0][1], int(origins[0]) // block_size
        blocks = _blocks(tables[seq, begin : begin + width], int(origins[0]), device)
        length = int(lens[0] - origins[0])
    else:
        ids = []
        for (count, seq, _), origin in zip(members, origins.tolist(), strict=True):
            begin = origin // block_size
            seen = tables[seq, begin : begin + count]
            ids.append(torch.cat([seen, seen[-1:].expand(width - count)]))
        blocks = _blocks(torch.cat(ids), 0, device)
        length = width * block_size
    positions = origins[:, None] + torch.arange(length)
    hidden = positions >= lens[:, None]
    if window is not None:
        hidden |= positions < lens[:, None] - window
    seen_by_all = not bool(hidden.any())
    return _Group(rows.to(device), length, None if seen_by_all else hidden.to(device), blocks)


# --- attend -------------------------------------------------------------------------------------


def _attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: _Plan,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    attention = _Attention(q, k_pool, v_pool, scale, window, softcap, sinks, out)
    for chunk in plan.chunks:
        attention.attend_chunk(chunk)
    for group in plan.groups:
        attention.attend_group(group)
    if plan.zero_rows is not None:
        out[plan.zero_rows] = 0
    return out


@dataclass(frozen=True, slots=True)
class _Attention:
    """The arguments of one call, so that its steps need not pass ten of them along."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    out: Tensor

    def attend_chunk(self, chunk: _Chunk) -> None:
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        k, v = self._gather(chunk.blocks, num_seqs=1)
        num_new = chunk.last_row - chunk.first_row
        first_query = chunk.seq_len - num_new - chunk.blocks.origin
        rows = slice(chunk.first_row, chunk.last_row)
        shape = (num_new, num_kv_heads, heads_per_kv, head_dim)
        q = self.q[rows].reshape(shape).transpose(0, 1).to(k.dtype)
        q = q.reshape(num_kv_heads, num_new * heads_per_kv, head_dim)
        out = self.out[rows].view(shape).transpose(0, 1)
        most_rows = min(TILE_ROWS, MAX_TILE_SCORES // (chunk.seq_len * num_kv_heads))
        step = max(1, most_rows // heads_per_kv)
        for first in range(0, num_new, step):
            last = min(first + step, num_new)
            low, high = 0, first_query + last
            if self.window is not None:
                low = max(0, first_query + first - self.window + 1)
            scores = self._scores(q[:, first * heads_per_kv : last * heads_per_kv], k[:, low:high])
            count = last - first
            tile = scores.view(num_kv_heads, count, heads_per_kv, high - low)
            tile[..., high - low - count :].masked_fill_(_above(count, 1, q.device), -torch.inf)
            if self.window is not None:
                # Row i sees from position first_query + first + i - window + 1 on.
                shift = first_query + first - self.window - low
                if count + shift > 0:
                    left = _below(count, shift, q.device)
                    tile[..., :count].masked_fill_(left, -torch.inf)
            result = torch.bmm(self._softmax(scores, v.dtype), v[:, low:high])
            out[:, first:last] = result.view(num_kv_heads, count, heads_per_kv, head_dim)

    def attend_group(self, group: _Group) -> None:
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        num_seqs = len(group.rows)
        k, v = self._gather(group.blocks, num_seqs)
        k, v = k[:, : group.length], v[:, : group.length]
        q = self.q[group.rows].to(k.dtype).view(num_seqs * num_kv_heads, heads_per_kv, head_dim)
        scores = self._scores(q, k)
        if group.hidden is not None:
            hidden = group.hidden[:, None]
            scores.view(num_seqs, -1, group.length).masked_fill_(hidden, -torch.inf)
            # 0 · NaN is NaN, and nobody wrote the slots past a sequence's end.
            v.view(num_seqs, num_kv_heads, group.length, head_dim).masked_fill_(
                hidden[..., None], 0
            )
        result = torch.bmm(self._softmax(scores, v.dtype), v)
        self.out[group.rows] = result.view(num_seqs, -1, head_dim).to(self.out.dtype)

    def _head_shape(self) -> tuple[int, int, int]:
        num_kv_heads = self.k_pool.shape[2]
        return num_kv_heads, self.q.shape[1] // num_kv_heads, self.q.shape[2]

    def _gather(self, blocks: _Blocks, num_seqs: int) -> tuple[Tensor, Tensor]:
        """K and V as ``[num_seqs * num_kv_heads, positions, head_dim]``, in the compute dtype."""
        return (
            _gather_heads("k", self.k_pool, blocks, num_seqs),
            _gather_heads("v", self.v_pool, blocks, num_seqs),
        )

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """``scale · q kᵀ``, soft-capped; rows of q are (position, head of the KV head)."""
        shape = (q.shape[0], q.shape[1], k.shape[1])
        scores = _scratch.buffer("scores", shape, q, q.dtype)
        alpha = self.scale if self.softcap is None else self.scale / self.softcap
        torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=alpha, out=scores)
        if self.softcap is not None:
            scores = scores.float().tanh_().mul_(self.softcap)
        return scores

    def _softmax(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        if self.sinks is None:
            weights = torch.softmax(scores, -1, out=scores)
        else:
            num_kv_heads, heads_per_kv, _ = self._head_shape()
            sinks = self.sinks.view(num_kv_heads, 1, heads_per_kv)
            sinks = sinks.expand(-1, scores.shape[1] // heads_per_kv, -1).reshape(num_kv_heads, -1)
            sinks = sinks.repeat(scores.shape[0] // num_kv_heads, 1)[..., None]
            weights = torch.softmax(torch.cat([scores.float(), sinks], -1), -1)[..., :-1]
        return weights.to(dtype)


def _gather_heads(name: str, pool: Tensor, blocks: _Blocks, num_seqs: int) -> Tensor:
    _, block_size, num_kv_heads, head_dim = pool.shape
    width = blocks.count // num_seqs
    shape = (num_seqs, num_kv_heads, width, block_size, head_dim)
    out = _scratch.buffer(name, shape, pool, _compute_dtype(pool.dtype))
    if num_seqs == 1 and blocks.runs:
        heads_last = out[0].permute(1, 2, 0, 3)
        for block_id, index, count in blocks.runs:
            heads_last[index : index + count].copy_(pool[block_id : block_id + count])
    else:
        # Whole blocks first, then heads apart: the first copy is the fast one from far memory.
        near = _scratch.buffer("blocks", (blocks.count, *pool.shape[1:]), pool, pool.dtype)
        torch.index_select(pool, 0, blocks.ids, out=near)
        out.permute(0, 2, 3, 1, 4).copy_(near.view(num_seqs, width, *pool.shape[1:]))
    return out.view(num_seqs * num_kv_heads, width * block_size, head_dim)


@lru_cache(maxsize=1)
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products; else float32 is the faster way."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the two products. Few CPUs multiply float16 fast, and float32 holds it."""
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not _multiplies_bfloat16()):
        return torch.float32
    return dtype


@lru_cache(maxsize=64)
def _above(count: int, diagonal: int, device: torch.device) -> Tensor:
    """bool ``[count, 1, count]``: key right of the query's own position."""
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(diagonal)[:, None]


@lru_cache(maxsize=64)
def _below(count: int, diagonal: int, device: torch.device) -> Tensor:
    """bool ``[count, 1, count]``: key left of the query's window."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril(diagonal)[:, None]
