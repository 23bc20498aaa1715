import dataclasses
import enum
from pathlib import Path

import pytest

from engine.config import IGNORED_ARGUMENTS
from engine.sampling.sampling_params import NEUTRAL_ARGUMENTS, SamplingParams
from kvstore.errors import ConfigError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.seed, params.logprobs, params.ignore_eos) == (None, None, False)
    assert params.stop_strings == ()
    assert params.stop_token_ids == ()
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.min_tokens, params.prompt_logprobs) == (0, None)
    assert (params.detokenize, params.skip_special_tokens) == (True, True)
    assert (params.include_stop_str_in_output, params.truncate_prompt_tokens) == (False, None)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({}, None, ())
    assert not params.edits_logits


def test_stop_may_be_one_string():
    assert SamplingParams(stop="\n\n").stop_strings == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_arguments_of_vllm_without_meaning_here_are_accepted_at_their_neutral_value():
    neutral = {name: accepted[0] for name, accepted in NEUTRAL_ARGUMENTS.items()}
    assert SamplingParams(seed=1, **neutral) == SamplingParams(seed=1)


def test_streams_yield_what_vllm_calls_delta():
    kind = enum.Enum("RequestOutputKind", {"CUMULATIVE": 0, "DELTA": 1})
    assert SamplingParams(output_kind=kind.DELTA) == SamplingParams()
    with pytest.raises(ConfigError, match=r"^output_kind: "):
        SamplingParams(output_kind=kind.CUMULATIVE)


def test_more_tokens_at_least_than_at_most_are_refused_with_both_names():
    with pytest.raises(ConfigError, match=r"^min_tokens: .* at most max_tokens \(5\), got 10"):
        SamplingParams(max_tokens=5, min_tokens=10)


def test_the_page_for_vllm_users_names_every_argument():
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    params, llm = page.partition("## LLM")[::2]
    for name in [*(field.name for field in dataclasses.fields(SamplingParams)), *NEUTRAL_ARGUMENTS]:
        assert f"`{name}`" in params, name
    for name in IGNORED_ARGUMENTS:
        assert f"`{name}`" in llm, name


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1).seed is None


def test_biases_may_come_from_json_and_are_cut():
    assert SamplingParams(logit_bias={"5": 3, 6: -500}).logit_bias == {5: 3.0, 6: -100.0}


def test_stop_strings_need_text():
    with pytest.raises(ConfigError, match=r"^stop: .* needs detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_params_may_be_kept_in_a_set():
    assert len({SamplingParams(logit_bias={1: 1.0}), SamplingParams(logit_bias={1: 1.0})}) == 1


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
        ("n", 16_385),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "0"),
        ("temperature", 10**400),
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
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("detokenize", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "no"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("spaces_between_special_tokens", False),
        ("structured_outputs", {"json": {}}),
        ("best_of", 2),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_a_clone_is_equal():
    params = SamplingParams(n=2, stop="x", logit_bias={"5": 200.0}, seed=-1, top_k=-1)
    assert params.clone() == params
    assert params.clone() is not params


def test_an_unknown_argument_is_an_error():
    with pytest.raises(ConfigError, match=r"unknown temprature; did you mean temperature\?$"):
        SamplingParams(temprature=0.5)
    with pytest.raises(ConfigError, match=r"unknown colour; known are .*temperature"):
        SamplingParams(colour="red")


def test_params_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5
