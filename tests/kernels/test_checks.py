"""What the launchers refuse: by name, expected and got, before anything runs."""

import subprocess
import sys

import pytest
import torch
from attention_oracle import make_case

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill


def prefill_with(**changes: object) -> torch.Tensor:
    case = make_case([(20, 3)])
    names = ("q", "k_pool", "v_pool", "block_tables", "cu_seqlens_q", "seq_lens")
    operands = [changes.pop(name, getattr(case, name)) for name in names]
    return paged_prefill(*operands, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4)}, "q: expected number of axes 3, got 2"),
        ({"q": torch.zeros(3, 4, 64).double()}, "q: expected float32, float16 or bfloat16"),
        ({"q": torch.zeros(3, 64, 4).mT}, "q: expected last stride 1, got 4"),
        ({"q": torch.zeros(3, 5, 64)}, "q: expected a multiple of 2 heads, got 5"),
        ({"q": torch.zeros(3, 4, 32)}, "k_pool: expected head_dim of q 32, got 64"),
        ({"q": torch.zeros(3, 4, 64).half()}, "k_pool: expected dtype torch.float16, got"),
        ({"v_pool": torch.zeros(1, 16, 2, 64)}, "v_pool: expected shape of k_pool"),
        ({"block_tables": torch.zeros(1, 2)}, "block_tables: expected dtype torch.int32, got"),
        ({"block_tables": torch.zeros(2, 2).int()}, r"block_tables: expected shape \(1, 2\)"),
        ({"seq_lens": torch.tensor([23])}, "seq_lens: expected dtype torch.int32, got torch.int64"),
        ({"cu_seqlens_q": torch.zeros(3).int()}, r"cu_seqlens_q: expected shape \(2,\)"),
        ({"window": 0}, "window: expected at least 1"),
        ({"softcap": 0.0}, "softcap: expected a positive number or None, got 0.0"),
        ({"sinks": torch.zeros(4).half()}, "sinks: expected dtype torch.float32"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected shape \(4,\), got \(3,\)"),
        ({"out": torch.zeros(3, 4, 32)}, r"out: expected shape \(3, 4, 64\), got \(3, 4, 32\)"),
        ({"out": torch.zeros(3, 4, 64).half()}, "out: expected dtype torch.float32"),
        ({"seq_lens": torch.zeros(1, device="meta").int()}, "seq_lens: expected device cpu, got"),
    ],
)
def test_prefill_names_the_argument_what_it_expected_and_what_it_got(changes, message):
    with pytest.raises(ValueError, match=message):
        prefill_with(**changes)


def test_decode_wants_whole_rows_per_sequence():
    case = make_case([(20, 1), (3, 1)])
    with pytest.raises(ValueError, match="q: expected a multiple of 2 rows, got 1"):
        paged_decode(case.q[:1], case.k_pool, case.v_pool, case.block_tables, case.seq_lens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 20}, "q: expected a head_dim that is a multiple of 16 up to 256, got 20"),
        ({"head_dim": 272}, "q: expected a head_dim that is a multiple of 16 up to 256, got 272"),
        ({"block_size": 4}, "k_pool: expected a block_size of 8 to 256, got 4"),
    ],
)
def test_the_triton_kernel_refuses_what_the_twin_takes(options, message, interpreter):
    case = make_case([(9, 1)], **options)
    with pytest.raises(ValueError, match=message):
        paged_decode(case.q, case.k_pool, case.v_pool, case.block_tables, case.seq_lens)


def test_the_triton_kernel_wants_strides_of_whole_16_byte_loads(interpreter):
    case = make_case([(9, 1)])
    q = torch.zeros(1, 4, 65)[..., :64]
    with pytest.raises(ValueError, match="q: expected strides that are multiples of 16, got 260"):
        paged_decode(q, case.k_pool, case.v_pool, case.block_tables, case.seq_lens)


POOL = torch.zeros(4, 2, 2, 8, 2, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gather_blocks(POOL, torch.tensor([1])), "block_ids: expected dtype torch.int32"),
        (
            lambda: gather_blocks(POOL[0, 0, 0], torch.tensor([1]).int()),
            "pool: expected at least 4",
        ),
        (
            lambda: gather_blocks(POOL, torch.tensor([1]).int(), POOL[:2]),
            r"out: expected shape \(1, 2, 2, 8, 2, 16\)",
        ),
        (
            lambda: scatter_blocks(POOL[:1].half(), POOL, torch.tensor([1]).int()),
            "src: expected dtype torch.float32, got torch.float16",
        ),
        (
            lambda: copy_blocks(POOL, torch.tensor([1, 2]).int(), torch.tensor([2, 3]).int()),
            "dst_ids: expected none of src_ids, got block 2 in both",
        ),
        (
            lambda: copy_blocks(POOL, torch.tensor([0, 1]).int(), torch.tensor([2, 2]).int()),
            "dst_ids: expected no block twice, got duplicates",
        ),
        (
            lambda: copy_blocks(POOL, torch.tensor([0]).int(), torch.tensor([1]).int(), 9),
            "num_tokens: expected 0 to 8, got 9",
        ),
        (
            lambda: write_kv(POOL[0, 0, 0], POOL[0, 0, 0], POOL[:, 0, 0], POOL[:, 0, 1], POOL[0]),
            "slot_mapping: expected dtype torch.int64, got torch.float32",
        ),
        (
            lambda: write_kv(*POOL[0, 0, :, :, :1], POOL[:, 0, 0], POOL[:, 0, 1], torch.arange(8)),
            r"k: expected heads and head_dim of k_pool \(2, 16\), got \(1, 16\)",
        ),
    ],
)
def test_block_movement_refuses_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_twin_does_not_import_triton():
    code = (
        "import sys, torch\n"
        "import kernels.paged_prefill, kernels.paged_decode, kernels.cache_write\n"
        "from kernels.block_copy import gather_blocks\n"
        "gather_blocks(torch.zeros(2, 8, 1, 4), torch.tensor([1]).int())\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
