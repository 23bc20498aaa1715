"""Random paged-attention problems, and their answer computed in float64 one query at a time.

Everything that no query may see is poisoned: unused blocks and the slots past a sequence's end are
NaN, and block-table entries past it are ids far outside the pool.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

POISON_ID = 1 << 30


@dataclass(frozen=True)
class Case:
    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def options(self) -> dict[str, object]:
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }


def make_case(
    lengths: list[tuple[int, int]],  # (prefix, new tokens); (0, 0) pads
    *,
    num_kv_heads: int = 2,
    heads_per_kv: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    share_prefix: bool = False,
    adjacent: bool = False,
    padding_rows: int = 0,
    seed: int = 0,
) -> Case:
    """``padding_rows``: query rows given to a sequence of length 0, when ``lengths`` has one."""
    rng = torch.Generator().manual_seed(seed)
    seq_lens = [prefix + new for prefix, new in lengths]
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    order = torch.arange(num_blocks)
    if not adjacent:
        order = order[torch.randperm(num_blocks, generator=rng)]
    pool = torch.full((num_blocks, 2, 2, block_size, num_kv_heads, head_dim), torch.nan)
    tables = torch.full((len(lengths), max([*counts, 0]) + 2), POISON_ID, dtype=torch.int32)
    used = 0
    for i, (n, count) in enumerate(zip(seq_lens, counts, strict=True)):
        tables[i, :count] = order[used : used + count]
        used += count
        if share_prefix and i > 0:
            # Whole blocks that both sequences only read: a shared prefix.
            shared = min(lengths[i][0], lengths[0][0]) // block_size
            tables[i, :shared] = tables[0, :shared]
        for j in range(count):
            filled = min(block_size, n - j * block_size)
            shape = (2, filled, num_kv_heads, head_dim)
            if pool[tables[i, j], 1, 0, 0, 0, 0].isnan():
                pool[tables[i, j], 1, :, :filled] = torch.randn(shape, generator=rng)
    news = [new if n else padding_rows for (_, new), n in zip(lengths, seq_lens, strict=True)]
    num_heads = num_kv_heads * heads_per_kv
    q = torch.randn(sum(news), num_heads, head_dim, generator=rng)
    pool = pool.to(dtype)
    return Case(
        q=q.to(dtype),
        k_pool=pool[:, 1, 0],
        v_pool=pool[:, 1, 1],
        block_tables=tables,
        cu_seqlens_q=torch.tensor([0, *news]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
        softcap=softcap,
        sinks=torch.randn(num_heads, generator=rng) if with_sinks else None,
    )


def expected_attention(case: Case) -> Tensor:
    """Softmax attention by its definition, float64, zeros for sequences of length 0."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    _, block_size, num_kv_heads, _ = case.k_pool.shape
    heads_per_kv = case.q.shape[1] // num_kv_heads
    firsts = case.cu_seqlens_q.tolist()
    for seq, n in enumerate(case.seq_lens.tolist()):
        ids = case.block_tables[seq, : -(-n // block_size)].long()
        keys = case.k_pool[ids].flatten(0, 1)[:n].double().repeat_interleave(heads_per_kv, 1)
        values = case.v_pool[ids].flatten(0, 1)[:n].double().repeat_interleave(heads_per_kv, 1)
        num_new = firsts[seq + 1] - firsts[seq]
        for i in range(num_new if n else 0):
            position = n - num_new + i
            low = 0 if case.window is None else max(0, position - case.window + 1)
            q = case.q[firsts[seq] + i].double()
            scores = torch.einsum("hd,thd->ht", q, keys[low : position + 1]) * case.scale
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            if case.sinks is not None:
                total += torch.exp(case.sinks.double()[:, None] - top)
            out[firsts[seq] + i] = torch.einsum(
                "ht,thd->hd", weights / total, values[low : position + 1]
            )
    return out


@st.composite
def attention_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    head_dims: tuple[int, ...] = (16, 64),
    block_sizes: tuple[int, ...] = (8, 16, 64),
    borders: tuple[int, ...] = (8, 16, 64, 128),
    max_new: int = 140,
    decode: bool = False,
) -> Case:
    """Lengths crowd around ``borders`` (blocks, tiles), where such code goes wrong."""
    near = st.builds(lambda a, b: max(0, a + b), st.sampled_from((0, *borders)), st.integers(-2, 3))
    prefix = st.one_of(near, st.integers(0, 200))
    new = (
        st.just(1) if decode else st.one_of(near, st.integers(0, 20)).map(lambda n: min(n, max_new))
    )
    lengths = draw(st.lists(st.tuples(prefix, new), min_size=1, max_size=4))
    if draw(st.booleans()):
        lengths.insert(draw(st.integers(0, len(lengths))), (0, 0))
    return make_case(
        lengths,
        num_kv_heads=draw(st.sampled_from((1, 2, 3))),
        heads_per_kv=draw(st.sampled_from((1, 2, 3, 5))),
        head_dim=draw(st.sampled_from(head_dims)),
        block_size=draw(st.sampled_from(block_sizes)),
        dtype=draw(st.sampled_from(dtypes)),
        window=draw(st.none() | st.sampled_from((1, 2, 7, 16, 64, 150))),
        softcap=draw(st.none() | st.sampled_from((5.0, 30.0))),
        with_sinks=draw(st.booleans()),
        share_prefix=draw(st.booleans()),
        adjacent=draw(st.booleans()),
        padding_rows=1 if decode else draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 1 << 16)),
    )


def tolerance(dtype: torch.dtype) -> float:
    """Absolute, for values of order one: rounding of products, sums and the result."""
    return {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[
        dtype
    ]
