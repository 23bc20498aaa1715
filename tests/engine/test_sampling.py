"""Sampling parameters through the whole engine, against transformers and the plain definitions."""

import random

import pytest
import torch
from architectures import BLOCK, MAX_LEN, Eager, make_network, make_tokenizer, tokens
from plain_sampling import edited

from engine import LLM, SamplingParams
from kvstore.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

EOS = 2
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 8 * 4  # of this model: layers, K and V, positions, heads, dim


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_network("Llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def eager() -> Eager:
    return Eager(make_network("Llama"), MAX_LEN)


SETTINGS = {"dtype": "float32", "block_size": BLOCK, "device_cache": "4MiB"}


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, **SETTINGS, max_num_batched_tokens=32, max_num_seqs=8) as llm:
        yield llm
        assert llm.check() == []


def some_params(rng: random.Random) -> SamplingParams:
    choices = {
        "repetition_penalty": rng.uniform(0.7, 1.8),
        "presence_penalty": rng.uniform(-1.0, 2.0),
        "frequency_penalty": rng.uniform(-1.0, 2.0),
        "logit_bias": {rng.randrange(97): rng.uniform(-50.0, 50.0) for _ in range(5)},
        "allowed_token_ids": rng.sample(range(97), 20),
        "min_tokens": rng.randint(1, 8),
        "stop_token_ids": rng.sample(range(97), 4),
        "bad_words": [chr(rng.randrange(34, 120)) for _ in range(30)],
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.4}
    return SamplingParams(temperature=0.0, max_tokens=10, **chosen)


def test_greedy_answers_follow_the_definitions_of_all_parameters(llm, eager):
    rng = random.Random(1)
    prompts = [tokens(rng.randint(3, 40), seed) for seed in range(24)]
    many = [some_params(rng) for _ in prompts]
    num_compared = 0
    for prompt, params, output in zip(prompts, many, llm.generate(prompts, many), strict=True):
        answer = output.outputs[0].token_ids
        ends = [EOS, *params.stop_token_ids]
        words = [llm.tokenizer.encode(word) for word in params.bad_words]
        for step, token in enumerate(answer):
            logits = eager.logits(prompt + answer[:step])[-1].tolist()
            scores = edited(logits, params, prompt, answer[:step], ends, words)
            best, second = sorted(scores)[-1], sorted(scores)[-2]
            if best - second > 1e-3:
                assert token == scores.index(best), (step, params)
                num_compared += 1
        ended = answer[-1] in ends
        assert not any(token in ends for token in answer[:-1])
        assert ended or len(answer) == 10
        assert output.outputs[0].finish_reason == ("stop" if ended else "length")
    assert num_compared > 150


def test_logprobs_of_sampled_tokens_are_those_of_transformers(llm, eager):
    prompt = tokens(30, 4)
    params = SamplingParams(n=3, seed=5, max_tokens=8, logprobs=4, top_p=0.9, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3
    for sample in output.outputs:
        answer = sample.token_ids
        summed = sum(named[t].logprob for t, named in zip(answer, sample.logprobs, strict=True))
        assert sample.cumulative_logprob == pytest.approx(summed)
        expected = eager.logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
        for token, row, named in zip(answer, expected, sample.logprobs, strict=True):
            assert_names_the_best_and(token, row, named, 4)
            assert named[token].decoded_token == llm.tokenizer.decode([token])


def assert_names_the_best_and(token: int, row: torch.Tensor, named: dict, num_top: int) -> None:
    best = row.topk(num_top).indices.tolist()
    assert set(named) == {*best, token}
    for token_id, logprob in named.items():
        assert logprob.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
        assert logprob.rank == 1 + int((row > row[token_id]).sum())


def assert_scores_of_the_prompt(eager: Eager, prompt: list[int], scores, num_top: int) -> None:
    expected = eager.logits(prompt).log_softmax(-1)
    assert scores[0] is None
    assert len(scores) == len(prompt)
    for token, row, named in zip(prompt[1:], expected, scores[1:], strict=False):
        assert_names_the_best_and(token, row, named, num_top)


def test_prompt_logprobs_are_those_of_transformers_and_need_no_luck_with_chunks(llm, eager):
    """Three prompts share steps of at most 32 tokens, so each is cut somewhere else."""
    prompts = [tokens(length, length) for length in (50, 1, 83)]
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, n=2)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert_scores_of_the_prompt(eager, prompt, output.prompt_logprobs, 2)


def test_prompt_logprobs_compute_what_is_cached_and_cache_it(llm, eager):
    prompt = tokens(45, 77)
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    scored = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=-1)
    for params, num_cached in ((scored, 0), (greedy, 40), (scored, 0), (greedy, 40)):
        (output,) = llm.generate([prompt], params)
        assert output.num_cached_tokens == num_cached
        if params is scored:
            assert_scores_of_the_prompt(eager, prompt, output.prompt_logprobs, 97)
        else:
            assert output.prompt_logprobs is None


def test_a_preempted_request_scores_every_token_of_its_prompt_once(model, eager):
    settings = SETTINGS | {"device_cache": 18 * BLOCK_BYTES, "max_model_len": MAX_LEN}
    prompts = [tokens(60, seed) for seed in (1, 2, 3)]
    params = SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=1, ignore_eos=True)
    with LLM(model, **settings, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params)
        assert llm._core.scheduler.num_preemptions > 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_scores_of_the_prompt(eager, prompt, output.prompt_logprobs, 1)
        assert llm.check() == []


def test_a_stream_brings_the_prompts_logprobs_first_and_whole(llm, eager):
    """Beside a second sample they used to come before all of them were known."""
    prompt = tokens(70, 3)
    params = SamplingParams(n=2, seed=1, max_tokens=3, prompt_logprobs=1)
    first, *others = llm.generate([prompt], params, stream=True)
    assert_scores_of_the_prompt(eager, prompt, first.prompt_logprobs, 1)
    assert [delta.prompt_logprobs for delta in others] == [None] * len(others)


def test_scoring_the_prompt_changes_no_bit_in_deterministic_mode(tiny_model):
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "device_cache": "16MiB"}
    prompt = tokens(290, 8)
    plain = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1)
    scored = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=1
    )
    with LLM(tiny_model, **settings, deterministic=True) as llm:
        first, second, third = (llm.generate([prompt], p)[0] for p in (plain, scored, plain))
    assert first.outputs[0].logprobs == second.outputs[0].logprobs == third.outputs[0].logprobs
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 256)
    assert len(second.prompt_logprobs) == 290


def test_bad_words_are_in_no_text(llm):
    allowed = llm.tokenizer.convert_tokens_to_ids([*"abcx", "te"])
    params = {"temperature": 2.0, "seed": 1, "max_tokens": 60, "allowed_token_ids": allowed}
    words = ["xa", "te", "bcb"]
    (free,) = llm.generate("ab", SamplingParams(**params))
    (kept,) = llm.generate("ab", SamplingParams(**params, bad_words=words))
    assert all(word in free.outputs[0].text for word in words)
    assert not any(word in kept.outputs[0].text for word in words)
    assert set(kept.outputs[0].text) == set("abcx")


def test_text_is_what_was_asked_for(llm):
    end = {llm.tokenizer.eos_token_id: 100.0}

    def ask(**params):
        (output,) = llm.generate("say", SamplingParams(temperature=0.0, max_tokens=3, **params))
        return output.outputs[0]

    assert ask(logit_bias=end).text == ""
    shown = ask(logit_bias=end, skip_special_tokens=False, include_stop_str_in_output=True)
    assert (shown.text, shown.finish_reason) == ("</s>", "stop")
    assert ask(logit_bias=end, skip_special_tokens=False, ignore_eos=True).text == "</s>" * 3
    plain, silent = ask(logprobs=0), ask(detokenize=False, logprobs=0)
    assert (silent.text, silent.token_ids) == ("", plain.token_ids)
    for token_id, named in zip(silent.token_ids, silent.logprobs, strict=True):
        assert named[token_id].decoded_token == str(token_id)
    assert ask(stop=plain.text[1], include_stop_str_in_output=True).text == plain.text[:2]


def test_a_long_prompt_is_truncated_at_its_beginning(llm):
    prompt = tokens(MAX_LEN + 30, 9)
    (last,) = llm.generate([prompt], SamplingParams(max_tokens=1, truncate_prompt_tokens=7))
    assert last.prompt_token_ids == prompt[-7:]
    (fits,) = llm.generate([prompt], SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))
    assert fits.prompt_token_ids == prompt[-(MAX_LEN - 1) :]
    with pytest.raises(ConfigError, match="cut"):
        llm.generate([prompt], SamplingParams(max_tokens=1, truncate_prompt_tokens=MAX_LEN))


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {97: 1.0}}, {"allowed_token_ids": [5, 97]}, {"stop_token_ids": [97]}],
)
def test_a_token_that_the_model_does_not_have_is_refused(llm, params):
    with pytest.raises(ConfigError, match=r"expected token ids in \[0, 97\), got 97"):
        llm.generate([[5, 6]], SamplingParams(**params))


def test_chat_without_a_template_says_what_to_do(llm):
    with pytest.raises(ConfigError, match="the tokenizer has none: set chat_template"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_a_template_that_refuses_the_messages_is_one_line(llm, monkeypatch):
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(ConfigError, match="refuses the messages: roles must alternate"):
        llm.chat([{"role": "user", "content": "Hi"}])
