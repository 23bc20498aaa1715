import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.model.rope import freeze_rope

TRAINED = 32
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}


def dynamic() -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaRotaryEmbedding(
        LlamaConfig(**SMALL, max_position_embeddings=TRAINED, rope_parameters=parameters)
    )


def longrope() -> Phi3RotaryEmbedding:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": TRAINED,
    }
    return Phi3RotaryEmbedding(
        Phi3Config(
            **SMALL,
            pad_token_id=0,
            max_position_embeddings=4 * TRAINED,
            original_max_position_embeddings=TRAINED,
            rope_parameters=parameters,
        )
    )


def cos(module: torch.nn.Module, positions: list[int]) -> torch.Tensor:
    return module(torch.zeros(1), torch.tensor([positions]))[0]


@pytest.mark.parametrize("make", [dynamic, longrope])
def test_transformers_takes_frequencies_from_the_longest_position(make):
    """The reason for freezing: when this fails, freezing may no longer be needed."""
    module = make()
    near, both = cos(module, [1, 20]), cos(module, [1, 20, 100])
    assert not torch.allclose(near, both[:, :2])


@pytest.mark.parametrize("make", [dynamic, longrope])
@pytest.mark.parametrize("max_model_len", [TRAINED, 4 * TRAINED])
def test_frozen_frequencies_do_not_depend_on_the_batch(make, max_model_len):
    module = make()
    freeze_rope(module, max_model_len)
    near = cos(module, [1, 20])
    for other in (30, 100, 1):
        assert torch.equal(cos(module, [1, 20, other])[:, :2], near)


@pytest.mark.parametrize("make", [dynamic, longrope])
@pytest.mark.parametrize("max_model_len", [TRAINED, 4 * TRAINED])
def test_frozen_frequencies_are_those_of_a_sequence_of_that_length(make, max_model_len):
    module, reference = make(), make()
    freeze_rope(module, max_model_len)
    positions = [0, 5, max_model_len - 1]
    torch.testing.assert_close(cos(module, positions), cos(reference, positions))


def test_what_was_frozen_is_told_for_the_identity():
    assert freeze_rope(dynamic(), 16) == {"": ["dynamic", TRAINED]}
    assert freeze_rope(dynamic(), 100) == {"": ["dynamic", 100]}
    assert freeze_rope(longrope(), TRAINED) == {"": ["longrope", "short"]}
    assert freeze_rope(longrope(), TRAINED + 1) == {"": ["longrope", "long"]}


def test_constant_frequencies_are_left_alone():
    module = LlamaRotaryEmbedding(LlamaConfig(**SMALL))
    before = module.inv_freq
    assert freeze_rope(module, 64) == {}
    assert module.inv_freq is before


def test_each_kind_of_layer_is_frozen_for_itself():
    rope_parameters = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    config = Gemma3TextConfig(
        **SMALL,
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=TRAINED,
        rope_parameters=rope_parameters,
    )
    module = Gemma3RotaryEmbedding(config)
    sliding = module.sliding_attention_inv_freq
    assert freeze_rope(module, 100) == {"full_attention": ["dynamic", 100]}
    assert module.sliding_attention_inv_freq is sliding

    def full(positions: list[int]) -> torch.Tensor:
        return module(torch.zeros(1), torch.tensor([positions]), "full_attention")[0]

    assert torch.equal(full([1, 20]), full([1, 20, 99])[:, :2])
