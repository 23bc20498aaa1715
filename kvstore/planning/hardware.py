"""What prefill and loads cost on some machine for some model: rough, but with its sources.

The arithmetic is the engine's own (``cost``); only where its numbers come from differs. A preset
takes the processor's peak from its data sheet and an assumed share of it, since no data sheet says
what prefill reaches. ``kvstore plan --measure`` replaces all of it by measurements.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.block import ITEMSIZE, TierName
from kvstore.costs.cost import ComputeEstimate, LoadEstimate
from kvstore.errors import ConfigError

_CHUNK_TOKENS = 2048  # of a prefill step, as the engine's default
_STEP_S = 5e-3  # a guess at what a step costs beside its tokens: scheduling, launches, sampling


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides the cost of prefill and the size of its cache.

    bytes_per_token    of K and V
    active_parameters  that a token is multiplied with, the output layer left out: prefill needs
                       logits of one token only
    attention_width    query heads times head dimension, over all layers
    """

    name: str
    bytes_per_token: int
    active_parameters: float
    attention_width: int


def _dense(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int
) -> ModelShape:
    """A decoder with gated feed-forward layers and a cache of two-byte values."""
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return ModelShape(
        name,
        bytes_per_token=4 * layers * kv_heads * head_dim,
        active_parameters=layers * (attention + 3 * hidden * ffn),
        attention_width=layers * heads * head_dim,
    )


MODELS = {
    shape.name: shape
    for shape in (
        _dense("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336),
        _dense("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944),
        _dense("smollm2-135m", 30, 576, 9, 3, 64, 1536),
    )
}


def read_model_shape(directory: str | Path) -> ModelShape:
    """From the ``config.json`` of a transformers model directory."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model: {path}: {error.strerror}; name a directory of a transformers model, or one of "
            f"{', '.join(MODELS)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from error
    try:
        config = config.get("text_config", config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        shape = _dense(
            Path(directory).resolve().name,
            config["num_hidden_layers"],
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            _active_width(config),
        )
    except KeyError as error:
        raise ConfigError(
            f"model: {path} does not say {error}; give --model-bytes-per-token instead"
        ) from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model: {path} is not of a model: {error}; give --model-bytes-per-token instead"
        ) from None
    itemsize = ITEMSIZE.get(str(config.get("dtype", config.get("torch_dtype"))), 2)
    return ModelShape(
        shape.name,
        shape.bytes_per_token * itemsize // 2,
        shape.active_parameters,
        shape.attention_width,
    )


def _active_width(config: Mapping[str, Any]) -> int:
    """Width of the feed-forward part that one token goes through."""
    experts = config.get("num_experts_per_tok")
    if experts:
        return int(experts * config.get("moe_intermediate_size", config["intermediate_size"]))
    return int(config["intermediate_size"])


@dataclass(frozen=True, slots=True)
class Processor:
    """A preset: what multiplies, and how bytes get there.

    flops_per_s   peak of dense bfloat16 products
    efficiency    share of it that prefill reaches
    loads         from each slower tier
    source        where the numbers are from
    """

    name: str
    flops_per_s: float
    efficiency: float
    loads: Mapping[TierName, LoadEstimate]
    source: str


_NVME = LoadEstimate(1e-3, 5e9)
_PCIE_4 = {TierName.HOST: LoadEstimate(2e-4, 25e9), TierName.DISK: _NVME}
_PCIE_5 = {TierName.HOST: LoadEstimate(2e-4, 50e9), TierName.DISK: _NVME}
_ASSUMED = "half of the peak and four fifths of PCIe are assumed; disk: one PCIe 4 NVMe at 5 GB/s"

PROCESSORS = {
    each.name: each
    for each in (
        Processor("h100", 989e12, 0.5, _PCIE_5, f"NVIDIA H100 SXM data sheet; {_ASSUMED}"),
        Processor("h200", 989e12, 0.5, _PCIE_5, f"NVIDIA H200 SXM data sheet; {_ASSUMED}"),
        Processor("a100", 312e12, 0.5, _PCIE_4, f"NVIDIA A100 80GB SXM data sheet; {_ASSUMED}"),
        Processor("l4", 121e12, 0.5, _PCIE_4, f"NVIDIA L4 data sheet; {_ASSUMED}"),
        Processor(
            "epyc-2-cores",
            0.26e12,
            1.0,
            {TierName.HOST: LoadEstimate(1e-3, 5e9), TierName.DISK: LoadEstimate(1e-3, 3.4e9)},
            "benchmarks/results/ttft.jsonl: 2,986 tokens of SmolLM2-135M on two cores of an AMD "
            "EPYC without AMX, cold, from host, and from disk in the page cache",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine that runs a model. ``source`` says where the numbers are from."""

    name: str
    model: str
    bytes_per_token: int
    compute: ComputeEstimate
    loads: Mapping[TierName, LoadEstimate]
    source: str
    chunk_tokens: int = _CHUNK_TOKENS


def profile_of(processor: Processor, model: ModelShape) -> HardwareProfile:
    """A multiplication and an addition for each parameter and token; attention's two products for
    each pair of a token and a position before it."""
    rate = processor.flops_per_s * processor.efficiency
    return HardwareProfile(
        processor.name,
        model.name,
        model.bytes_per_token,
        ComputeEstimate(
            step_s=_STEP_S,
            token_s=2 * model.active_parameters / rate,
            context_s=4 * model.attention_width / rate,
        ),
        processor.loads,
        processor.source,
    )
