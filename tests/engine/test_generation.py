"""Answers that share what they have in common: samples of one prompt, branches of one answer."""

from dataclasses import replace

import pytest

from engine import SamplingParams
from engine.stream import Stream
from kvstore.errors import ConfigError

BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # bytes of one block of the tiny model
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=300)
DRAWN = SamplingParams(n=8, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)


def ids(output):
    return [sample.token_ids for sample in output.outputs]


@pytest.fixture(scope="module")
def llm(tiny_model):
    from engine import LLM

    with LLM(
        tiny_model,
        dtype="float32",
        device_cache=400 * BLOCK,
        skip_tokenizer_init=True,
        load_policy="always",
    ) as engine:
        yield engine
        assert engine.check() == []


@pytest.fixture
def steps(llm, record_steps):
    llm.reset_prefix_cache()
    return record_steps(llm)


def wait_until_it_has(generation, num_tokens):
    while len(generation.so_far().outputs[0].token_ids) < num_tokens:
        pass


@pytest.mark.parametrize("num_prompt", [5, 32, 40])
def test_samples_compute_their_prompt_once(llm, steps, tiny_prompts, num_prompt):
    """Also a prompt shorter than a block, which no cache holds."""
    (output,) = llm.generate([tiny_prompts[0][:num_prompt]], DRAWN)
    assert steps.num_tokens == num_prompt + 8 * 11
    assert output.metrics.computed_tokens == num_prompt
    assert len({tuple(sample) for sample in ids(output)}) > 1


def test_samples_are_those_of_their_seeds_alone(llm, tiny_prompts):
    prompt = tiny_prompts[1][:40]
    (together,) = llm.generate([prompt], DRAWN)
    alone = llm.generate([prompt] * 8, [replace(DRAWN, n=1, seed=3 + i) for i in range(8)])
    assert ids(together) == [output.outputs[0].token_ids for output in alone]


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"device_cache": 40 * BLOCK, "max_model_len": 400},
        {"deterministic": True, "attention_backend": "torch", "max_model_len": 400},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_samples_share_their_prompt_whatever_the_settings(
    make_llm, llm, tiny_prompts, record_steps, settings
):
    """Without a cache, with fewer seats than samples, and on a device that is too small for all."""
    (expected,) = llm.generate([tiny_prompts[1][:40]], DRAWN)
    engine = make_llm(**settings)
    steps = record_steps(engine)
    (output,) = engine.generate([tiny_prompts[1][:40]], DRAWN)
    assert ids(output) == ids(expected)
    assert steps.num_tokens == 40 + 8 * 11


def test_samples_that_lose_their_blocks_go_on_with_the_same_tokens(make_llm, tiny_prompts):
    """A device of 32 blocks for 8 samples of 12 blocks each."""
    params = replace(DRAWN, max_tokens=100)
    tight = make_llm(device_cache=32 * BLOCK, max_model_len=400)
    (output,) = tight.generate([tiny_prompts[1][:90]], params)
    (expected,) = make_llm().generate([tiny_prompts[1][:90]], params)
    assert tight._core.scheduler.num_preemptions > 0
    assert ids(output) == ids(expected)


def test_a_fork_of_a_running_answer_goes_on_like_it(llm, steps, hold_first, tiny_prompts):
    go_on = hold_first(llm, 20)
    first = llm.start(tiny_prompts[2][:50], LONG)
    wait_until_it_has(first, 20)
    second = first.fork()
    go_on()
    answer, branch = first.result(60), second.result(60)
    whole = answer.prompt_token_ids + answer.outputs[0].token_ids
    again = branch.prompt_token_ids + branch.outputs[0].token_ids
    assert again[: len(whole)] == whole
    # All that the first had computed at that moment: every token but its newest.
    assert branch.num_cached_tokens == len(branch.prompt_token_ids) - 1 == 50 + 19
    assert branch.metrics.computed_tokens == 1
    assert steps.num_tokens == 50 + 299 + 300


def test_a_fork_of_a_finished_answer_finds_its_full_blocks(llm, steps, tiny_prompts):
    first = llm.start(tiny_prompts[2][:50], LONG)
    answer = first.result(60)
    branch = first.fork(replace(GREEDY, max_tokens=20)).result(60)
    whole = answer.prompt_token_ids + answer.outputs[0].token_ids
    assert branch.prompt_token_ids == whole
    assert branch.num_cached_tokens == (len(whole) - 1) // 16 * 16
    (alone,) = llm.generate([whole], replace(GREEDY, max_tokens=20))
    assert ids(branch) == ids(alone)


def test_branches_with_other_tokens_do_not_disturb_each_other(llm, tiny_prompts, tiny_oracle):
    stem = llm.start(tiny_prompts[2][:50], LONG)
    wait_until_it_has(stem, 5)
    branches = [stem.fork(GREEDY, append=[10 + i, 20 + i]) for i in range(4)]
    twigs = [branch.fork(GREEDY, append=[30]) for branch in branches]
    for each in (*branches, *twigs):
        output = each.result(60)
        tiny_oracle.assert_equal(output.prompt_token_ids, output.outputs[0].token_ids)
    assert stem.result(60).outputs[0].token_ids == llm.generate(
        [tiny_prompts[2][:50]], LONG
    )[0].outputs[0].token_ids  # fmt: skip


def test_a_sample_of_several_is_forked_by_its_index(llm, tiny_prompts):
    first = llm.start(tiny_prompts[3][:20], DRAWN)
    answer = first.result(60)
    branch = first.fork(GREEDY, index=5).result(60)
    assert branch.prompt_token_ids == tiny_prompts[3][:20] + answer.outputs[5].token_ids
    with pytest.raises(ConfigError, match=r"index: expected a sample in \[0, 8\), got 8"):
        first.fork(index=8)


def test_a_fork_may_draw_samples_of_its_own(llm, steps, tiny_prompts):
    first = llm.start(tiny_prompts[3][:20], GREEDY)
    answer = first.result(60)
    steps.batches.clear()
    branch = first.fork(replace(DRAWN, n=4), append=[7]).result(60)
    assert len({tuple(sample) for sample in ids(branch)}) > 1
    assert steps.num_tokens == branch.metrics.computed_tokens + 4 * 11
    assert branch.prompt_token_ids == [*tiny_prompts[3][:20], *answer.outputs[0].token_ids, 7]


def test_a_fork_before_the_prompt_is_computed_shares_the_prompt(make_llm, hold_first, tiny_prompts):
    llm = make_llm(max_num_batched_tokens=16, max_num_seqs=4)
    go_on = hold_first(llm, 0)
    first = llm.start(tiny_prompts[0], GREEDY)
    second = first.fork()
    go_on()
    assert ids(second.result(60)) == ids(first.result(60))
    assert first.result().metrics.computed_tokens + second.result().metrics.computed_tokens <= (
        len(tiny_prompts[0]) + 16
    )


def test_an_answer_is_read_as_it_comes_and_its_fork_as_well(llm, tiny_prompts):
    first = llm.start(tiny_prompts[2][:50], replace(GREEDY, max_tokens=60), stream=True)
    read, deltas = [], iter(first)
    while len(read) < 20:
        read += next(deltas).outputs[0].token_ids
    second = first.fork(stream=True)
    branch = [token_id for delta in second for token_id in delta.outputs[0].token_ids]
    read += [token_id for delta in deltas for token_id in delta.outputs[0].token_ids]
    assert read == first.result().outputs[0].token_ids
    assert branch == second.result().outputs[0].token_ids
    again = [*second.result().prompt_token_ids, *branch]
    assert again[: 50 + 60] == [*tiny_prompts[2][:50], *read]


def test_whoever_waits_for_an_answer_need_not_read_its_stream(llm, tiny_prompts):
    """More than a stream holds unread, begun by its reader or not."""
    long = replace(GREEDY, max_tokens=Stream.max_unread_tokens + 20)
    unread, begun = (llm.start(tiny_prompts[0], long, stream=True) for _ in range(2))
    reader = iter(begun)
    read = len(next(reader).outputs[0].token_ids)
    for generation in (unread, begun):
        assert len(generation.result(60).outputs[0].token_ids) == long.max_tokens
    assert read + sum(len(delta.outputs[0].token_ids) for delta in reader) == long.max_tokens


def test_a_stream_that_nobody_can_read_any_more_is_aborted(llm, tiny_prompts):
    endless = replace(GREEDY, max_tokens=Stream.max_unread_tokens + 20)
    dropped = llm.start(tiny_prompts[0], endless, stream=True)
    dropped.fork(stream=True)
    del dropped
    assert llm._core.wait_for(lambda: not llm._core.roster.requests, timeout=60)


def test_who_stops_reading_an_answer_aborts_it(llm, tiny_prompts):
    first = llm.start(tiny_prompts[2][:50], LONG, stream=True)
    for _ in first:
        break
    assert first.result(60).outputs[0].finish_reason == "abort"
    with pytest.raises(ConfigError, match="has been read"):
        next(iter(first))
    other = llm.start(tiny_prompts[2][:50], GREEDY)
    with pytest.raises(ConfigError, match="stream: this generation was made without"):
        next(iter(other))
    assert other.result(60).finished


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_a_with_block_aborts_what_is_not_finished(llm, hold_first, tiny_prompts, stream):
    with llm.start(tiny_prompts[2][:50], GREEDY, stream=stream) as generation:
        whole = generation.result(60)
    assert generation.result(60) == whole
    assert whole.outputs[0].finish_reason == "length"
    hold_first(llm)
    with llm.start(tiny_prompts[2][:50], LONG, stream=stream) as generation:
        pass
    assert generation.result(60).outputs[0].finish_reason == "abort"


def test_a_result_that_is_not_there_in_time_says_so(llm, hold_first, tiny_prompts):
    hold_first(llm)
    generation = llm.start(tiny_prompts[2][:50], LONG)
    with pytest.raises(TimeoutError, match=r"^no answer within 0 s: it goes on"):
        generation.result(0)
    generation.abort()


def test_an_answer_can_be_aborted_by_its_id(llm, hold_first, tiny_prompts):
    hold_first(llm)
    first = llm.start(tiny_prompts[0], LONG, request_id="mine")
    with pytest.raises(ConfigError, match="request_id: 'mine' is running already"):
        llm.start(tiny_prompts[1], GREEDY, request_id="mine")
    llm.abort(["unknown", first.request_id])
    assert first.result(60).outputs[0].finish_reason == "abort"
    llm.abort("mine")
    assert llm._core.call(lambda: llm._core.scheduler.has_work) is False


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"request_id": ["mine"]}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"sampling_params": {"n": 1}}, "sampling_params"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_request_is_refused_before_the_step_thread_has_it(llm, wrong, named):
    with pytest.raises(ConfigError, match=f"^{named}: expected"):
        llm.start([5, 6, 7], **wrong)
    first = llm.start([5, 6, 7], GREEDY)
    with pytest.raises(ConfigError, match=f"^{named}: expected"):
        first.fork(**wrong)
    with pytest.raises(ConfigError, match=r"^index: expected a sample in \[0, 1\), got 'a'"):
        first.fork(index="a")
    assert first.result(60).finished


def test_whoever_holds_an_ended_answer_cannot_abort_the_next_one_of_its_id(llm, tiny_prompts):
    first = llm.start(tiny_prompts[0], GREEDY, request_id="again", stream=True)
    first.result(60)
    unread = iter(first)
    second = llm.start(tiny_prompts[0], GREEDY, request_id="again")
    first.abort()
    unread.close()
    assert second.result(60).outputs[0].finish_reason == "length"


def test_a_fork_beyond_the_context_is_refused(llm, tiny_prompts):
    first = llm.start(tiny_prompts[0][:16], GREEDY)
    first.result(60)
    with pytest.raises(ConfigError, match="has 512 tokens and the model takes 511"):
        first.fork(append=[5] * 480)


def test_what_is_printed_of_a_generation_says_how_far_it_is(llm, hold_first, tiny_prompts):
    hold_first(llm)
    generation = llm.start(tiny_prompts[0], LONG, request_id="mine")
    wait_until_it_has(generation, 1)
    assert repr(generation) == "Generation(request_id='mine', num_tokens=1, running)"
    generation.abort()
    assert repr(generation).endswith(", abort)")
