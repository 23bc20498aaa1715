"""write_kv, gather, scatter and copy: each test runs the torch twin and the interpreted kernel."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from program_order import ORDERS, program_order

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.cache_write import write_kv

pytestmark = pytest.mark.usefixtures("backend")

EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "60"))
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The whole pool, a group of layers, one layer, all layers' keys, some heads: every way to cut it.
PARTS = {
    "pool": (slice(None),),
    "layer group": (slice(None), slice(0, 1)),
    "layer": (slice(None), 1),
    "keys": (slice(None), slice(None), 0),
    "heads": (..., slice(0, 2), slice(None)),
    "half a head": (..., slice(0, 8)),
    "positions": (..., slice(0, 4), slice(None), slice(None)),
}


def make_pool(dtype: torch.dtype = torch.float32, num_blocks: int = 9) -> torch.Tensor:
    """Not contiguous itself: its first layer is cut off."""
    return torch.randn(num_blocks, 3, 2, 8, 3, 16).to(dtype)[:, 1:]


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(*(t.new_empty(t.shape).copy_(t).view(torch.uint8) for t in (a, b)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_fills_slots_and_skips_padding(dtype):
    pool = make_pool(dtype)
    expected = pool.clone()
    k, v = torch.randn(2, 5, 3, 16).to(dtype)
    slots = torch.tensor([3, 70, -1, 8, -1])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 8, 0, 0, slot % 8] = k[token]
            expected[slot // 8, 0, 1, slot % 8] = v[token]
    write_kv(k, v, pool[:, 0, 0], pool[:, 0, 1], slots)
    assert_same_bits(pool, expected)


def test_write_kv_takes_keys_with_heads_before_tokens():
    """As a model hands them over: [num_heads, num_tokens, head_dim], transposed."""
    pool = make_pool()
    k, v = torch.randn(2, 3, 4, 16).transpose(1, 2)
    write_kv(k, v, pool[:, 0, 0], pool[:, 0, 1], torch.arange(4))
    assert_same_bits(pool[0, 0, 0, :4], k)
    assert_same_bits(pool[0, 0, 1, :4], v)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_gather_and_scatter_move_blocks_bit_for_bit(part, dtype):
    pool = (make_pool() * 50).to(dtype)[PARTS[part]]
    staged = gather_blocks(pool, ids(7, 2, 2, 3))
    for i, block_id in enumerate((7, 2, 2, 3)):
        assert_same_bits(staged[i], pool[block_id])
    target = torch.zeros_like(pool)
    scatter_blocks(staged, target, ids(3, 0, 8, 1))
    for i, block_id in enumerate((3, 0, 8, 1)):
        assert_same_bits(target[block_id], staged[i])
    assert not target[[2, 4, 5, 6, 7]].float().any()


def test_gather_writes_into_the_buffer_it_is_given():
    pool, out = make_pool(), torch.zeros(2, 2, 2, 8, 3, 16)
    assert gather_blocks(pool, ids(4, 0), out) is out
    assert_same_bits(out, pool[[4, 0]])


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("num_tokens", [None, 0, 3, (4, 0, 3)])
def test_copy_blocks_copies_the_first_tokens_only(part, num_tokens):
    pool = make_pool()[PARTS[part]]
    expected = pool.clone()
    counts = num_tokens if isinstance(num_tokens, tuple) else (num_tokens,) * 3
    for src, dst, count in zip((1, 1, 4), (0, 5, 8), counts, strict=True):
        count = pool.shape[-3] if count is None else count
        expected[dst].narrow(-3, 0, count).copy_(expected[src].narrow(-3, 0, count))
    given = ids(*num_tokens) if isinstance(num_tokens, tuple) else num_tokens
    copy_blocks(pool, ids(1, 1, 4), ids(0, 5, 8), given)
    assert_same_bits(pool, expected)


def test_moving_no_block_is_fine():
    pool = make_pool()
    expected = pool.clone()
    assert gather_blocks(pool, ids()).shape[0] == 0
    scatter_blocks(pool[:0], pool, ids())
    copy_blocks(pool, ids(), ids())
    write_kv(*torch.empty(2, 0, 3, 16), pool[:, 0, 0], pool[:, 0, 1], torch.arange(0))
    assert_same_bits(pool, expected)


@st.composite
def pools(draw: st.DrawFn) -> torch.Tensor:
    """Any sizes, axes in any order in memory, some of them cut or stepped over."""
    sizes = [draw(st.integers(1, most)) for most in (9, 3, 2, 9, 4, 24)]
    order = draw(st.permutations(range(6)))
    steps = [draw(st.sampled_from((1, 1, 1, 2))) for _ in sizes]
    storage = torch.randn([sizes[axis] * steps[axis] for axis in order])
    pool = storage.permute([order.index(axis) for axis in range(6)])
    pool = pool[tuple(slice(None, None, step) for step in steps)]
    return pool[:, 0] if draw(st.booleans()) else pool


def test_any_shape_and_strides_move_bit_for_bit():
    @settings(max_examples=EXAMPLES)
    @given(pools(), st.data(), st.sampled_from(ORDERS))
    def check(pool, data, order):
        some = st.lists(st.integers(0, len(pool) - 1), max_size=5, unique=True)
        chosen = data.draw(some)
        half = len(chosen) // 2
        src, dst = ids(*chosen[:half]), ids(*chosen[half : 2 * half])
        counts = data.draw(st.lists(st.integers(0, pool.shape[-3]), min_size=half, max_size=half))
        expected = pool.clone()
        for a, b, count in zip(src, dst, counts, strict=True):
            expected[b].narrow(-3, 0, count).copy_(expected[a].narrow(-3, 0, count))
        with program_order(order):
            staged = gather_blocks(pool, ids(*chosen))
            assert_same_bits(staged, pool[chosen])
            copy_blocks(pool, src, dst, ids(*counts))
            assert_same_bits(pool, expected)
            scatter_blocks(staged, pool, ids(*chosen))
            assert_same_bits(pool[chosen], staged)

    check()
