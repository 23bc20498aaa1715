import pytest

from engine.measuring.machine_profile import measure_machine
from engine.model.loader import load_model
from kvstore.block import TierName
from kvstore.costs.cost import CostModel
from kvstore.errors import ConfigError


def test_prefill_and_loads_of_this_machine_are_measured(tiny_model):
    profile = measure_machine(tiny_model, max_model_len=512)
    layout = load_model(tiny_model, skip_tokenizer_init=True).layout
    assert profile.bytes_per_token == layout.bytes_per_token
    assert 0 < profile.compute.seconds(0, 100, 2048) < profile.compute.seconds(0, 1000, 2048)
    for tier in (TierName.HOST, TierName.DISK):
        assert profile.loads[tier] != CostModel().load_estimate(tier), "only a guess"
    assert profile.source.startswith("measured just now on ")


def test_a_model_that_is_not_there_is_the_caller_s_to_put_right(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        measure_machine(str(tmp_path / "absent"))
