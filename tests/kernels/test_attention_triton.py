"""The interpreted attention kernel against float64 attention.

In float16 and float32 only: the interpreter's bfloat16 arithmetic is wrong (it adds bit patterns).
Programs run in several orders, for a GPU promises none.
"""

import os

import pytest
import torch
from attention_oracle import Case, attention_cases, expected_attention, make_case, tolerance
from hypothesis import given, settings
from program_order import ORDERS, program_order

from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

pytestmark = pytest.mark.usefixtures("interpreter")

EXAMPLES = int(os.environ.get("KERNEL_EXAMPLES", "60"))


def prefill(case: Case, **kwargs: object) -> torch.Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    metadata = (case.block_tables, case.cu_seqlens_q, case.seq_lens)
    return paged_prefill(
        case.q, case.k_pool, case.v_pool, *metadata, **case.options, out=out, **kwargs
    )


def decode(case: Case, **kwargs: object) -> torch.Tensor:
    out = torch.full(case.q.shape, torch.nan, dtype=case.q.dtype)
    metadata = (case.block_tables, case.seq_lens)
    return paged_decode(
        case.q, case.k_pool, case.v_pool, *metadata, **case.options, out=out, **kwargs
    )


def assert_answers(case: Case, got: torch.Tensor) -> None:
    bound = tolerance(case.q.dtype)
    torch.testing.assert_close(got.double(), expected_attention(case), rtol=bound, atol=bound)


DRAWN = {
    "dtypes": (torch.float32, torch.float16),
    "head_dims": (16, 64, 80, 96, 128),
    "block_sizes": (8, 16, 24, 64, 128),
    "max_new": 70,
}


@pytest.mark.parametrize("order", ORDERS)
def test_prefill_equals_float64_attention(order):
    @settings(max_examples=EXAMPLES // 3)
    @given(attention_cases(**DRAWN))
    def check(case):
        with program_order(order):
            assert_answers(case, prefill(case))

    check()


@pytest.mark.parametrize("order", ORDERS)
def test_decode_equals_float64_attention(order):
    @settings(max_examples=EXAMPLES // 3)
    @given(attention_cases(**DRAWN, decode=True))
    def check(case):
        with program_order(order):
            assert_answers(case, decode(case))

    check()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_head_dim_of_the_models(head_dim, dtype):
    case = make_case([(70, 9), (0, 3)], head_dim=head_dim, dtype=dtype, num_kv_heads=1)
    assert_answers(case, prefill(case))


@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window": 90, "softcap": 20.0, "with_sinks": True}])
def test_tensor_descriptors_load_blocks_that_hold_a_whole_tile(block_size, options, monkeypatch):
    from kernels import attention_launch

    launched = []
    run = attention_launch.Launch.run
    monkeypatch.setattr(
        attention_launch.Launch, "run", lambda self: (launched.append(self.options), run(self))
    )
    case = make_case(
        [(300, 40), (0, 70), (63, 1)], block_size=block_size, dtype=torch.float16, **options
    )
    got = prefill(case)
    assert launched[0]["TMA"]
    assert_answers(case, got)


@pytest.mark.parametrize("split_len", [64, 512, 1 << 20])
def test_splits_of_a_fixed_length_give_the_same_answer(split_len):
    case = make_case([(900, 1), (0, 0), (62, 1)], with_sinks=True, padding_rows=1)
    assert_answers(case, decode(case, split_len=split_len))


def test_a_split_of_fixed_length_makes_a_sequence_independent_of_its_batch():
    """Bit for bit, which a number of splits chosen from the batch would not give."""
    alone = make_case([(700, 1)], seed=3)
    beside = make_case([(700, 1), (90, 1), (400, 1)], seed=3)
    beside.k_pool[beside.block_tables[0, :44].long()] = alone.k_pool[
        alone.block_tables[0, :44].long()
    ]
    beside.v_pool[beside.block_tables[0, :44].long()] = alone.v_pool[
        alone.block_tables[0, :44].long()
    ]
    beside.q[0] = alone.q[0]
    assert torch.equal(decode(alone, split_len=256)[0], decode(beside, split_len=256)[0])


def test_where_a_chunk_begins_does_not_change_a_token_bit_for_bit():
    """Key tiles start at position 0, so that a cached prefix and a computed one give the same."""
    whole = make_case([(0, 150)], seed=5)
    expected = prefill(whole, split_len=1 << 20)
    for prefix in (1, 63, 64, 100):
        part = Case(
            q=whole.q[prefix:],
            k_pool=whole.k_pool,
            v_pool=whole.v_pool,
            block_tables=whole.block_tables,
            cu_seqlens_q=torch.tensor([0, 150 - prefix], dtype=torch.int32),
            seq_lens=whole.seq_lens,
            scale=whole.scale,
            window=None,
            softcap=None,
            sinks=None,
        )
        assert torch.equal(prefill(part, split_len=1 << 20), expected[prefix:])


@pytest.mark.parametrize("num_new", [2, 4])
def test_decode_takes_a_few_tokens_of_each_sequence(num_new):
    case = make_case([(300, num_new), (0, 0), (7, num_new)], padding_rows=num_new, window=200)
    assert_answers(case, decode(case))
