"""Where the interpreted kernels read and write, and when: no order of programs is promised."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program_order import ORDERS, program_order

from kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill

ROOT = Path(__file__).parents[2]


def run_guarded(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("guard_page.py")), what]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_no_kernel_touches_memory_past_its_operands():
    """Every operand ends where an unmapped page begins, so a byte too far ends the process."""
    done = run_guarded("kernels")
    assert done.returncode == 0, f"died in {done.stdout.split()[-1:]}: {done.stderr[-2000:]}"
    assert done.stdout.split()[-1] == "done"


def test_the_guard_page_ends_a_process_that_reads_past_its_operand():
    assert run_guarded("overrun").returncode == -signal.SIGSEGV


@pytest.fixture(scope="module")
def large_pool():
    """Over 2^31 elements in address space only: memory comes with the first touch of a page."""
    shape = (2200, 2, 2, 128, 16, 128)  # 1,048,576 elements a block
    pool = torch.empty(shape, dtype=torch.float16)
    assert pool.numel() > 2**31
    return pool


def test_blocks_beyond_two_billion_elements_are_addressed(large_pool, interpreter):
    last = torch.tensor([2199, 2198], dtype=torch.int32)
    blocks = torch.randn(2, *large_pool.shape[1:]).half()
    scatter_blocks(blocks, large_pool, last)
    assert torch.equal(gather_blocks(large_pool, last), blocks)
    copy_blocks(large_pool, last[:1], torch.tensor([2100], dtype=torch.int32))
    assert torch.equal(large_pool[2100], blocks[0])


def test_attention_reaches_blocks_beyond_two_billion_elements(large_pool, interpreter):
    k, v = torch.randn(2, 5, 16, 128).half()
    pools = (large_pool[:, 1, 0], large_pool[:, 1, 1])
    write_kv(k, v, *pools, 2199 * 128 + torch.arange(5))
    q = torch.randn(5, 16, 128).half()
    tables = torch.tensor([[2199]], dtype=torch.int32)
    lens = torch.tensor([5], dtype=torch.int32)
    got = paged_prefill(q, *pools, tables, torch.tensor([0, 5], dtype=torch.int32), lens)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 128**-0.5
    scores.masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    torch.testing.assert_close(got.double(), expected, rtol=4e-3, atol=4e-3)
    decoded = paged_decode(q[4:], *pools, tables, lens)
    torch.testing.assert_close(decoded.double(), expected[4:], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_copies_does_not_matter(order, interpreter):
    """Blocks of many chunks each, every block a source or a destination."""
    pool = torch.randn(8, 2, 2, 64, 4, 64)
    expected = pool.clone()
    expected[[1, 3, 5, 7]] = expected[[0, 0, 4, 6]]
    src, dst = torch.tensor([[0, 0, 4, 6], [1, 3, 5, 7]], dtype=torch.int32)
    with program_order(order):
        copy_blocks(pool, src, dst)
    assert torch.equal(pool, expected)
