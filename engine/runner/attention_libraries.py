"""flash-attn and FlashInfer on the paged pool, with the signatures of ``kernels/``.

Each reads keys and values where they are: a layer's view of the pool is their "NHD" page layout,
``[num_blocks, block_size, num_kv_heads, head_dim]``, and they take any strides but the last.

    library        written for     blocks            window of w        scores
    flash-attn 3   3.0.0           any size          (w - 1, 0)         bottom-right causal
    flash-attn 2   2.8.3           multiples of 256  (w - 1, 0)         bottom-right causal
    FlashInfer     0.6             any size          window_left w - 1  bottom-right causal

"Bottom-right": the last query of a sequence sees all of it, as everywhere in this engine. None of
them is installed with this package, and none runs without CUDA.

``paged_prefill`` and ``paged_decode`` of each class take the arguments of the functions of that
name in ``kernels/``, with ``out`` given and without ``split_len``.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import checks
from kvstore.block import BlockLayout
from kvstore.errors import ConfigError

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def load_library(
    name: str, layout: BlockLayout
) -> "FlashAttention3 | FlashAttention2 | FlashInfer":
    """``flash_attn`` or ``flashinfer`` for blocks of this layout.

    Raises ``ConfigError`` when it is not importable, or does not take such blocks.
    """
    if layout.dtype == "float32":
        raise _unusable(name, "computes in float16 and bfloat16, and the model is in float32")
    if name == "flashinfer":
        if layout.head_dim not in _FLASHINFER_HEAD_DIMS:
            expected = ", ".join(map(str, _FLASHINFER_HEAD_DIMS))
            raise _unusable(name, f"has kernels for head_dim {expected}, not {layout.head_dim}")
        return FlashInfer(_import(name, "flashinfer", "flashinfer-python"))
    if layout.head_dim % 8 or layout.head_dim > checks.MAX_TRITON_HEAD_DIM:
        raise _unusable(name, f"has kernels for head_dim 8, 16, … 256, not {layout.head_dim}")
    try:
        return FlashAttention3(import_module("flash_attn_interface"))
    except ImportError:
        module = _import(name, "flash_attn", "flash-attn")
    if layout.block_size % 256:
        raise _unusable(
            name, f"2 reads blocks of 256 positions, not of {layout.block_size} (version 3 does)"
        )
    return FlashAttention2(module)


class FlashAttention3:
    """Version 3: one function for everything, Hopper's instructions."""

    is_capturable = True

    def __init__(self, module: ModuleType) -> None:
        self._attend = module.flash_attn_with_kvcache

    def paged_prefill(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        **options: Any,
    ) -> Tensor:
        result = self._attend(
            q,
            k_pool,
            v_pool,
            cache_seqlens=seq_lens,
            page_table=block_tables,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=q.shape[0],  # a bound that needs no look at the lengths
            **_flash_options(options),
        )
        return _into(options["out"], result)

    def paged_decode(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        **options: Any,
    ) -> Tensor:
        result = self._attend(
            _by_sequence(q, seq_lens),
            k_pool,
            v_pool,
            cache_seqlens=seq_lens,
            page_table=block_tables,
            **_flash_options(options),
        )
        return _into(options["out"], result)


class FlashAttention2:
    """Version 2: another function for a ragged batch than for one query a sequence."""

    is_capturable = True

    def __init__(self, module: ModuleType) -> None:
        self._attend_ragged = module.flash_attn_varlen_func
        self._attend = module.flash_attn_with_kvcache

    def paged_prefill(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        **options: Any,
    ) -> Tensor:
        cu_seqlens_k = torch.zeros_like(cu_seqlens_q)
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=cu_seqlens_k[1:])
        result = self._attend_ragged(
            q,
            k_pool,
            v_pool,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=q.shape[0],
            max_seqlen_k=block_tables.shape[1] * k_pool.shape[1],
            block_table=block_tables,
            **_flash_options(options),
        )
        return _into(options["out"], result)

    def paged_decode(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        **options: Any,
    ) -> Tensor:
        result = self._attend(
            _by_sequence(q, seq_lens),
            k_pool,
            v_pool,
            cache_seqlens=seq_lens,
            block_table=block_tables,
            **_flash_options(options),
        )
        return _into(options["out"], result)


class FlashInfer:
    """One planned wrapper per kind of layer; plans are made on the host, once a step.

    Planning reads the lengths, so the first layer of a step waits for the device, which has nothing
    else to do then. The decode wrapper of FlashInfer is this one with other arguments, so decoding
    goes the same way.
    """

    is_capturable = False

    def __init__(self, module: ModuleType) -> None:
        self._make_wrapper = module.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        # By (window, softcap, scale): the wrapper, and the metadata it was planned for. Tensors of
        # a step are made anew for every step, so identity tells steps apart.
        self._planned: dict[tuple[Any, ...], tuple[Any, tuple[Tensor | None, ...]]] = {}

    def paged_prefill(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor | None,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        _refuse_sinks("flashinfer", sinks)
        kind, metadata = (window, softcap, scale), (block_tables, cu_seqlens_q, seq_lens)
        wrapper, planned_for = self._planned.get(kind, (None, ()))
        if wrapper is None:
            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            wrapper = self._make_wrapper(self._workspace, "NHD")
        if not planned_for or any(a is not b for a, b in zip(planned_for, metadata, strict=True)):
            starts = cu_seqlens_q
            if starts is None:
                starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
                starts *= q.shape[0] // len(seq_lens)
            wrapper.plan(
                starts.cpu(),
                *_pages(block_tables.cpu(), seq_lens.cpu(), k_pool.shape[1]),
                q.shape[1],
                k_pool.shape[2],
                q.shape[2],
                k_pool.shape[1],
                causal=True,
                sm_scale=scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=softcap or 0.0,
                q_data_type=q.dtype,
                kv_data_type=k_pool.dtype,
            )
            self._planned[kind] = (wrapper, metadata)
        wrapper.run(q, (k_pool, v_pool), out=out)
        return out

    def paged_decode(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        **options: Any,
    ) -> Tensor:
        return self.paged_prefill(q, k_pool, v_pool, block_tables, None, seq_lens, **options)


def _pages(tables: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's form of block tables: where each sequence's ids begin, the ids of all sequences
    one after the other, and the positions in the last block of each. int32, on the host."""
    counts = (seq_lens + block_size - 1) // block_size
    starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    ids = tables[torch.arange(tables.shape[1]) < counts[:, None]]
    in_last = seq_lens - (counts - 1).clamp(min=0) * block_size
    return starts, ids, in_last.int()


def _by_sequence(q: Tensor, seq_lens: Tensor) -> Tensor:
    """``[num_seqs, tokens each, num_heads, head_dim]``."""
    return q.view(len(seq_lens), -1, *q.shape[1:])


def _flash_options(options: dict[str, Any]) -> dict[str, Any]:
    """flash-attn's names for ours; the two versions agree here."""
    _refuse_sinks("flash_attn", options["sinks"])
    window = options["window"]
    return {
        "softmax_scale": options["scale"],
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": options["softcap"] or 0.0,
    }


def _into(out: Tensor, result: Tensor) -> Tensor:
    """flash-attn allocates its result; ours is where the caller wants it."""
    return out.copy_(result.view_as(out))


def _refuse_sinks(name: str, sinks: Tensor | None) -> None:
    if sinks is not None:
        raise _unusable(name, "has no attention sinks, which this model uses")


def _import(name: str, module: str, distribution: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"attention_backend: {name} cannot be imported ({error}); pip install {distribution}, "
            "or use auto or triton"
        ) from error


def _unusable(name: str, problem: str) -> ConfigError:
    return ConfigError(f"attention_backend: {name} {problem}; use auto or triton")
