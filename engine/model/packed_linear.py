"""Linear layers of a bfloat16 model on a CPU, their weights in the layout oneDNN multiplies from.

torch hands oneDNN a plain matrix, which it rearranges in every call: with a few rows, as in
decoding, that takes as long as the product. Done once, a decode step takes three quarters of the
time and a prefill 0.95 of it, and the results had the same bits wherever we compared them.

Layers that multiply the same rows become one product, which the first of them computes: a product
of a few rows takes some 10 µs before it begins, and begins and ends for all threads together.

float32 stays as it is: there torch calls another library, which is faster at one row.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from engine.runner.cpu_threads import on_all_threads

# The rows that the layout is chosen for. Few or many make no difference that could be measured.
_ROWS = 64
# Elements of a weight from which on a product of a few rows gains from all threads.
_WIDE_ELEMENTS = 200_000
# What transformers calls the layers of one module that are given the same rows, in order of calls.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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
        for names in _SIBLINGS:
            siblings = [each for name in names if _is_plain(each := getattr(parent, name, None))]
            if len(siblings) == len(names) and len(set(map(_signature, siblings))) == 1:
                product = _JointProduct(siblings)
                for index, (name, linear) in enumerate(zip(names, siblings, strict=True)):
                    setattr(parent, name, JointLinear(linear, product, index))
        for name, child in list(parent.named_children()):
            if _is_plain(child):
                setattr(parent, name, PackedLinear(child))


def _is_plain(module: object) -> TypeGuard[nn.Linear]:
    # A subclass may do more than multiply.
    return type(module) is nn.Linear and module.weight.dtype == torch.bfloat16


def _signature(linear: nn.Linear) -> tuple[int, bool]:
    """What layers have in common whose weights can be one."""
    return linear.in_features, linear.bias is None


class _Packed:
    """A weight ``[out_features, in_features]`` and a bias or None, to multiply rows with."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._bias = bias
        self._is_wide = weight.numel() >= _WIDE_ELEMENTS
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor
        if self._is_wide:
            product = on_all_threads(self._product, rows)
        else:
            product = self._product(rows)
        return product

    def _product(self, rows: torch.Tensor) -> Any:
        return self._multiply(rows, self._weight, self._bias, "none", [], "")


class _Replacement(nn.Module):
    """Stands where ``linear`` stood, which must not change any more. Takes and returns bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # For those who ask a layer for its dtype or shape; the values are packed elsewhere.
        self.weight = linear.weight.detach().to("meta")
        self.bias = linear.bias


class PackedLinear(_Replacement):
    """``linear`` with its own packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self._packed = _Packed(linear.weight, linear.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed(rows)


class _JointProduct:
    """The product of the same rows with the weights of several layers.

    Keeps the last one until the last layer has had its part. A layer that is given other rows than
    the one before, or by another thread, computes it anew: which layers belong together is a guess
    about speed only. Rows must not be changed between the calls of two layers.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        bias = None if linears[0].bias is None else torch.cat([each.bias for each in linears])
        self._packed = _Packed(torch.cat([each.weight for each in linears]), bias)
        self._sizes = [each.out_features for each in linears]
        # Rows and parts at once, which no other thread can come between.
        self._last: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        last = self._last
        if last is None or last[0] is not rows:
            last = self._last = rows, torch.split(self._packed(rows), self._sizes, dim=-1)
        if index == len(self._sizes) - 1:
            self._last = None
        return last[1][index]


class JointLinear(_Replacement):
    """``linear``, its result a part of a joint product: a view of rows that lie further apart."""

    def __init__(self, linear: nn.Linear, product: _JointProduct, index: int) -> None:
        super().__init__(linear)
        self._product, self._index = product, index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product.part(self._index, rows)
