import pytest

from engine.measuring.machine_profile import measure_machine
from engine.model.loader import load_model
from engine.runner.model_runner import ModelRunner
from kvstore.block import TierName
from kvstore.costs.cost import CostModel
from kvstore.errors import ConfigError
from kvstore.testing import FakeClock


def test_prefill_and_loads_of_this_machine_are_measured(tiny_model, monkeypatch):
    """In a time in which a token takes a millisecond: what a real one says depends on who else is
    at work."""
    clock, execute = FakeClock(), ModelRunner.execute

    def take_time(runner, steps):
        clock.advance(0.001 * sum(len(step.token_ids) for step in steps))
        return execute(runner, steps)

    monkeypatch.setattr(ModelRunner, "execute", take_time)
    profile = measure_machine(tiny_model, max_model_len=512, clock=clock)
    layout = load_model(tiny_model, skip_tokenizer_init=True).layout
    assert profile.bytes_per_token == layout.bytes_per_token
    assert profile.compute.seconds(0, 100, 2048) == pytest.approx(0.1)
    assert profile.compute.seconds(0, 1000, 2048) == pytest.approx(1.0)
    for tier in (TierName.HOST, TierName.DISK):
        assert profile.loads[tier] != CostModel().load_estimate(tier), "only a guess"
    assert profile.source.startswith("measured just now on ")


def test_a_model_that_is_not_there_is_the_caller_s_to_put_right(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        measure_machine(str(tmp_path / "absent"))
