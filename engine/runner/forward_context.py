"""What one forward pass knows beside its tokens: where each layer's K and V go, and who reads what.

Attention runs deep inside a model we don't change, so its inputs can't be arguments: some models
drop keyword arguments on the way (StableLM, Nemotron). Each runner owns one ``ForwardContext``, a
slot that it fills anew for every step and makes current in its own thread for the time of the
forward. Several runners, also of one model, therefore never see each other's step.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's part of the device pool.

    k_pool, v_pool  views ``[num_blocks, block_size, num_kv_heads, head_dim]``
    window          positions a query sees, itself included; None for all
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """The kernels one runner calls, with the signatures of the modules in ``kernels/``.

    is_capturable  decoding never makes the host look at what is on the device
    """

    name: str
    write_kv: Callable[..., None]
    paged_prefill: Callable[..., torch.Tensor]
    paged_decode: Callable[..., torch.Tensor]
    is_capturable: bool = True


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """One step, shared by all layers. On the pool's device.

    slot_mapping   [num_tokens] int64, where each new token's K and V go
    block_tables   [num_seqs, max_blocks] int32; rows are padded with 0, which is never read
    cu_seqlens_q   [num_seqs + 1] int32, where each sequence's new tokens begin
    seq_lens       [num_seqs] int32, prefix plus new tokens
    is_decode      every sequence has exactly one new token
    is_long        so many positions are attended to that attention is worth all of a CPU's threads
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    is_decode: bool
    is_long: bool = True


@dataclass(slots=True)
class ForwardContext:
    """A runner's slot. ``layers`` is keyed by the model's attention modules."""

    layers: Mapping[torch.nn.Module, LayerCache]
    backend: AttentionBackend
    step: StepMetadata | None = None


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


def current_context() -> ForwardContext:
    """The context of the forward that runs in this thread."""
    if _current.context is None:
        raise RuntimeError("the model's attention is paged: call it through ModelRunner.execute")
    return _current.context


@contextmanager
def forward_context(context: ForwardContext, step: StepMetadata) -> Iterator[None]:
    """Make ``context`` current with this ``step``; restores what was current before."""
    previous = _current.context
    context.step, _current.context = step, context
    try:
        yield
    finally:
        context.step, _current.context = None, previous
