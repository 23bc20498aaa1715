import pytest
import torch

from engine.runner.attention_backends import find_backend
from kernels.paged_prefill import paged_prefill
from kvstore.block import BlockLayout
from kvstore.errors import ConfigError

CPU = torch.device("cpu")


def layout(head_dim: int = 64) -> BlockLayout:
    return BlockLayout(2, 16, 2, head_dim, "float32")


def test_the_twins_run_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert find_backend("auto", CPU, layout(64)).name == "torch"
    assert find_backend("torch", CPU, layout(64)).name == "torch"


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="attention_backend: triton needs a CUDA device"):
        find_backend("triton", CPU, layout(64))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert find_backend("triton", CPU, layout(64)).name == "triton"


def test_the_twins_can_be_forced_where_the_kernels_would_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pools = torch.randn(2, 3, 8, 2, 16)
    q = torch.randn(5, 4, 16)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 5], dtype=torch.int32)
    seq_lens = torch.tensor([11], dtype=torch.int32)
    options = {"scale": 0.25, "window": 6, "softcap": 20.0, "sinks": torch.randn(4)}
    backend = find_backend("torch", CPU, layout(16))
    prefill = backend.paged_prefill(
        q, *pools, tables, cu_seqlens_q, seq_lens, **options, out=torch.empty_like(q)
    )
    decode = backend.paged_decode(
        q[-1:], *pools, tables, seq_lens, **options, out=torch.empty_like(q[-1:])
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    expected = paged_prefill(q, *pools, tables, cu_seqlens_q, seq_lens, **options)
    torch.testing.assert_close(prefill, expected)
    torch.testing.assert_close(decode, expected[-1:])


def test_cuda_falls_back_to_the_twins_for_a_head_dim_without_kernel():
    cuda = torch.device("cuda")
    assert find_backend("auto", cuda, layout(64)).name == "triton"
    assert find_backend("auto", cuda, layout(80)).name == "triton"
    assert find_backend("auto", cuda, layout(8)).name == "torch"
    assert find_backend("auto", cuda, layout(320)).name == "torch"
