"""Which tile shape the attention kernel runs with: a lookup, no autotuning.

Autotuning on the hot path would stall serving, is illegal while a graph is captured and makes the
same prompt give different bits on different days. The table is made offline by
``python -m kernels.tune`` and checked in as ``config_table.py``.
"""

from dataclasses import dataclass

import torch

from kernels.config_table import TABLE


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """``rows`` × ``keys`` is the tile of scores; ``tma``: load tiles through a tensor descriptor
    where a block holds a whole tile."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool


def attention_config(
    regime: str, compute_capability: int, head_dim: int, dtype: torch.dtype
) -> AttentionConfig:
    """The entry of the nearest older architecture and the nearest larger head_dim.

    regime              "prefill", or "decode" for blocks of at most 16 packed rows
    compute_capability  major × 10 + minor
    """
    itemsize = 4 if dtype == torch.float32 else 2
    known = TABLE[regime, itemsize]
    capability = max((c for c, _ in known if c <= compute_capability), default=80)
    dim = min(d for c, d in known if c == capability and d >= head_dim)
    return AttentionConfig(*known[capability, dim])
