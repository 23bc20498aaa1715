import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from lru_oracle import batch_of, lru_hits

from kvstore.block import TierName
from kvstore.costs.cost import ComputeEstimate, LoadEstimate
from kvstore.errors import ConfigError, TraceError
from kvstore.planning import (
    MODELS,
    PROCESSORS,
    BlockSampler,
    CacheSetup,
    CurvePoint,
    HardwareProfile,
    Outcome,
    knee,
    make_plan,
    profile_of,
    read_model_shape,
    read_trace,
    recommendation,
    recommended,
)
from kvstore.planning.first_token import FirstTokenHistogram, first_token_s

SIMPLE = HardwareProfile(
    "simple",
    "model",
    bytes_per_token=100,
    compute=ComputeEstimate(step_s=0.0, token_s=0.001, context_s=0.0),
    loads={TierName.HOST: LoadEstimate(0.01, 1e6)},
    source="none",
)


def outcome(hit_ratio: float) -> Outcome:
    return Outcome(0.0, 0.0, hit_ratio, hit_ratio, 0.0, 0.0, None)


def curve(*ratios: float) -> list[CurvePoint]:
    return [CurvePoint(2**i, outcome(ratio)) for i, ratio in enumerate(ratios)]


def test_a_plan_says_what_an_lru_cache_would_do(trace):
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    requests = [record["hash_ids"] for record in records]
    plan = make_plan(read_trace(trace), capacities=[500, 40, 500])
    assert [point.capacity_blocks for point in plan.curves["lru"]] == [40, 500]
    for point in plan.curves["lru"]:
        hits = lru_hits(requests, point.capacity_blocks)
        tokens = sum(
            min(512 * count, record["input_length"])
            for count, record in zip(hits, records, strict=True)
        )
        assert point.outcome.hit_blocks == sum(hits)
        assert point.outcome.hit_tokens == tokens
        assert point.outcome.hit_ratio_blocks == sum(hits) / sum(map(len, requests))
        assert point.outcome.hit_ratio_tokens == tokens / plan.trace.tokens
    assert plan.trace.requests == len(records)
    assert plan.trace.tokens == sum(record["input_length"] for record in records)
    assert plan.trace.unique_blocks == len({block for blocks in requests for block in blocks})
    assert plan.unlimited.hit_blocks == plan.trace.blocks - plan.trace.unique_blocks


def test_the_default_sizes_end_with_every_distinct_block(trace):
    plan = make_plan(read_trace(trace))
    *sizes, last = [point.capacity_blocks for point in plan.curves["lru"]]
    assert last == plan.trace.unique_blocks
    assert all(larger == 2 * smaller for smaller, larger in pairwise(sizes))
    assert plan.curves["lru"][-1].outcome == plan.unlimited


def test_policies_and_splits_are_simulated_beside_the_curve(trace):
    setups = [CacheSetup(100), CacheSetup(100, 200, 2000)]
    plan = make_plan(
        read_trace(trace),
        capacities=[100],
        policies=["lru", "slru"],
        setups=setups,
        hardware=SIMPLE,
    )
    (lru,), (slru,) = plan.curves["lru"], plan.curves["slru"]
    one_tier, three_tiers = plan.splits
    assert one_tier.outcome.hit_tokens == lru.outcome.hit_tokens
    assert slru.outcome.hit_blocks <= plan.unlimited.hit_blocks
    assert sum(three_tiers.hit_tokens.values()) == three_tiers.outcome.hit_tokens
    assert three_tiers.outcome.hit_tokens >= lru.outcome.hit_tokens
    assert three_tiers.written_blocks > 0
    assert one_tier.outcome.first_token is not None


def test_a_sampled_plan_has_its_error_and_no_times(trace):
    exact = make_plan(read_trace(trace), capacities=[1000], policies=["lru", "slru"])
    plan = make_plan(
        read_trace(trace),
        capacities=[1000],
        policies=["lru", "slru"],
        setups=[CacheSetup(1000)],
        hardware=SIMPLE,
        sampler=BlockSampler(0.5),
    )
    for policy in ("lru", "slru"):
        (true,), (found,) = exact.curves[policy], plan.curves[policy]
        assert found.outcome.hit_ratio_blocks == pytest.approx(
            true.outcome.hit_ratio_blocks, abs=0.06
        )
        assert found.outcome.first_token is None
    assert plan.curves["lru"][0].outcome.error_blocks > 0
    assert plan.trace.unique_blocks == pytest.approx(exact.trace.unique_blocks, rel=0.1)
    assert plan.trace.blocks == exact.trace.blocks


def test_times_to_the_first_token_follow_from_what_is_cached():
    """One prompt of two blocks, three times: once computed, twice loaded."""
    plan = make_plan([batch_of([[1, 2], [1, 2], [1, 2]])], capacities=[1, 2], hardware=SIMPLE)
    assert plan.without_cache is not None
    assert plan.without_cache.mean_s == pytest.approx(1.024)
    one, two = (point.outcome.first_token for point in plan.curves["lru"])
    assert one is not None
    assert two is not None
    assert one.mean_s == pytest.approx((1.024 + 2 * (0.512 + 0.01 + 0.0512)) / 3)
    assert two.mean_s == pytest.approx((1.024 + 2 * (0.001 + 0.01 + 0.1024)) / 3)
    assert two.p99_s == pytest.approx(1.024, rel=0.02)


def test_a_load_slower_than_computing_is_not_waited_for():
    slow = replace(SIMPLE, loads={TierName.HOST: LoadEstimate(100.0, 1e6)})
    seconds = first_token_s(slow, np.array([1000]), {TierName.HOST: np.array([900])})
    assert seconds == pytest.approx([1.0])


def test_what_the_device_holds_costs_no_load():
    seconds = first_token_s(SIMPLE, np.array([1000]), {TierName.DEVICE: np.array([900])})
    assert seconds == pytest.approx([0.1])


def test_quantiles_are_within_two_percent():
    histogram = FirstTokenHistogram()
    assert histogram.times() is None
    histogram.add(np.linspace(0.01, 10.0, 1000))
    times = histogram.times()
    assert times is not None
    assert (times.median_s, times.p90_s, times.p99_s) == pytest.approx((5.0, 9.0, 9.9), rel=0.02)


def test_the_arithmetic_of_times_is_the_engine_s():
    profile = profile_of(PROCESSORS["l4"], MODELS["llama-3.1-8b"])
    (seconds,) = first_token_s(profile, np.array([5000]), {TierName.HOST: np.array([3000])})
    expected = (
        profile.loads[TierName.HOST].seconds(3000 * profile.bytes_per_token)
        + profile.compute.seconds(3000, 5000, profile.chunk_tokens)
        + profile.compute.step_s
    )
    assert seconds == pytest.approx(expected)


def test_a_preset_prefills_at_about_its_known_speed():
    """Published figures of vLLM for 8B models on an H100: 20,000 to 35,000 tokens a second."""
    profile = profile_of(PROCESSORS["h100"], MODELS["llama-3.1-8b"])
    assert profile.bytes_per_token == 131_072
    assert 20_000 < 2048 / profile.compute.seconds(0, 2048, 2048) < 40_000


def test_the_preset_of_two_cores_gives_back_the_time_it_was_made_from():
    profile = profile_of(PROCESSORS["epyc-2-cores"], MODELS["smollm2-135m"])
    assert profile.bytes_per_token == 23_040
    assert profile.compute.seconds(0, 2986, 2048) == pytest.approx(3.68, rel=0.1)


def test_a_model_s_shape_is_read_from_its_directory(tmp_path):
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(tmp_path)
    assert replace(shape, name="llama-3.1-8b") == MODELS["llama-3.1-8b"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    assert read_model_shape(tmp_path).bytes_per_token == 2 * shape.bytes_per_token
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="num_attention_heads"):
        read_model_shape(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        read_model_shape(tmp_path / "absent")


@pytest.mark.parametrize(
    "config",
    [[], {"text_config": 5}, {"num_attention_heads": 0}, {"num_attention_heads": "4"}],
)
def test_a_file_that_is_no_models_config_is_one_line(tmp_path, config):
    """It was an AttributeError, a ZeroDivisionError or a TypeError, with a traceback."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    if isinstance(config, dict):
        config = sizes | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is not of a model: .*; give --model-bytes-per-token"):
        read_model_shape(tmp_path)


def test_the_knee_is_where_more_begins_to_bring_little():
    points = curve(0.1, 0.2, 0.4, 0.5, 0.52, 0.53)
    best = knee(points)
    assert best is not None
    assert best.capacity_blocks == 8
    assert knee(curve(0.0, 0.0)) is None
    assert knee([]) is None


def test_what_is_recommended_ends_where_doubling_saves_less_than_three_percent():
    unlimited = outcome(0.54)

    def advice(*ratios: float) -> str:
        return recommendation(curve(*ratios), unlimited, tier="host", size_of="{} GiB".format)

    assert advice(0.0, 0.1, 0.28, 0.30, 0.31) == (
        "host 4 GiB saves 28 % of prefill; the next 4 GiB save 2.0 % more."
    )
    assert advice(0.0, 0.2) == (
        "host 2 GiB saves 20 % of prefill; one that never evicts would save 54 %."
    )
    assert advice(0.0, 0.01) == (
        "No size pays: the largest, host 2 GiB, saves 1.0 % of prefill, one that never evicts 54 %."
    )
    flat = recommended(curve(0.04, 0.04, 0.05))
    assert flat is not None
    assert flat.capacity_blocks == 1


def test_the_last_blocks_of_a_trace_are_no_doubling():
    """64 times the size was recommended for 0.6 % more: the last 2 % of it had brought 0.1 %."""
    points = curve(0.3, 0.301, 0.302, 0.303, 0.3035, 0.304, 0.3045)
    points.append(replace(points[-1], capacity_blocks=65, outcome=outcome(0.3055)))
    best = recommended(points)
    assert best is not None
    assert best.capacity_blocks == 1


def test_a_size_that_saves_too_little_is_not_recommended_for_its_gain():
    sizes = {100: 0.0, 110: 0.02, 200: 0.031}
    points = [CurvePoint(size, outcome(ratio)) for size, ratio in sizes.items()]
    best = recommended(points)
    assert best is not None
    assert best.capacity_blocks == 200


@pytest.mark.parametrize(
    "options", [{"capacities": [0]}, {"policies": ["mru"]}], ids=["capacity", "policy"]
)
def test_settings_that_cannot_be_meant_are_refused(options):
    with pytest.raises(ConfigError):
        make_plan([batch_of([[1]])], **options)


def test_a_trace_without_requests_is_no_trace():
    with pytest.raises(TraceError, match="no requests"):
        make_plan([])
