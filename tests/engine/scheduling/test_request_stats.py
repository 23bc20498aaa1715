"""What is counted of requests, compared with what their outputs say."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import SamplingParams

DOCUMENT = Path(__file__).parents[3] / "docs" / "observability.md"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def samples(text):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_are_counted_as_their_outputs_tell(make_llm, tiny_prompts, tmp_path):
    llm = make_llm(disk_cache=tmp_path / "cache")
    assert sum(llm.queue_stats().requests.finished_requests.values()) == 0
    outputs = llm.generate(tiny_prompts[:3], replace(GREEDY, n=2, temperature=1.0))
    llm.reset_prefix_cache("device")
    outputs += llm.generate(tiny_prompts[:3], GREEDY)
    outputs += llm.generate(tiny_prompts[:1], replace(GREEDY, stop_token_ids=list(range(128))))
    stats = llm.queue_stats().requests
    assert stats.finished_requests == {"length": 6, "stop": 1, "abort": 0, "error": 0}
    assert stats.prompt_tokens == sum(len(each.prompt_token_ids) for each in outputs)
    for tier, num_tokens in stats.cached_tokens.items():
        assert num_tokens == sum(each.metrics.cached_tokens[tier] for each in outputs)
    assert stats.cached_tokens["disk"] > 0
    assert stats.generated_tokens == 6 * 8 + 3 * 8 + 1
    assert stats.output_token_seconds.count == 6 + 3
    for histogram, name in (
        (stats.first_token_seconds, "ttft_s"),
        (stats.queue_seconds, "queue_s"),
        (stats.prefill_seconds, "prefill_s"),
        (stats.total_seconds, "total_s"),
    ):
        assert histogram.count == len(outputs)
        total = sum(getattr(each.metrics, name) for each in outputs)
        assert histogram.total == pytest.approx(total)
    found = samples(llm.metrics_text())
    assert found["kvstore_finished_requests_total", "length"] == 6
    assert found["kvstore_cached_tokens_total", "disk"] == stats.cached_tokens["disk"]
    assert found["kvstore_time_to_first_token_seconds_count",] == 7
    assert found["kvstore_request_seconds_sum",] == pytest.approx(stats.total_seconds.total)
    assert found["kvstore_time_per_output_token_seconds_bucket", "+Inf"] == 9


def test_requests_without_an_answer_are_counted_apart(
    make_llm, hold_first, tiny_prompts, monkeypatch
):
    llm = make_llm()
    hold_first(llm)
    aborted = llm.start(tiny_prompts[0], GREEDY)
    assert llm._core.wait_for(lambda: bool(llm._core.scheduler.running), timeout=60)
    unbegun = llm.start(tiny_prompts[1], GREEDY)
    llm.abort([unbegun.request_id, aborted.request_id])
    monkeypatch.undo()
    before = llm.queue_stats().requests
    assert before.finished_requests == {"stop": 0, "length": 0, "abort": 2, "error": 0}
    assert before.prompt_tokens == len(tiny_prompts[0])
    assert (before.first_token_seconds.count, before.total_seconds.count) == (1, 2)

    def fail(steps):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._core.runner, "execute", fail)
    with pytest.raises(RuntimeError):
        llm.generate(tiny_prompts[2:3], replace(GREEDY, n=3))
    after = llm.queue_stats().requests
    assert after.finished_requests == before.finished_requests | {"error": 1}
    assert replace(after, finished_requests=before.finished_requests) == before


def test_a_document_that_is_read_ahead_counts_with_its_prompt(text_model, make_llm):
    llm, began = make_llm(text_model, skip_tokenizer_init=False), time.monotonic()
    document = llm.document("A document of more than a block of tokens. " * 3)
    num_whole = document.num_tokens // 16 * 16
    assert llm.queue_stats().requests.prompt_tokens == num_whole
    document.prefill()
    twice = llm.queue_stats().requests
    assert (twice.prompt_tokens, twice.cached_tokens["device"]) == (2 * num_whole, num_whole)
    assert twice.prefill_seconds.count == 2
    assert 0 < twice.prefill_seconds.total < time.monotonic() - began
    assert twice.total_seconds.count == twice.first_token_seconds.count == 0
    assert sum(twice.finished_requests.values()) == 0


def test_every_metric_is_documented_and_every_documented_one_exists(make_llm):
    documented = set(re.findall(r"`(kvstore_\w+)`", DOCUMENT.read_text()))
    families = list(text_string_to_metric_families(make_llm().metrics_text()))
    assert documented == {each.name + "_total" * (each.type == "counter") for each in families}
    for family in families:
        assert family.documentation
        assert family.type != "histogram" or family.name.endswith("_seconds")
