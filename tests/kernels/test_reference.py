"""The torch twins against a float64 attention that is written in the most literal way."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from attention_oracle import Case, attention_cases, expected_attention, make_case, tolerance
from hypothesis import given, settings

from kernels import attention_plan, reference
from kernels.attention_plan import plan_attention
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill


def prefill(case: Case) -> torch.Tensor:
    metadata = (case.block_tables, case.cu_seqlens_q, case.seq_lens)
    return paged_prefill(case.q, case.k_pool, case.v_pool, *metadata, **case.options)


def decode(case: Case, split_len: int | None = None) -> torch.Tensor:
    metadata = (case.block_tables, case.seq_lens)
    options = case.options | {"split_len": split_len}
    return paged_decode(case.q, case.k_pool, case.v_pool, *metadata, **options)


def put_first(case: Case, other: Case) -> None:
    """Give the first sequence of ``case`` the query, keys and values of the first of ``other``."""
    count = -(-int(case.seq_lens[0]) // case.k_pool.shape[1])
    ids, other_ids = (each.block_tables[0, :count].long() for each in (case, other))
    case.k_pool[ids] = other.k_pool[other_ids]
    case.v_pool[ids] = other.v_pool[other_ids]
    num_new = int(case.cu_seqlens_q[1])
    case.q[:num_new] = other.q[:num_new]


def assert_answers(case: Case, got: torch.Tensor) -> None:
    bound = tolerance(case.q.dtype)
    assert got.dtype == case.q.dtype
    torch.testing.assert_close(got.double(), expected_attention(case), rtol=bound, atol=bound)


@settings(max_examples=100)
@given(attention_cases(dtypes=(torch.float32, torch.float16), head_dims=(5, 16, 64)))
def test_prefill_equals_float64_attention(case):
    assert_answers(case, prefill(case))


@settings(max_examples=100)
@given(attention_cases(dtypes=(torch.float32, torch.float16), head_dims=(5, 16, 64), decode=True))
def test_decode_equals_float64_attention(case):
    assert_answers(case, decode(case))


@settings(max_examples=40)
@given(attention_cases(dtypes=(torch.bfloat16,), head_dims=(64,)))
def test_bfloat16_prefill_is_right_to_its_rounding(case):
    assert_answers(case, prefill(case))


def test_bfloat16_is_multiplied_in_float32_where_the_cpu_has_no_bfloat16_products(monkeypatch):
    monkeypatch.setattr(reference, "_multiplies_bfloat16", lambda: False)
    case = make_case([(40, 30), (0, 5)], dtype=torch.bfloat16)
    got = prefill(case).double()
    torch.testing.assert_close(got, expected_attention(case), rtol=4e-3, atol=4e-3)


def test_metadata_rewritten_in_place_is_planned_anew():
    """The plan of the previous call may be reused only while the metadata's contents are equal."""
    first = make_case([(40, 1), (70, 1)], seed=1)
    decode(first)
    first.block_tables.numpy()[:] = first.block_tables.flip(0).numpy()
    first.seq_lens.numpy()[:] = first.seq_lens.flip(0).numpy()
    assert_answers(first, decode(first))


@pytest.mark.parametrize("lengths", [[40], [40, 70, 41], [300, 300]])
def test_queries_may_lie_as_a_model_hands_them_over(lengths):
    """[num_heads, num_tokens, head_dim], transposed; alone, padded, and behind shared blocks."""
    case = make_case([(length, 1) for length in lengths])
    count = min(lengths) // case.k_pool.shape[1]
    case.block_tables[:, :count] = case.block_tables[0, :count].clone()
    case = replace(case, q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    assert_answers(case, decode(case))


def test_slots_rewritten_in_place_are_looked_at_anew():
    pools = torch.zeros(2, 3, 4, 1, 16)
    slots = torch.tensor([5, -1])
    for first, second in ((5, -1), (6, 2)):
        slots.copy_(torch.tensor([first, second]))
        reference.write_kv(*torch.ones(2, 2, 1, 16), *pools, slots)
    written = pools[..., 0].flatten(1).nonzero()
    assert written.tolist() == [[pool, slot] for pool in (0, 1) for slot in (2, 5, 6)]


@pytest.mark.parametrize("num_seqs", [1, 7, 40])
def test_decode_of_many_lengths_pads_into_groups(num_seqs):
    case = make_case([(13 * i % 300, 1) for i in range(num_seqs)], heads_per_kv=3)
    assert_answers(case, decode(case))


def test_more_new_tokens_than_the_sequence_has_is_refused():
    case = make_case([(0, 5)])
    case.seq_lens[0] = 4
    with pytest.raises(ValueError, match="seq_lens: expected at least the 5 new tokens"):
        prefill(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 50, "with_sinks": True, "softcap": 20.0}])
def test_with_a_split_length_a_decoded_row_has_the_same_bits_in_every_batch(dtype, options):
    """Padded to the length of its neighbours, a row's sums would be taken in another order."""
    alone = make_case([(70, 1)], dtype=dtype, heads_per_kv=3, **options)
    beside = make_case([(70, 1), (75, 1), (90, 1)], dtype=dtype, heads_per_kv=3, seed=1, **options)
    if alone.sinks is not None:
        beside.sinks.copy_(alone.sinks)
    put_first(beside, alone)
    assert torch.equal(decode(alone, split_len=512)[0], decode(beside, split_len=512)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_new", [1, 40])
def test_where_blocks_lie_in_the_pool_changes_no_bit(dtype, num_new):
    """Adjacent blocks are copied as one run, scattered ones are picked one by one."""
    cases = [
        make_case([(400, num_new)], dtype=dtype, adjacent=adjacent) for adjacent in (True, False)
    ]
    put_first(cases[1], cases[0])
    first, second = (prefill(case) for case in cases)
    assert torch.equal(first, second)


def test_buffers_made_in_inference_mode_serve_outside_of_it():
    """torch refuses to write into a tensor made in inference mode anywhere else."""
    case = make_case([(40, 30), (70, 1), (90, 1)], softcap=20.0, window=50)
    reference._buffers.flat.clear()
    reference._buffers.views.clear()
    with torch.inference_mode():
        inside = prefill(case)
    assert torch.equal(prefill(case), inside)


@settings(max_examples=50)
@given(attention_cases(dtypes=(torch.float32, torch.float16), head_dims=(16, 64), decode=True))
def test_decode_over_a_prefix_gathered_once_equals_float64_attention(case):
    with patch.object(attention_plan, "MIN_SHARED_POSITIONS", 8):
        assert_answers(case, decode(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"with_sinks": True, "softcap": 20.0}])
def test_sequences_of_two_documents_gather_each_once(dtype, options):
    """Two trees under a common first block: three and two questions, and one without relatives."""
    lengths = [(n, 1) for n in (400, 415, 450, 300, 333, 500)]
    case = make_case(lengths, dtype=dtype, heads_per_kv=3, seed=2, **options)
    tables = case.block_tables
    for seq, (document, shared) in enumerate([(0, 25), (0, 25), (0, 22), (3, 18), (3, 18)]):
        tables[seq, :shared] = tables[document, :shared]
    tables[:, 0] = tables[0, 0]
    plan = plan_attention(tables, None, case.seq_lens, 1, 16, None)
    shared = {tuple(group.rows.tolist()): len(group.shared.ids) for group in plan.groups[:2]}
    assert shared == {(0, 1, 2): 22, (3, 4): 18}
    assert [group.shared for group in plan.groups[2:]] == [None]
    assert_answers(case, decode(case))
