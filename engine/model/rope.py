"""Rotary frequencies that depend on the length of the input, made constant.

transformers recomputes the frequencies of ``dynamic`` and ``longrope`` models from the longest
position *in the batch*: the keys of one sequence would depend on what else runs beside it, and a
cached key would be wrong in the next batch. So they are computed once, for ``max_model_len``.
"""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def freeze_rope(model: torch.nn.Module, max_model_len: int) -> dict[str, list[str | int]]:
    """Freeze the frequencies of every rotary module of ``model``, in place.

    Returns what was frozen, for the model's identity: by layer type ("" where all layers are
    alike) the rope type and what its frequencies were computed for. Empty when nothing depends on
    the length.
    """
    frozen = {}
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in _LENGTH_DEPENDENT:
            frozen[""] = _freeze(module, rope_type, None, max_model_len)
            setattr(module, "rope_type", "default")  # noqa: B010  (transformers' switch: no updates)
        elif isinstance(rope_type, dict):
            for layer_type, name in rope_type.items():
                if name in _LENGTH_DEPENDENT:
                    frozen[layer_type] = _freeze(module, name, layer_type, max_model_len)
                    rope_type[layer_type] = "default"
    return frozen


def _freeze(
    module: Any, rope_type: str, layer_type: str | None, max_model_len: int
) -> list[str | int]:
    config = module.config
    prefix, parameters, keywords = "", config.rope_parameters, {}
    if layer_type is not None:
        prefix, parameters = f"{layer_type}_", parameters[layer_type]
        keywords = {"layer_type": layer_type}
    computed_for: str | int
    if rope_type == "longrope":  # two sets, for inputs within the trained length and beyond it
        trained = parameters["original_max_position_embeddings"]
        computed_for = "long" if max_model_len > trained else "short"
    else:
        computed_for = max(max_model_len, config.max_position_embeddings)
    device = getattr(module, f"{prefix}inv_freq").device
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        config, device, seq_len=max_model_len, **keywords
    )
    module.register_buffer(f"{prefix}inv_freq", inv_freq, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return [rope_type, computed_for]
