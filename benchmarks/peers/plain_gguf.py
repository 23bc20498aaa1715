"""Writes a Llama checkpoint as a float32 ``.gguf`` file, for llama.cpp to run the same weights.

Without a tokenizer: prompts are token ids.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file


def write_plain_gguf(directory: Path, target: Path) -> None:
    """``directory`` is a transformers one with a single safetensors file. Raises ``ValueError`` for
    another architecture than Llama's."""
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{directory}: only Llama is converted, this is {config['model_type']}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        rows = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            rows = _interleaved(rows, heads)
        elif name.endswith("k_proj.weight"):
            rows = _interleaved(rows, kv_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_theta(config: dict) -> float:
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(config.get("rope_theta") or nested["rope_theta"])


def _interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, transformers those half a head apart."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
