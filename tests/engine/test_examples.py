"""The examples' own functions, on a model whose every byte is a token: what is not recomputed is
what sharing predicts."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from engine import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def engine(text_model):
    with LLM(
        text_model, dtype="float32", device_cache="16MiB", load_policy="always", block_size=8
    ) as engine:
        yield engine
        assert engine.check() == []


@pytest.fixture
def llm(engine):
    engine.reset_prefix_cache()
    return engine


def example(name, **changes):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for attribute, value in changes.items():
        setattr(module, attribute, value)
    return module


def common(first, second):
    """Tokens that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(second))


def test_few_shot_examples_are_computed_once(llm):
    few_shot = example("few_shot", EXAMPLES="Review: cold soup.\nVerdict: negative\n" * 5)
    first, *others = few_shot.classify(llm, few_shot.REVIEWS)
    assert first.num_cached_tokens == 0
    for output in others:
        shared = common(first.prompt_token_ids, output.prompt_token_ids)
        assert shared >= len(few_shot.EXAMPLES)
        assert output.num_cached_tokens == shared // 8 * 8


def test_samples_compute_their_prompt_once(llm):
    self_consistency = example("self_consistency")
    output = self_consistency.sample(llm, "How many minutes does she wait?", num_samples=5)
    num_prompt = len(output.prompt_token_ids)
    assert output.metrics.computed_tokens == num_prompt
    assert self_consistency.tokens_not_recomputed(output) == 4 * num_prompt
    assert self_consistency.vote(["so 8", "it is 8", "12 or 9", "none"]) == ("8", 2)


def test_turns_compute_what_is_new(llm):
    multi_turn = example("multi_turn", SYSTEM="Be brief.")
    outputs = list(multi_turn.talk(llm, multi_turn.QUESTIONS))
    assert outputs[0].num_cached_tokens == 0
    for before, output in itertools.pairwise(outputs):
        had = len(before.prompt_token_ids) + len(before.outputs[0].token_ids)
        assert output.num_cached_tokens == (had - 1) // 8 * 8  # the last token was not computed


def test_branches_compute_what_is_new(llm):
    grow = example("tree_of_thought").grow
    levels = [level.result() for level in grow(llm, "Plan a day.", ["Noon", "Later"])]
    assert levels[0].num_cached_tokens == 0
    for before, level in itertools.pairwise(levels):
        had = len(before.prompt_token_ids) + 16
        assert had < len(level.prompt_token_ids) <= had + len("\nLater:")
        assert level.num_cached_tokens == (had - 1) // 8 * 8
