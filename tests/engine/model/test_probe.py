"""The probe refuses what would give wrong answers on a paged cache, and says why."""

import functools
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from engine.model.loader import prepare_model
from engine.model.probe import mask_is_causal, probe_attention, probe_logits
from engine.runner.attention import PAGED
from kvstore.errors import ConfigError

MAX_LEN = 128
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

NEVER = "its layers never call attention through transformers' attention interface"
REFUSED = {
    "Bloom": (
        "BloomConfig",
        {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        NEVER,
    ),
    "MPT": (
        "MptConfig",
        {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": MAX_LEN},
        NEVER,
    ),
    "Falcon": (
        "FalconConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        NEVER,
    ),
    "GPT-Neo": (
        "GPTNeoConfig",
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": MAX_LEN,
            "window_size": 24,
        },
        NEVER,
    ),
    "Llama-4": (
        "Llama4TextConfig",
        SMALL
        | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
        | {"attention_chunk_size": 24, "num_hidden_layers": 4},
        "it has layers of type chunked_attention",
    ),
    "Gemma-4": (
        "Gemma4TextConfig",
        SMALL
        | {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24}
        | {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "K and V differ between layers: 2 heads of 8 and 2 heads of 16",
    ),
    "DeepSeek-V3": (
        "DeepseekV3Config",
        SMALL
        | EXPERTS
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "first_k_dense_replace": 1}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        r"heads and head_dim of queries \(4, 16\), K \(4, 16\) and V \(4, 8\) do not fit together",
    ),
    "LFM2": (
        "Lfm2Config",
        SMALL | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
        "it has layers of type conv",
    ),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        SMALL
        | EXPERTS
        | {"head_dim": 8, "num_hidden_layers": 4, "num_experts": 4}
        | {"shared_expert_intermediate_size": 24, "linear_num_value_heads": 4}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "it has layers of type linear_attention",
    ),
    "Mamba": (
        "MambaConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "it has layers of type linear_attention",
    ),
    "RWKV": (
        "RwkvConfig",
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128},
        NEVER,
    ),
    "BERT": (
        "BertConfig",
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
        "the attention mask of one of its layers is not causal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_paged_is_refused_with_its_reason(name):
    config_class, settings, reason = REFUSED[name]
    config = getattr(transformers, config_class)(**settings)
    network = transformers.AutoModelForCausalLM.from_config(config)
    message = f"^model {name}: cannot run on a paged KV cache: {reason}; docs/models.md"
    with pytest.raises(ConfigError, match=message):
        prepare_model(network, None, name=name)


def test_an_encoder_decoder_is_refused():
    network = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    with pytest.raises(ConfigError, match="it is an encoder-decoder model"):
        prepare_model(network, None, name="T5")


def test_documented_refusals_are_the_tested_ones():
    document = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    table = document.partition("## Refused")[2].partition("##")[0]
    rows = re.findall(r"^\| (?!Arch|-)(.+?) \|", table, re.MULTILINE)
    named = {name.removesuffix(" and other encoders") for row in rows for name in row.split(", ")}
    assert named == {*REFUSED, "encoder-decoder models"}


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval()


def test_the_shape_of_each_layer_is_found():
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=24))
    layers = probe_attention(model.eval(), "mistral", MAX_LEN)
    assert [layer.module for layer in layers] == [layer.self_attn for layer in model.model.layers]
    assert {(each.window, each.num_kv_heads, each.head_dim) for each in layers} == {(24, 2, 8)}


def test_an_unknown_attention_argument_is_refused():
    model = llama()
    model.forward = functools.partial(model.forward, position_bias=torch.zeros(1))
    with pytest.raises(ConfigError, match="takes position_bias, which we do not compute"):
        probe_attention(model, "biased", MAX_LEN)


def test_a_layer_that_skips_attention_is_refused():
    model = llama()
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ConfigError, match="it has 2 layers, but attention ran 1 times in 1"):
        probe_attention(model, "skipping", MAX_LEN)


def test_keys_that_depend_on_the_batch_are_refused():
    """Dynamic rope as transformers has it, not frozen."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    model = llama(rope_parameters=rope, max_position_embeddings=32)
    with pytest.raises(ConfigError, match="its keys depend on the longest position in the batch"):
        probe_attention(model, "dynamic", 256)


def test_a_forward_that_fails_is_refused_with_its_error():
    model = llama()
    del model.model.norm
    with pytest.raises(ConfigError, match=r"its forward failed: AttributeError: .*norm"):
        probe_attention(model, "broken", MAX_LEN)


def test_state_outside_attention_is_found_by_the_logits():
    """A token shift, as in convolutions: harmless to every check but the last."""

    def shift(module, inputs, output):
        return output + 0.5 * torch.nn.functional.pad(output[:, :-1], (0, 0, 1, 0))

    model = llama()
    model.model.layers[0].mlp.register_forward_hook(shift)
    with pytest.raises(ConfigError, match="its logits there are off by"):
        prepare_model(model, None, name="shifted")


def test_a_wrong_window_is_found_by_the_logits():
    loaded = prepare_model(llama(), None, name="llama")
    object.__setattr__(loaded, "windows", (8, 8))
    with pytest.raises(ConfigError, match="its logits there are off by"):
        probe_logits(loaded)


def test_the_serving_attention_is_in_force_after_the_probe():
    loaded = prepare_model(llama(), None, name="llama")
    assert loaded.model.config._attn_implementation == PAGED


@pytest.mark.parametrize("max_model_len", [64, 100, 5000, 100_000])
def test_masks_are_told_apart_by_sampled_positions(max_model_len):
    window = sliding_window_causal_mask_function(24)
    assert mask_is_causal(causal_mask_function, None, max_model_len)
    assert mask_is_causal(window, 24, max_model_len)
    assert not mask_is_causal(causal_mask_function, 24, max_model_len)
    assert not mask_is_causal(window, None, max_model_len)
    assert not mask_is_causal(window, 23, max_model_len)
    assert not mask_is_causal(window, 25, max_model_len)


@pytest.mark.parametrize("chunk", [8, 24, 32, 57])
def test_a_chunked_mask_is_neither_causal_nor_a_window(chunk):
    mask = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    assert not mask_is_causal(mask, None, 4096)
    assert not mask_is_causal(mask, chunk, 4096)


def test_a_mask_that_sees_the_future_is_not_causal():
    assert not mask_is_causal(lambda b, h, q, k: q >= k - 1, None, 4096)
    assert not mask_is_causal(lambda b, h, q, k: True, None, 4096)


def test_a_mask_that_looks_at_the_data_is_refused():
    data = torch.ones(4, 4, dtype=torch.bool)
    assert not mask_is_causal(lambda b, h, q, k: data[q, k], None, 4096)
