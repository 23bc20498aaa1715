import dataclasses

import pytest

from engine.sampling_params import SamplingParams
from kvstore.errors import ConfigError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.seed, params.logprobs, params.ignore_eos) == (None, None, False)
    assert params.stop_strings == ()
    assert params.stop_token_ids == ()


def test_stop_may_be_one_string():
    assert SamplingParams(stop="\n\n").stop_strings == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_top_k_of_minus_one_keeps_all():
    assert SamplingParams(top_k=-1).top_k == 0


def test_only_vanishing_temperatures_are_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("ignore_eos", "no"),
        ("seed", 1.0),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_an_unknown_argument_is_an_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)


def test_params_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5
