"""Which kernels compute attention: ours, their torch twins, or another library's.

All have the signatures of ``kernels/``, so nothing else in the engine knows which of them runs.
"""

import os
from functools import partial
from typing import Any

import torch

from engine.runner.attention_libraries import load_library
from engine.runner.determinism import DECODE_SPLIT
from engine.runner.forward_context import AttentionBackend
from kernels import checks, reference
from kernels.cache_write import write_kv
from kernels.paged_decode import paged_decode
from kernels.paged_prefill import paged_prefill
from kvstore.block import BlockLayout
from kvstore.errors import ConfigError

LIBRARIES = ("flash_attn", "flashinfer")
BACKENDS = ("auto", "torch", "triton", *LIBRARIES)


def find_backend(
    name: str, device: torch.device, layout: BlockLayout, *, is_deterministic: bool = False
) -> AttentionBackend:
    """The kernels for ``attention_backend=name``.

    auto        the Triton kernels on CUDA, their torch twins elsewhere and for a head_dim that the
                kernels do not offer. On CUDA ``backend_choice`` may find a faster library
    torch       the torch twins on any device
    triton      the Triton kernels; without CUDA they need TRITON_INTERPRET=1
    flash_attn, flashinfer
                these libraries, where they are installed; on CUDA

    ``is_deterministic``: a decoded token has the same bits whatever else is in its batch, which our
    own kernels alone promise. Raises ``ConfigError`` for what cannot be had.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    if name in LIBRARIES:
        if is_deterministic:
            raise ConfigError(f"deterministic: {name} does not promise it; use auto or triton")
        if device.type != "cuda":
            raise ConfigError(
                f"attention_backend: {name} needs a CUDA device, not {device}; use auto or torch"
            )
        library = load_library(name, layout)
        return AttentionBackend(
            name,
            write_kv,
            library.paged_prefill,
            library.paged_decode,
            is_capturable=library.is_capturable,
        )
    launchers_run_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if name == "triton" and not launchers_run_triton:
        raise ConfigError(
            f"attention_backend: triton needs a CUDA device, not {device}; use auto or torch "
            "(or set TRITON_INTERPRET=1 to interpret the kernels)"
        )
    split_len = DECODE_SPLIT if is_deterministic else None
    has_kernel = layout.head_dim % 16 == 0 and layout.head_dim <= checks.MAX_TRITON_HEAD_DIM
    runs_twin = name == "torch" or (name == "auto" and not has_kernel) or not launchers_run_triton
    if runs_twin:  # as it is: the launcher's checks would take 40 µs of each layer of each step
        decode = partial(_twin_decode, split_len=split_len)
        return AttentionBackend(
            "torch", reference.write_kv, _twin_prefill, decode, is_capturable=False
        )
    decode = partial(paged_decode, split_len=split_len)
    return AttentionBackend("triton", write_kv, paged_prefill, decode)


def _twin_prefill(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    split_len: int | None = None,
) -> torch.Tensor:
    options = (scale, window, softcap, sinks, split_len, out)
    return reference.attend(q, k_pool, v_pool, block_tables, cu_seqlens_q, seq_lens, *options)


def _twin_decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    return _twin_prefill(q, k_pool, v_pool, block_tables, None, seq_lens, **options)
