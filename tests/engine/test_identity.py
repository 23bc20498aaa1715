import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine import identity
from engine.identity import config_digest, model_identity, weights_digest
from kvstore.block import BlockLayout
from kvstore.hashing import namespace_id

LAYOUT = BlockLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")


def config(**changes) -> LlamaConfig:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaConfig(**settings | changes)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config())


def identify(model, layout=LAYOUT, windows=(None, None), frozen_rope=None, run=None):
    return model_identity(
        model,
        layout,
        windows=windows,
        frozen_rope=frozen_rope or {},
        run=run,
    )


def test_a_copy_is_the_same_model(model):
    assert namespace_id(identify(copy.deepcopy(model))) == namespace_id(identify(model))


def test_a_changed_element_of_any_tensor_changes_the_weights(model):
    before = weights_digest(model)
    for name in model.state_dict():
        changed = copy.deepcopy(model)
        tensor = changed.state_dict()[name].flatten()
        tensor[len(tensor) // 3] += 1e-3
        assert weights_digest(changed) != before, name


def test_swapped_tensors_of_one_shape_change_the_weights(model):
    changed = copy.deepcopy(model)
    first, second = (layer.mlp.up_proj for layer in changed.model.layers)
    first.weight, second.weight = second.weight, first.weight
    assert weights_digest(changed) != weights_digest(model)


@pytest.mark.parametrize("at", [0, -1])
def test_a_large_model_is_sampled_from_first_to_last_byte_of_each_tensor(model, monkeypatch, at):
    monkeypatch.setattr(identity, "FULL_BYTES", 0)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 1024)
    changed = copy.deepcopy(model)
    changed.lm_head.weight.data.flatten()[at] += 1
    assert weights_digest(changed) != weights_digest(model)


def test_samples_see_a_change_of_a_whole_large_tensor(model, monkeypatch):
    monkeypatch.setattr(identity, "FULL_BYTES", 0)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 1024)
    before = weights_digest(model)
    for name in model.state_dict():
        changed = copy.deepcopy(model)
        changed.state_dict()[name].mul_(1.001)
        assert weights_digest(changed) != before, name


def test_dtype_changes_the_weights(model):
    assert weights_digest(copy.deepcopy(model).to(torch.bfloat16)) != weights_digest(model)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 256},
    ],
)
def test_a_setting_of_the_model_changes_the_config(change):
    assert config_digest(config(**change)) != config_digest(config())


def test_the_place_of_a_model_does_not_change_the_config():
    moved = config()
    moved.name_or_path = "/elsewhere/model"
    moved.transformers_version = "0.0.0"
    moved.use_cache = False
    assert config_digest(moved) == config_digest(config())


@pytest.mark.parametrize(
    "change",
    [
        {"layout": BlockLayout(2, 32, 2, 8, "float32")},
        {"layout": BlockLayout(2, 16, 2, 8, "bfloat16")},
        {"windows": (None, 24)},
        {"frozen_rope": {"": ["dynamic", 4096]}},
        {"run": {"threads": 2}},
    ],
)
def test_what_changes_blocks_changes_the_namespace(model, change):
    assert namespace_id(identify(model, **change)) != namespace_id(identify(model))


def test_another_modelling_file_changes_the_namespace(model, monkeypatch):
    before = namespace_id(identify(model))
    monkeypatch.setattr(identity, "modelling_digest", lambda model_class: "another release")
    assert namespace_id(identify(model)) != before
