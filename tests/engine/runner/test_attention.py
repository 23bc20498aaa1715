import pytest
import torch
from transformers.masking_utils import AttentionMaskInterface

from engine.runner.attention import PAGED, unknown_arguments


def test_no_mask_is_registered_for_serving():
    """A registered mask costs a host synchronisation per forward."""
    assert PAGED not in AttentionMaskInterface._global_mapping


def test_arguments_that_say_nothing_about_attention_are_known():
    arguments = {
        "scaling": 0.125,
        "sliding_window": 24,
        "softcap": 50.0,
        "s_aux": torch.ones(4),
        "dropout": 0.0,
        "is_causal": True,
        "position_ids": torch.arange(3),
        "use_cache": False,
        "output_attentions": False,
        "indices": None,
    }
    assert unknown_arguments(arguments) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_bias", torch.zeros(1)),
        ("indices", torch.zeros(1)),
        ("sinks", torch.zeros(4)),
        ("dropout", 0.1),
        ("is_causal", False),
        ("head_mask", False),
    ],
)
def test_an_argument_that_would_be_ignored_is_reported(name, value):
    assert unknown_arguments({"scaling": 1.0, name: value}) == [name]
