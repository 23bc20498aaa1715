import pytest
import torch
from torch import nn

from engine.model.packed_linear import PackedLinear, can_pack, pack_linears

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
