"""Linear layers of a bfloat16 model on a CPU, their weights in the layout oneDNN multiplies from.

torch hands oneDNN a plain matrix, which it rearranges in every call: with a few rows, as in
decoding, that takes as long as the product. Done once, a decode step takes three quarters of the
time and a prefill 0.95 of it, and the results had the same bits wherever we compared them.

float32 stays as it is: there torch calls another library, which is faster at one row.
"""

from typing import Any

import torch
from torch import nn

# The rows that the layout is chosen for. Few or many make no difference that could be measured.
_ROWS = 64


def can_pack(network: nn.Module) -> bool:
    """Whether it would gain something here."""
    parameter = next(network.parameters())
    return bool(
        parameter.device.type == "cpu"
        and parameter.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linears(network: nn.Module) -> None:
    """Replace the linear layers, in place, where ``can_pack``.

    A layer's plain weight is freed unless an embedding has it too.
    """
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            # A subclass may do more than multiply.
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(parent, name, PackedLinear(child))


class PackedLinear(nn.Module):
    """``linear``, which must not change any more. Takes and returns bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # For those who ask a layer for its dtype or shape; the values are in ``_packed``.
        self.weight = linear.weight.detach().to("meta")
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._multiply(rows, self._packed, self.bias, "none", [], "")
        return product
