"""The torch twins: what runs on CPU, and the oracle the Triton kernels are held to.

Exact in float32 (1e-5 of float64) for any head_dim and block size. In bfloat16 the two products of
attention run in bfloat16, as in the eager attention of transformers: scores are rounded once to
bfloat16, the softmax over them is computed in float32. That is what makes them fast: torch's flash
attention for CPU multiplies bfloat16 no faster than float32, its plain matrix product runs on the
bfloat16 units (docs/kernels.md has the measurements behind each choice here).

A call goes in three steps. *Plan* (``attention_plan.py``). *Gather*: keys and values of a sequence
into one buffer ``[num_kv_heads, positions, head_dim]``, reused from call to call, by runs of
adjacent blocks. *Attend*: for a tile of query positions two batched products around one softmax
over the whole visible row, all query heads of a KV head packed as rows of the same product, so that
keys and values are never repeated. Sequences that decode behind the same blocks are rows of the
same product as well. A result depends on the position of its tile in the chunk, not
on other sequences.

Memory traffic of one call: each visible K and V byte is read once, written once to the buffer and
read from there once per tile; scores are written and read three times.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.attention_plan import Blocks, Chunk, Group, Plan, plan_attention, plan_write

# Rows of one tile (query positions × heads per KV head): enough to keep the matrix units busy
# and to outweigh torch's copy of the keys and values that it sees, few enough that its scores
# stay in the cache and that little is computed above the diagonal.
TILE_ROWS = 768
# Most positions of a sequence that decodes alone for torch's flash attention, which does everything
# in one call: with 60 positions 26 µs instead of 95 for two products around a softmax, with 600 113
# and 145, with 1,000 181 and 173. Several sequences at once gain nothing: it knows no padding.
MAX_FLASH_POSITIONS = 1 << 10
# Most scores of one tile, in elements; a longer context gets tiles of fewer rows.
MAX_TILE_SCORES = 1 << 24


class _Buffers(threading.local):
    """What a thread's calls reuse. Buffers grow to the largest call and stay."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}  # the last of each name: the layers of a step want it

    def get(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, its contents undefined, valid until the next ``get`` of its name."""
        view = self.views.get(name)
        if view is None or not _fits(view, dtype, like) or view.shape != shape:
            size = math.prod(shape)
            flat = self.flat.get(name)
            with torch.inference_mode(False):  # such a tensor may be written in either mode
                if flat is None or not _fits(flat, dtype, like) or len(flat) < size:
                    flat = self.flat[name] = torch.empty(size, dtype=dtype, device=like.device)
                view = self.views[name] = flat[:size].view(shape)
        return view


def _fits(buffer: Tensor, dtype: torch.dtype, like: Tensor) -> bool:
    return buffer.dtype == dtype and buffer.device == like.device


_buffers = _Buffers()


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
    """Twin of the Triton attention kernel: arguments as in ``kernels.paged_prefill``, or as in
    ``kernels.paged_decode`` when ``cu_seqlens_q`` is None.

    Keys are never split. With ``split_len`` sequences are not batched either, for the reason that
    it exists: bits that do not depend on what else is in the batch."""
    plan = plan_attention(
        block_tables,
        cu_seqlens_q,
        seq_lens,
        q.shape[0] // max(1, len(seq_lens)),
        k_pool.shape[1],
        window,
        may_batch=split_len is None,
    )
    _Attention(q, k_pool, v_pool, scale, window, softcap, sinks, out).run(plan)
    return out


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call's arguments, so that its steps need not pass all of them along."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None
    out: Tensor

    def run(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            self._attend_chunk(chunk)
        for group in plan.groups:
            self._attend_group(group)
        if plan.zero_rows is not None:
            self.out[plan.zero_rows] = 0

    def _attend_chunk(self, chunk: Chunk) -> None:
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        k = _gather_heads("k", self.k_pool, chunk.blocks, 1, chunk.length)
        v = _gather_heads("v", self.v_pool, chunk.blocks, 1, chunk.length)
        num_new = chunk.last_row - chunk.first_row
        shape = (num_new, num_kv_heads, heads_per_kv, head_dim)
        # [num_kv_heads, position × head of the KV head, head_dim]: the rows of the products.
        q = self._scaled(self.q[chunk.first_row : chunk.last_row], k.dtype)
        q = q.reshape(shape).transpose(0, 1).flatten(1, 2)
        out = self.out[chunk.first_row : chunk.last_row].view(shape).transpose(0, 1)

        most_rows = min(TILE_ROWS, MAX_TILE_SCORES // (chunk.length * num_kv_heads))
        step = max(1, most_rows // heads_per_kv)
        first_query = chunk.length - num_new  # positions here count from the chunk's origin
        for first in range(0, num_new, step):
            count = min(step, num_new - first)
            low, high = 0, first_query + first + count
            if self.window is not None:
                low = max(0, first_query + first - self.window + 1)
            rows = slice(first * heads_per_kv, (first + count) * heads_per_kv)
            scores = self._scores(q[:, rows], k[:, low:high])
            tile = scores.view(num_kv_heads, count, heads_per_kv, high - low)
            tile[..., high - low - count :].masked_fill_(_above(count, q.device), -torch.inf)
            if self.window is not None:
                # Query i of the tile sees from first_query + first + i - window + 1 on.
                behind = first_query + first - self.window - low
                tile[..., :count].masked_fill_(_below(count, behind, q.device), -torch.inf)
            result = torch.bmm(self._weights(scores, v.dtype), v[:, low:high])
            out[:, first : first + count] = result.view(num_kv_heads, count, heads_per_kv, head_dim)

    def _attend_group(self, group: Group) -> None:
        if self._takes_flash(group):
            self._put(group, self._flash(group))
            return
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        num_seqs = len(group.rows)
        k = _gather_heads("k", self.k_pool, group.blocks, num_seqs, group.length)
        # 0 · NaN is NaN, and nobody wrote the slots past a sequence's end.
        zeroed = group.hidden_rows
        v = _gather_heads("v", self.v_pool, group.blocks, num_seqs, group.length, zeroed)
        q = self._scaled(self._queries(group), k.dtype)
        scores = self._scores(q.reshape(num_seqs * num_kv_heads, heads_per_kv, head_dim), k)
        if group.hidden is not None:
            hidden = group.hidden[:, None]
            scores.view(num_seqs, -1, group.length).masked_fill_(hidden, -torch.inf)
        if group.shared is None:
            result = torch.bmm(self._weights(scores, v.dtype), v)
        else:
            result = self._attend_shared(group.shared, q, scores, v)
        self._put(group, result)

    def _takes_flash(self, group: Group) -> bool:
        return (
            len(group.rows) == 1
            and group.length <= MAX_FLASH_POSITIONS
            and group.hidden is None
            and group.shared is None
            and self.softcap is None
            and self.sinks is None
            and _compute_dtype(self.k_pool.dtype) == self.k_pool.dtype
        )

    def _flash(self, group: Group) -> Tensor:
        """The heads of a KV head are query positions that see the same keys."""
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        k = _gather_blocks("k blocks", self.k_pool, group.blocks, 1)[:, : group.length]
        v = _gather_blocks("v blocks", self.v_pool, group.blocks, 1)[:, : group.length]
        return torch.nn.functional.scaled_dot_product_attention(
            self._queries(group).reshape(1, num_kv_heads, heads_per_kv, head_dim),
            k.transpose(1, 2),
            v.transpose(1, 2),
            scale=self.scale,
        )

    def _queries(self, group: Group) -> Tensor:
        return self.q if group.is_whole else self.q[group.rows]

    def _put(self, group: Group, result: Tensor) -> None:
        """``result`` has the order of ``[num_seqs, num_heads, head_dim]``."""
        result = result.reshape(len(group.rows), *self.q.shape[1:])
        if group.is_whole:
            self.out.copy_(result)
        else:
            self.out[group.rows] = result.to(self.out.dtype)

    def _attend_shared(self, shared: Blocks, q: Tensor, scores: Tensor, v: Tensor) -> Tensor:
        """Of queries ``[num_seqs, num_heads, head_dim]`` that see the same blocks first, which are
        gathered once, and then each its own positions, with these scores and values."""
        num_kv_heads, heads_per_kv, head_dim = self._head_shape()
        num_seqs, length = q.shape[0], len(shared.ids) * self.k_pool.shape[1]
        shape = (num_seqs, num_kv_heads, heads_per_kv)
        # [num_kv_heads, sequence × head of the KV head, …]: the rows of the shared products.
        rows = q.reshape(*shape, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        keys = _gather_heads("shared", self.k_pool, shared, 1, length)
        far = self._scores(rows, keys, "shared scores")
        near = scores.view(*shape, -1).transpose(0, 1).reshape(num_kv_heads, rows.shape[1], -1)
        weights = self._weights(torch.cat([far, near], -1), v.dtype)
        values = _gather_heads("shared", self.v_pool, shared, 1, length)
        by_head = (num_kv_heads, num_seqs, heads_per_kv, -1)
        result = torch.bmm(weights[..., :length], values).view(by_head).transpose(0, 1)
        own = weights[..., length:].view(by_head).transpose(0, 1).reshape(scores.shape)
        return result.float() + torch.bmm(own, v).view(*shape, head_dim)

    def _head_shape(self) -> tuple[int, int, int]:
        num_kv_heads = self.k_pool.shape[2]
        return num_kv_heads, self.q.shape[1] // num_kv_heads, self.q.shape[2]

    def _scaled(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale goes into q: exact for a power of two, else a rounding below that of scores."""
        return q.to(dtype) * (self.scale if self.softcap is None else self.scale / self.softcap)

    def _scores(self, q: Tensor, k: Tensor, buffer: str = "scores") -> Tensor:
        shape = (q.shape[0], q.shape[1], k.shape[1])
        scores = _buffers.get(buffer, shape, q, q.dtype)
        torch.bmm(q, k.transpose(1, 2), out=scores)
        # A rounded tanh would lose what distinguishes large scores, so that goes in float32.
        return scores if self.softcap is None else scores.float().tanh_().mul_(self.softcap)

    def _weights(self, scores: Tensor, dtype: torch.dtype) -> Tensor:
        if self.sinks is None:
            return torch.softmax(scores, -1, out=scores).to(dtype)
        num_kv_heads, heads_per_kv, _ = self._head_shape()
        num_heads, num_rows, _ = scores.shape
        sinks = self.sinks.view(num_kv_heads, heads_per_kv)
        sinks = sinks.repeat(num_heads // num_kv_heads, num_rows // heads_per_kv)[..., None]
        weights = torch.softmax(torch.cat([scores.float(), sinks], -1), -1)
        return weights[..., :-1].to(dtype)


def _gather_heads(
    name: str,
    pool: Tensor,
    blocks: Blocks,
    num_seqs: int,
    length: int,
    zeroed: Tensor | None = None,
) -> Tensor:
    """Gathered blocks as ``[num_seqs * num_kv_heads, length, head_dim]``, in the compute dtype.

    ``zeroed``: positions, counted over all sequences, that are 0 instead of what is there.
    """
    _, block_size, num_kv_heads, head_dim = pool.shape
    shape = (num_seqs * num_kv_heads, length, head_dim)
    out = _buffers.get(name, shape, pool, _compute_dtype(pool.dtype))
    by_position = out.view(num_seqs, num_kv_heads, length, head_dim).transpose(1, 2)
    if num_seqs == 1 and blocks.runs and zeroed is None:
        for block_id, index, count in blocks.runs:
            first = index * block_size
            whole = min(count, (length - first) // block_size)
            run = by_position[0, first : first + whole * block_size]
            run.view(whole, *pool.shape[1:]).copy_(pool[block_id : block_id + whole])
        rest = length % block_size
        if rest:
            by_position[0, length - rest :].copy_(pool[block_id + whole, :rest])
    else:
        # Whole blocks first, heads apart then: the first copy is fast from far memory.
        near = _gather_blocks("blocks", pool, blocks, num_seqs, zeroed)
        by_position.copy_(near[:, :length])
    return out


def _gather_blocks(
    name: str, pool: Tensor, blocks: Blocks, num_seqs: int, zeroed: Tensor | None = None
) -> Tensor:
    """Gathered blocks as ``[num_seqs, positions, num_kv_heads, head_dim]``."""
    near = _buffers.get(name, (len(blocks.ids), *pool.shape[1:]), pool, pool.dtype)
    torch.index_select(pool, 0, blocks.ids, out=near)
    near = near.view(num_seqs, -1, *pool.shape[2:])
    if zeroed is not None:
        near.flatten(0, 1).index_fill_(0, zeroed, 0)
    return near


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
def _above(count: int, device: torch.device) -> Tensor:
    """bool ``[count, 1, count]``: key right of the query's own position."""
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(1)[:, None]


@lru_cache(maxsize=64)
def _below(count: int, diagonal: int, device: torch.device) -> Tensor:
    """bool ``[count, 1, count]``: key left of the query's window."""
    return torch.ones(count, count, dtype=torch.bool, device=device).tril(diagonal)[:, None]


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """Twin of the Triton cache write; arguments as in ``kernels.cache_write``."""
    plan = plan_write(slot_mapping, k_pool.shape[1])
    if plan.kept is not None:
        k, v = k[plan.kept], v[plan.kept]
    k_pool.index_put_(plan.where, k)
    v_pool.index_put_(plan.where, v)


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> Tensor:
    """Twin of the Triton gather; arguments as in ``kernels.block_copy``, as for the next two."""
    return torch.index_select(pool, 0, block_ids, out=out)


def scatter_blocks(src: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    pool.index_copy_(0, block_ids.long(), src)


def copy_blocks(
    pool: Tensor, src_ids: Tensor, dst_ids: Tensor, num_tokens: int | Tensor | None
) -> None:
    if not isinstance(num_tokens, Tensor):
        part = pool if num_tokens is None else pool.narrow(-3, 0, num_tokens)
        part.index_copy_(0, dst_ids.long(), part[src_ids.long()])
        return
    copies = zip(src_ids.tolist(), dst_ids.tolist(), num_tokens.tolist(), strict=True)
    for src, dst, count in copies:
        pool[dst].narrow(-3, 0, count).copy_(pool[src].narrow(-3, 0, count))
