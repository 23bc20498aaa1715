"""Deterministic mode: a token's logits are the same bits, wherever its prefix comes from."""

import random

import pytest
import torch

from engine import LLM, SamplingParams, computation
from kvstore.errors import ConfigError

CHUNK = 256
BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # bytes of one block of the tiny model in float32
DEMO_BLOCK = 30 * 2 * 16 * 3 * 64 * 2  # and of the demo model in bfloat16
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def logits(monkeypatch) -> dict[tuple[int, ...], torch.Tensor]:
    """The logits that each token was drawn from, by the tokens before it."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    sample = computation.sample

    def spy(rows, requests):
        for row, request in zip(rows, requests, strict=True):
            context = tuple(request.token_ids)
            if context in seen:
                assert torch.equal(seen[context], row), f"other bits behind {len(context)} tokens"
            seen[context] = row.clone()
        return sample(rows, requests)

    monkeypatch.setattr(computation, "sample", spy)
    return seen


def prompt(seed: int, length: int, vocab_size: int = 128) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(length)]


def test_the_real_model_gives_the_same_bits_from_every_tier_and_in_every_batch(tmp_path, logits):
    """bfloat16, where every rounding shows. The fixture compares: the logits of a context that was
    seen before must be those seen before."""
    settings = {
        "dtype": "bfloat16",
        "deterministic": True,
        "max_model_len": 2 * CHUNK,
        "device_cache": 32 * DEMO_BLOCK,  # one sequence: others push its blocks out
        "host_cache": 70 * DEMO_BLOCK,
        "disk_cache": tmp_path,
        "load_policy": "always",
        "skip_tokenizer_init": True,
    }
    asked = prompt(0, CHUNK + 90, 49000)
    others = [prompt(seed, length, 49000) for seed, length in ((1, 500), (2, 180), (3, 40))]
    served = []

    def ask(llm: LLM, *beside: list[int]) -> None:
        output = llm.generate([asked, *beside], GREEDY, use_tqdm=False)[0]
        served.append({tier: n for tier, n in output.metrics.cached_tokens.items() if n})

    with LLM("demo", **settings) as llm:
        ask(llm)
        ask(llm)
        llm.generate(others[:1], GREEDY, use_tqdm=False)
        ask(llm)
        llm.reset_prefix_cache("device")
        llm.reset_prefix_cache("host")
        ask(llm)
        assert llm.check() == []
    with LLM("demo", **settings | {"device_cache": 100 * DEMO_BLOCK, "host_cache": 0}) as llm:
        ask(llm, *others)
        llm.reset_prefix_cache()
        ask(llm)
    assert served == [{}, *({tier: CHUNK} for tier in ("device", "host", "disk", "disk")), {}]
    assert len(logits) == 4 * GREEDY.max_tokens


@pytest.fixture
def make_deterministic(make_llm):
    def make(**settings) -> LLM:
        return make_llm(deterministic=True, **settings)

    return make


def test_sequences_that_push_each_other_out_repeat_their_bits(make_deterministic, logits):
    """A preempted sequence computes its prompt in chunks again and its answer token by token."""
    prompts = [prompt(seed, 240 + 10 * seed) for seed in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone = make_deterministic(device_cache=100 * BLOCK)
    for each in prompts:
        alone.generate([each], params)
    assert len(logits) == 4 * 60
    crowded = make_deterministic(device_cache=40 * BLOCK, host_cache=20 * BLOCK)
    crowded.generate(prompts, params)
    assert len(logits) == 4 * 60
    assert crowded._core.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("length", "num_cached"), [(255, 0), (256, 0), (257, 256), (300, 256), (500, 256)]
)
def test_a_prompt_is_reused_in_whole_chunks(make_deterministic, logits, length, num_cached):
    llm = make_deterministic()
    tokens = prompt(0, length)
    for expected in (0, num_cached):
        (output,) = llm.generate([tokens], GREEDY)
        assert output.num_cached_tokens == expected
        assert output.metrics.computed_tokens == length - expected


def test_what_was_decoded_is_computed_again_where_it_is_part_of_a_prompt(
    make_deterministic, logits
):
    llm = make_deterministic()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (first,) = llm.generate([prompt(0, 250)], params)
    whole = prompt(0, 250) + first.outputs[0].token_ids
    (second,) = llm.generate([[*whole, 5]], GREEDY)
    assert second.num_cached_tokens == 0
    (third,) = llm.generate([[*whole, 6]], GREEDY)
    assert third.num_cached_tokens == CHUNK


def test_samples_of_one_prompt_share_its_chunks(make_deterministic, logits):
    llm = make_deterministic()
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate([prompt(0, 300)], params)
    (second,) = llm.generate([prompt(0, 300)], params)
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in second.outputs]
    assert second.num_cached_tokens == CHUNK


def test_neither_mode_reuses_blocks_of_the_other(make_llm, tmp_path):
    tokens = prompt(0, 300)
    for deterministic in (False, True, False, True):
        llm = make_llm(disk_cache=tmp_path, deterministic=deterministic)
        (output,) = llm.generate([tokens], GREEDY)
        llm.close()
    assert output.num_cached_tokens == CHUNK


def test_a_budget_too_small_for_a_chunk_is_refused(make_deterministic):
    with pytest.raises(ConfigError, match="max_num_batched_tokens: deterministic mode needs 320"):
        make_deterministic(max_num_batched_tokens=300)
    with pytest.raises(ConfigError, match=r"device_cache: .* one sequence of 500 tokens needs 32"):
        make_deterministic(device_cache=31 * BLOCK, max_model_len=500)
