import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface

from engine.attention import PAGED, attention_backend, unknown_arguments
from kernels.paged_prefill import paged_prefill
from kvstore.errors import ConfigError

CPU = torch.device("cpu")


def test_no_mask_is_registered_for_serving():
    """A registered mask costs a host synchronisation per forward."""
    assert PAGED not in AttentionMaskInterface._global_mapping


def test_arguments_that_say_nothing_about_attention_are_known():
    arguments = {
        "scaling": 0.125,
        "sliding_window": 24,
        "softcap": 50.0,
        "s_aux": torch.ones(4),
        "dropout": 0.0,
        "is_causal": True,
        "position_ids": torch.arange(3),
        "use_cache": False,
        "output_attentions": False,
        "indices": None,
    }
    assert unknown_arguments(arguments) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_bias", torch.zeros(1)),
        ("indices", torch.zeros(1)),
        ("sinks", torch.zeros(4)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("head_mask", False),
    ],
)
def test_an_argument_that_would_be_ignored_is_reported(name, value):
    assert unknown_arguments({"scaling": 1.0, name: value}) == [name]


def test_the_twins_run_on_the_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert attention_backend("auto", CPU, 64).name == "torch"
    assert attention_backend("torch", CPU, 64).name == "torch"


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="attention_backend: triton needs a CUDA device"):
        attention_backend("triton", CPU, 64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert attention_backend("triton", CPU, 64).name == "triton"


def test_the_twins_can_be_forced_where_the_kernels_would_run(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pools = torch.randn(2, 3, 8, 2, 16)
    q = torch.randn(5, 4, 16)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    cu_seqlens_q = torch.tensor([0, 5], dtype=torch.int32)
    seq_lens = torch.tensor([11], dtype=torch.int32)
    options = {"scale": 0.25, "window": 6, "softcap": 20.0, "sinks": torch.randn(4)}
    backend = attention_backend("torch", CPU, 16)
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
    assert attention_backend("auto", cuda, 64).name == "triton"
    assert attention_backend("auto", cuda, 80).name == "triton"
    assert attention_backend("auto", cuda, 8).name == "torch"
    assert attention_backend("auto", cuda, 320).name == "torch"
