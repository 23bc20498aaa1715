"""What flash-attn and FlashInfer are called with, shown by stand-ins for them.

Each stand-in has the library's signature (flash-attn 3.0.0 and 2.8.3, FlashInfer 0.6), checks what
the library checks, and computes attention by the library's own rules for masks and windows. So an
answer that equals ours means that those rules were followed.
"""

import sys
from types import ModuleType

import pytest
import torch

from engine.runner.attention_backends import find_backend
from engine.runner.attention_libraries import FlashAttention2, FlashAttention3, load_library
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kvstore.block import BlockLayout
from kvstore.errors import ConfigError

CUDA = torch.device("cuda")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 64


def layout(**changes) -> BlockLayout:
    fields = {"block_size": 16, "head_dim": HEAD_DIM, "dtype": "float16"} | changes
    return BlockLayout(num_layers=2, num_kv_heads=NUM_KV_HEADS, **fields)


def attend(q, k, v, scale, left, softcap):
    """One sequence by the libraries' definition: query i of n sees keys up to i + len(k) - n, and
    ``left`` more before that one (all when negative)."""
    shift = len(k) - len(q)
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = torch.arange(len(q))[:, None] + shift, torch.arange(len(k))[None]
    hidden = keys > queries
    if left >= 0:
        hidden |= keys < queries - left
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)


def check_pool(pool: torch.Tensor) -> None:
    assert pool.ndim == 4
    assert pool.stride(-1) == 1
    assert pool.dtype in (torch.float16, torch.bfloat16)


def check_ints(tensor: torch.Tensor, *shape: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.stride(-1) == 1
    assert tuple(tensor.shape) == shape


def flash_paged(q, k_cache, v_cache, seqlens, table, starts, scale, window_size, softcap):
    """``q`` ragged, ``starts`` where each sequence's queries begin."""
    out = torch.empty_like(q)
    left, right = window_size
    assert right in (-1, 0)
    for i, length in enumerate(seqlens.tolist()):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        pages = table[i, : -(-length // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[rows] = attend(q[rows], k, v, scale, left, softcap)
    return out


def flash_attention_3(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert causal
    assert k is None
    assert v is None
    check_pool(k_cache)
    check_pool(v_cache)
    num_seqs = len(cache_seqlens)
    check_ints(cache_seqlens, num_seqs)
    check_ints(page_table, num_seqs, page_table.shape[1])
    if cu_seqlens_q is None:
        assert q.ndim == 4
        assert q.shape[0] == num_seqs
        starts = torch.arange(num_seqs + 1) * q.shape[1]
    else:
        assert q.ndim == 3
        check_ints(cu_seqlens_q, num_seqs + 1)
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        starts = cu_seqlens_q
    flat = q.reshape(-1, *q.shape[-2:])
    metadata = (cache_seqlens, page_table, starts)
    out = flash_paged(flat, k_cache, v_cache, *metadata, softmax_scale, window_size, softcap)
    return out.view_as(q)


def flash_attention_2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert causal
    assert k.shape[1] % 256 == 0
    check_pool(k)
    check_pool(v)
    num_seqs = len(cu_seqlens_q) - 1
    check_ints(cu_seqlens_q, num_seqs + 1)
    check_ints(cu_seqlens_k, num_seqs + 1)
    check_ints(block_table, num_seqs, block_table.shape[1])
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    assert cu_seqlens_k[0] == 0
    metadata = (cu_seqlens_k.diff(), block_table, cu_seqlens_q)
    return flash_paged(q, k, v, *metadata, softmax_scale, window_size, softcap)


def flash_attention_2_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert k_cache.shape[1] % 256 == 0
    return flash_attention_3(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )


class Wrapper:
    """FlashInfer's BatchPrefillWithPagedKVCacheWrapper."""

    num_plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() == 128 << 20

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, non_blocking=True,
    ):  # fmt: skip
        Wrapper.num_plans += 1
        num_seqs = len(qo_indptr) - 1
        assert causal
        check_ints(qo_indptr, num_seqs + 1)
        check_ints(paged_kv_indptr, num_seqs + 1)
        check_ints(paged_kv_indices, int(paged_kv_indptr[-1]))
        check_ints(paged_kv_last_page_len, num_seqs)
        assert q_data_type == kv_data_type == torch.float16
        self.planned = (
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
            sm_scale, window_left, logits_soft_cap,
        )  # fmt: skip
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk)

    def run(self, q, paged_kv_cache, *args, out=None, lse=None, return_lse=False):
        starts, page_starts, pages, in_last, page_size, scale, left, softcap = self.planned
        k_cache, v_cache = paged_kv_cache
        check_pool(k_cache)
        check_pool(v_cache)
        assert k_cache.stride() == v_cache.stride()
        assert q.shape == (starts[-1], self.shape[0], self.shape[2])
        assert k_cache.shape[1:] == (page_size, *self.shape[1:])
        assert out.shape == q.shape
        for i, last in enumerate(in_last.tolist()):
            ids = pages[page_starts[i] : page_starts[i + 1]].long()
            length = (len(ids) - 1) * page_size + last
            k, v = (cache[ids].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            rows = slice(int(starts[i]), int(starts[i + 1]))
            out[rows] = attend(q[rows], k, v, scale, left, softcap)
        return out


def module(name: str, **functions) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(functions)
    return made


@pytest.fixture
def install(monkeypatch):
    """Puts stand-ins where ``import`` finds them; what is not named is not there."""

    def install(*versions: str) -> None:
        made = {
            "flash_attn_interface": module(
                "flash_attn_interface", flash_attn_with_kvcache=flash_attention_3
            ),
            "flash_attn": module(
                "flash_attn",
                flash_attn_varlen_func=flash_attention_2_varlen,
                flash_attn_with_kvcache=flash_attention_2_kvcache,
            ),
            "flashinfer": module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper),
        }
        for name, stand_in in made.items():
            monkeypatch.setitem(sys.modules, name, stand_in if name in versions else None)

    return install


def make_step(num_new: list[int], seq_lens: list[int], block_size: int):
    """Queries, one layer's pools out of a block-major pool, and a step's metadata."""
    rng = torch.Generator().manual_seed(0)
    counts = [-(-length // block_size) for length in seq_lens]
    shape = (sum(counts) + 1, 2, 2, block_size, NUM_KV_HEADS, HEAD_DIM)
    pool = torch.randn(shape, generator=rng).half()
    order = torch.randperm(sum(counts) + 1, generator=rng).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for i, count in enumerate(counts):
        tables[i, :count] = order[sum(counts[:i]) :][:count]
    # As models hand it over: heads before tokens, seen the other way round.
    q = torch.randn(NUM_HEADS, sum(num_new), HEAD_DIM, generator=rng).half().transpose(0, 1)
    cu_seqlens_q = torch.tensor([0, *num_new]).cumsum(0).int()
    return q, pool[:, 1, 0], pool[:, 1, 1], tables, cu_seqlens_q, torch.tensor(seq_lens).int()


LIBRARIES = [
    ("flash_attn", "flash_attn_interface", 16),
    ("flash_attn", "flash_attn", 256),
    ("flashinfer", "flashinfer", 16),
]
OPTIONS = [
    {"scale": 0.125, "window": None, "softcap": None},
    {"scale": 0.3, "window": 21, "softcap": None},
    {"scale": 0.3, "window": 1, "softcap": 5.0},
]


@pytest.mark.parametrize(("name", "module_name", "block_size"), LIBRARIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_equals_our_kernel(install, name, module_name, block_size, options):
    install(module_name)
    backend = find_backend(name, CUDA, layout(block_size=block_size))
    step = make_step([5, 1, 40], [50, 33, 40], block_size)
    expected = paged_prefill(*step, **options)
    out = torch.empty_like(expected)
    got = backend.paged_prefill(*step, **options, sinks=None, out=out)
    assert got is out
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("name", "module_name", "block_size"), LIBRARIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("each", [1, 2])
def test_decode_equals_our_kernel(install, name, module_name, block_size, options, each):
    install(module_name)
    backend = find_backend(name, CUDA, layout(block_size=block_size))
    q, k_pool, v_pool, tables, _, seq_lens = make_step([each] * 3, [50, 16, 4], block_size)
    step = (q, k_pool, v_pool, tables, seq_lens)
    expected = paged_decode(*step, **options)
    out = torch.empty_like(expected)
    got = backend.paged_decode(*step, **options, sinks=None, out=out)
    assert got is out
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_flashinfer_plans_once_a_step_for_each_kind_of_layer(install, monkeypatch):
    install("flashinfer")
    monkeypatch.setattr(Wrapper, "num_plans", 0)
    library = load_library("flashinfer", layout())
    for step in (make_step([3, 1], [30, 9], 16), make_step([1, 1], [31, 10], 16)):
        for window in (None, 8, None, 8):
            options = {"scale": 0.125, "window": window, "softcap": None, "sinks": None}
            got = library.paged_prefill(*step, **options, out=torch.empty(step[0].shape).half())
            expected = paged_prefill(*step, scale=0.125, window=window)
            torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
    assert Wrapper.num_plans == 4


def test_flash_attention_3_is_taken_before_2(install):
    install("flash_attn_interface", "flash_attn")
    assert isinstance(load_library("flash_attn", layout(block_size=256)), FlashAttention3)
    install("flash_attn")
    assert isinstance(load_library("flash_attn", layout(block_size=256)), FlashAttention2)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_library_that_is_not_installed_is_named_with_the_remedy(install, name):
    install()
    with pytest.raises(ConfigError, match=f"attention_backend: {name} .*pip install"):
        find_backend(name, CUDA, layout())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("flash_attn", {"dtype": "float32"}, "the model is in float32"),
        ("flashinfer", {"dtype": "float32"}, "the model is in float32"),
        ("flash_attn", {"head_dim": 20}, "not 20"),
        ("flash_attn", {"head_dim": 320}, "not 320"),
        ("flashinfer", {"head_dim": 96}, "64, 128, 256, not 96"),
        ("flash_attn", {"block_size": 32}, "blocks of 256 positions, not of 32"),
    ],
)
def test_what_a_library_cannot_read_is_refused(install, name, changes, message):
    install("flash_attn", "flashinfer")
    with pytest.raises(ConfigError, match=message):
        find_backend(name, CUDA, layout(**changes))


@pytest.mark.parametrize(("name", "module_name", "block_size"), LIBRARIES)
def test_attention_sinks_are_refused_and_not_left_out(install, name, module_name, block_size):
    install(module_name)
    backend = find_backend(name, CUDA, layout(block_size=block_size))
    step = make_step([3], [30], block_size)
    options = OPTIONS[0] | {"sinks": torch.zeros(NUM_HEADS), "out": torch.empty_like(step[0])}
    with pytest.raises(ConfigError, match="no attention sinks"):
        backend.paged_prefill(*step, **options)


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_library_runs_on_cuda_alone_and_not_in_deterministic_mode(install, name):
    install("flash_attn_interface", "flashinfer")
    with pytest.raises(ConfigError, match=f"{name} needs a CUDA device, not cpu"):
        find_backend(name, torch.device("cpu"), layout())
    with pytest.raises(ConfigError, match=f"deterministic: {name} does not promise it"):
        find_backend(name, CUDA, layout(), is_deterministic=True)
