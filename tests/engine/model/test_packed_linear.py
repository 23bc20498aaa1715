import pytest
import torch
from torch import nn

from engine.model.packed_linear import JointLinear, PackedLinear, can_pack, pack_linears

needs_bfloat16 = pytest.mark.skipif(
    not can_pack(nn.Linear(2, 2).bfloat16()), reason="oneDNN here multiplies no bfloat16"
)


class Tied(nn.Module):
    """An embedding, a layer with bias, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.middle = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32, bias=False))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(ids)))


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().bfloat16().requires_grad_(False)


@needs_bfloat16
@pytest.mark.parametrize("num_tokens", [1, 8, 300])
def test_packed_layers_multiply_as_plain_ones(num_tokens):
    plain, packed = tied(), tied()
    pack_linears(packed)
    ids = torch.arange(num_tokens)[None] % 50
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids), plain(ids), rtol=2e-2, atol=2e-2)
    assert sum(isinstance(module, PackedLinear) for module in packed.modules()) == 3


@needs_bfloat16
def test_a_packed_layer_keeps_no_plain_weight_but_says_its_shape():
    network = tied()
    pack_linears(network)
    assert [name for name, _ in network.named_parameters()] == [
        "embedding.weight",
        "middle.0.bias",
    ]
    assert network.head.weight.shape == (50, 32)
    assert network.head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bfloat16_is_packed(dtype):
    assert not can_pack(tied().to(dtype))


@needs_bfloat16
def test_a_layer_that_does_more_than_multiply_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 2

    network = nn.Sequential(Scaled(4, 4)).bfloat16()
    pack_linears(network)
    assert type(network[0]) is Scaled


class Attention(nn.Module):
    """Three layers that are given the same rows, by the names transformers gives them."""

    def __init__(self, num_inputs: int = 32, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, bias=bias)
        self.k_proj = nn.Linear(num_inputs, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=bias)


def attention(**options) -> Attention:
    torch.manual_seed(0)
    return Attention(**options).bfloat16().requires_grad_(False)


def layers(module: Attention) -> list[nn.Module]:
    return [module.q_proj, module.k_proj, module.v_proj]


@needs_bfloat16
@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_the_same_rows_are_one_product(bias):
    plain, joint = attention(bias=bias), attention(bias=bias)
    pack_linears(joint)
    assert all(type(layer) is JointLinear for layer in layers(joint))
    rows = torch.randn(5, 32).bfloat16()
    with torch.inference_mode():
        for mine, theirs in zip(layers(joint), layers(plain), strict=True):
            torch.testing.assert_close(mine(rows), theirs(rows), rtol=2e-2, atol=2e-2)
    assert joint.q_proj._product._last is None


@needs_bfloat16
def test_no_layer_is_given_the_product_of_other_rows():
    """Two threads that run one model may call its layers in any order."""
    plain, joint = attention(), attention()
    pack_linears(joint)
    mine, others = (torch.randn(5, 32).bfloat16() for _ in range(2))
    calls = [(0, mine), (0, others), (1, mine), (2, others), (1, others), (2, mine), (1, mine)]
    with torch.inference_mode():
        for index, rows in calls:
            expected = layers(plain)[index](rows)
            torch.testing.assert_close(layers(joint)[index](rows), expected, rtol=2e-2, atol=2e-2)


@needs_bfloat16
def test_layers_that_cannot_be_given_the_same_rows_stay_apart():
    network = attention(num_inputs=64)
    pack_linears(network)
    assert all(type(layer) is PackedLinear for layer in layers(network))
