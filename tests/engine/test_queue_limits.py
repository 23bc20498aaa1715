"""A full queue: who is refused, who is held back, and what is counted."""

import threading
from dataclasses import replace

import pytest

from engine import LLM, SamplingParams
from kvstore.errors import CapacityError, QueueFullError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=400)


@pytest.fixture
def start_running(hold_first):
    def start(llm, prompt):
        hold_first(llm)
        generation = llm.start(prompt, LONG)
        assert llm._core.wait_for(lambda: bool(llm._core.scheduler.running), timeout=60)
        return generation

    return start


def test_a_request_beyond_max_num_waiting_is_refused_and_counted(
    make_llm, start_running, tiny_prompts
):
    llm = make_llm(max_num_seqs=1, max_num_waiting=2)
    running = start_running(llm, tiny_prompts[0][:20])
    waiting = [llm.start(prompt, GREEDY) for prompt in tiny_prompts[1:3]]
    with pytest.raises(QueueFullError, match="2 requests wait, as many as max_num_waiting") as full:
        llm.start(tiny_prompts[3], GREEDY)
    with pytest.raises(CapacityError):
        running.fork()
    assert (full.value.setting, full.value.limit) == ("max_num_waiting", 2)
    stats = llm.queue_stats()
    assert (stats.waiting_requests, stats.running_sequences, stats.refused_requests) == (2, 1, 2)
    assert "kvstore_refused_requests_total 2.0" in llm.metrics_text()
    llm.abort([running.request_id, waiting[0].request_id])
    llm.start(tiny_prompts[3], GREEDY).result(60)
    assert waiting[1].result(60).finished


def test_a_request_for_which_there_is_a_seat_does_not_count_as_waiting(make_llm, tiny_prompts):
    """All of a burst counted that came within one step of an idle engine."""
    llm = make_llm(max_num_seqs=8, max_num_waiting=2)
    are_there = threading.Event()
    llm._core.post(are_there.wait)
    generations = [llm.start(tiny_prompts[0][:20], GREEDY) for _ in range(8 + 2)]
    with pytest.raises(QueueFullError, match="2 requests wait"):
        llm.start(tiny_prompts[0][:20], GREEDY)
    are_there.set()
    assert all(generation.result(60).finished for generation in generations)


def test_tokens_of_prompt_and_answer_count_until_the_end(make_llm, start_running, tiny_prompts):
    llm = make_llm(max_total_tokens=450)
    running = start_running(llm, tiny_prompts[0][:20])
    with pytest.raises(QueueFullError, match=r"48 tokens .* 420 of other .*max_total_tokens \(450"):
        llm.start(tiny_prompts[1][:40], GREEDY)
    running.abort()
    assert llm.start(tiny_prompts[1][:40], GREEDY).result(60).finished


def test_generate_holds_back_what_does_not_fit(make_llm, tiny_prompts):
    llm = make_llm(max_num_seqs=2, max_num_waiting=1, max_total_tokens=600)
    outputs = llm.generate(tiny_prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == tiny_prompts
    streamed = list(llm.generate(tiny_prompts[:5], GREEDY, stream=True))
    assert sum(output.finished for output in streamed) == 5
    assert llm.queue_stats().refused_requests == 0


def test_generate_fails_for_a_prompt_that_will_never_fit(make_llm, tiny_prompts):
    llm = make_llm(max_total_tokens=100)
    with pytest.raises(QueueFullError, match="max_total_tokens"):
        llm.generate([tiny_prompts[0][:20], tiny_prompts[1][:99]], GREEDY)
    assert llm.generate([tiny_prompts[0][:20]], GREEDY)[0].finished


def test_a_prompt_that_is_held_back_can_be_aborted(make_llm, hold_first, tiny_prompts):
    llm = make_llm(max_num_seqs=1, max_num_waiting=1)
    hold_first(llm)
    stream = llm.generate(tiny_prompts[:4], LONG, stream=True)
    next(stream)
    assert llm._core.wait_for(lambda: llm._core.roster.stats().held_requests == 2, timeout=60)
    stream.close()
    assert llm.queue_stats().held_requests == llm.queue_stats().waiting_requests == 0


@pytest.fixture(scope="module")
def roomy_answers(tiny_model):
    """What an engine says that never has to preempt."""
    known: list[list[int]] = []

    def answer(prompts, params):
        if not known:
            with LLM(
                tiny_model, dtype="float32", device_cache="32MiB", skip_tokenizer_init=True
            ) as llm:
                known.extend(each.outputs[0].token_ids for each in llm.generate(prompts, params))
        return known

    return answer


@pytest.mark.parametrize("host_blocks", [0, 6], ids=["disk", "host and disk"])
def test_a_preempted_sequence_resumes_by_promotion(
    make_llm, record_steps, roomy_answers, tiny_prompts, tmp_path, host_blocks
):
    """Two answers of 12 blocks on a device of 16. When both have eight, the second one gives up its
    seven and a part; the first one takes the room of the part and of three, and those come back.

    That is so when both begin in one step: the later the second one comes, the fewer it has by
    then, and the fewer have to go. So they are posted together, and their prompts are on the
    device: no answer from disk comes between them.
    """
    block = 2 * 2 * 16 * 2 * 16 * 4
    tight = make_llm(
        max_model_len=256,
        device_cache=16 * block,
        host_cache=host_blocks * block,
        disk_cache=tmp_path / "cache",
    )
    prompts, params = [tiny_prompts[2][:110], tiny_prompts[0][:100]], replace(LONG, max_tokens=80)
    tight.generate(prompts, replace(GREEDY, max_tokens=1))
    steps = record_steps(tight)
    both_are_there = threading.Event()
    tight._core.post(both_are_there.wait)
    answers = [tight.start(prompt, params) for prompt in prompts]
    both_are_there.set()
    outputs = [each.result(60) for each in answers]
    assert tight.queue_stats().preemptions == 1
    assert sum(tight.stats().promoted_blocks.values()) == 3
    the_part = (100 + 18) % 16  # the first one's ninth block begins with its 19th new token
    assert steps.num_tokens == 110 % 16 + 100 % 16 + 2 * 79 + the_part
    assert [each.outputs[0].token_ids for each in outputs] == roomy_answers(prompts, params)
