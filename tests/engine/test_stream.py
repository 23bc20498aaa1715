"""Answers as they come: concatenated deltas are the answer, and slow readers stop nobody."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.outputs import RequestMetrics
from engine.sampling.sampler import SampledToken
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions, Sequence
from engine.stream import Stream
from engine.text.detokenizer import Detokenizer
from kvstore.errors import ConfigError, StoreClosedError

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
NO_TIMES = RequestMetrics(0, 0, 0, 0, 0, 0, 0, {})


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(text_model, dtype="float32", device_cache="16MiB", load_policy="always") as llm:
        yield llm
        assert llm.check() == []


@pytest.fixture
def few_unread(monkeypatch) -> int:
    monkeypatch.setattr(Stream, "max_unread_tokens", 24)
    return 24


def in_use(llm) -> int:
    """Blocks that sequences hold."""
    return llm._core.call(lambda: sum(llm._core.store.index.refcount))


def joined(deltas):
    """What a reader knows at the end, by request and sample."""
    known = {}
    for delta in deltas:
        for part in delta.outputs:
            key = (delta.request_id, part.index)
            text, token_ids, named, _ = known.get(key, ("", [], [], None))
            end = (part.finish_reason, part.stop_reason)
            known[key] = (
                text + part.text,
                token_ids + part.token_ids,
                named + [set(entry) for entry in part.logprobs or ()],
                end,
            )
    return list(known.values())


def whole(outputs):
    return [
        (
            sample.text,
            sample.token_ids,
            [set(entry) for entry in sample.logprobs or ()],
            (sample.finish_reason, sample.stop_reason),
        )
        for output in outputs
        for sample in output.outputs
    ]


@pytest.fixture(scope="module")
def tokenizer(text_model):
    return transformers.AutoTokenizer.from_pretrained(text_model)


@settings(max_examples=150)
@given(
    text=st.text(alphabet="ab<é猫🙂", max_size=12),
    stops=st.lists(st.text(alphabet="ab<é猫", min_size=1, max_size=3), max_size=3),
    reads=st.lists(st.booleans(), min_size=60, max_size=60),
    num_bytes=st.integers(0, 60),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_deltas_add_up_to_the_text_whenever_they_are_read(
    tokenizer, text, stops, reads, num_bytes, include_stop, min_tokens
):
    """Also when the answer ends within a character, and whatever the stop strings are."""
    token_ids = tokenizer(text)["input_ids"][:num_bytes] or [0]
    params = SamplingParams(
        stop=stops,
        max_tokens=len(token_ids),
        min_tokens=min(min_tokens, len(token_ids)),
        include_stop_str_in_output=include_stop,
    )
    stream = Stream()
    sequence = Sequence(
        "0", 0, params, CacheOptions(), [1], 1, 1 + len(token_ids), frozenset(),
        Detokenizer(tokenizer, [1], params.stop_strings, include_stop=include_stop), None,
        stream=stream,
    )  # fmt: skip
    request = Request("0", None, [1], params, 0.0, [sequence], stream)
    deltas = []
    for token_id, is_read in zip(token_ids, reads, strict=False):
        sequence.append(SampledToken(token_id))
        is_last = sequence.finish_reason is not None
        stream.put(sequence.take_delta(), NO_TIMES, is_last=is_last)
        if is_read or is_last:
            deltas.append(stream.take(request))
        if is_last:
            break
    sample = sequence.output()
    ((streamed, streamed_ids, _, end),) = joined(deltas)
    assert (streamed, streamed_ids) == (sample.text, sample.token_ids)
    assert end == (sample.finish_reason, sample.stop_reason)
    assert deltas[-1].finished


def test_streamed_answers_are_the_answers(llm):
    prompts = ["Once upon a time", "héllo 猫", "no"]
    sampled = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=40, logprobs=2)
    ends = SamplingParams(temperature=1.0, seed=1, max_tokens=60, stop=["a", "bc", "}"])
    params = [sampled, LONG, ends]
    expected = llm.generate(prompts, params)
    with llm.generate(prompts, params, stream=True) as stream:
        deltas = list(stream)
    assert sorted(joined(deltas), key=str) == sorted(whole(expected), key=str)
    last = {delta.request_id: delta for delta in deltas}
    assert set(last) == set(stream.request_ids)
    for request_id, output in zip(stream.request_ids, expected, strict=True):
        assert last[request_id].finished
        assert sum(delta.finished for delta in deltas if delta.request_id == request_id) == 1
        assert last[request_id].prompt_token_ids == output.prompt_token_ids
        assert last[request_id].metrics.total_s >= last[request_id].metrics.ttft_s > 0
    assert len(deltas) > len(prompts)


def test_the_first_delta_has_the_logprobs_of_the_prompt(llm):
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    (expected,) = llm.generate("Once upon", params)
    first, *others = llm.generate("Once upon", params, stream=True)
    assert [set(named or ()) for named in first.prompt_logprobs] == [
        set(named or ()) for named in expected.prompt_logprobs
    ]
    assert [delta.prompt_logprobs for delta in others] == [None] * len(others)


def test_a_second_thread_that_reads_is_refused_and_the_first_reads_on(llm):
    expected = llm.generate("Once upon a time", LONG)
    may_go_on = threading.Event()
    llm._core.post(may_go_on.wait)
    stream = llm.generate("Once upon a time", LONG, stream=True)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(list, stream)
        while not stream._reading.locked():
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="has a reader already"):
            next(stream)
        may_go_on.set()
        assert joined(first.result(60)) == whole(expected)


def test_closing_a_stream_aborts_its_request(llm):
    with llm.generate("Once upon a time", LONG, stream=True) as stream:
        next(stream)
    assert list(stream) == []
    assert in_use(llm) == 0
    assert not llm._core.call(lambda: llm._core.scheduler.has_work)


def test_a_stream_that_is_forgotten_is_aborted(llm):
    stream = llm.generate("Once upon a time", LONG, stream=True)
    next(stream)
    del stream
    gc.collect()
    assert llm._core.wait_for(lambda: not llm._core.scheduler.has_work, timeout=60)
    assert in_use(llm) == 0


def test_a_reader_that_garbage_collection_ends_on_the_step_thread_does_not_wait_for_itself(llm):
    def read():
        with llm.generate("Once upon a time", LONG, stream=True) as stream:
            yield from stream

    for reader in (read(), iter(llm.start("Once upon a time", LONG, stream=True))):
        next(reader)
        cycle = [reader]
        cycle.append(cycle)
        del reader, cycle
        llm._core.post(gc.collect).result(60)
    assert llm._core.wait_for(lambda: not llm._core.scheduler.has_work, timeout=60)
    assert in_use(llm) == 0


def test_leaving_a_stream_of_an_engine_that_was_closed_is_no_error(text_model):
    llm = LLM(text_model, dtype="float32", device_cache="8MiB")
    with llm.generate("Once upon a time", LONG, stream=True) as stream:
        next(stream)
        llm.close()


def test_a_reader_that_does_not_read_pauses_its_request_and_no_other(llm, few_unread):
    expected = llm.generate("Once upon a time", LONG)
    stream = llm.generate("Once upon a time", LONG, stream=True)
    scheduler = llm._core.scheduler
    assert llm._core.wait_for(lambda: len(scheduler.paused) == 1, timeout=60)
    assert in_use(llm) == 0
    (other,) = llm.generate("another", SamplingParams(temperature=0.0, max_tokens=5))
    assert other.finished
    first = next(stream)
    assert len(first.outputs[0].token_ids) == few_unread
    assert joined([first, *stream]) == whole(expected)


def test_as_many_unread_streams_as_may_run_leave_room_for_others(text_model, few_unread):
    settings = {"dtype": "float32", "device_cache": "8MiB", "max_num_seqs": 2}
    with LLM(text_model, **settings) as llm:
        streams = [llm.generate("unread", LONG, stream=True) for _ in range(3)]
        scheduler = llm._core.scheduler
        assert llm._core.wait_for(lambda: len(scheduler.paused) == 3, timeout=60)
        stats = llm.queue_stats()
        assert (stats.paused_requests, stats.waiting_requests, stats.held_requests) == (3, 0, 0)
        assert "kvstore_paused_requests 3.0" in llm.metrics_text()
        assert llm.generate("read", SamplingParams(max_tokens=3))[0].finished
        for stream in streams:
            assert sum(len(delta.outputs[0].token_ids) for delta in stream) == 60
        assert llm.queue_stats().paused_requests == 0


def test_an_error_reaches_the_reader_after_what_came_before(llm, monkeypatch):
    execute, calls = llm._core.runner.execute, []

    def fail_later(steps):
        calls.append(steps)
        if len(calls) > 3:
            raise RuntimeError("out of memory")
        return execute(steps)

    monkeypatch.setattr(llm._core.runner, "execute", fail_later)
    stream = llm.generate("Once upon a time", LONG, stream=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(stream)
    monkeypatch.undo()
    assert list(stream) == []
    assert in_use(llm) == 0


def test_a_wrong_prompt_is_refused_at_the_call_and_not_at_the_first_read(llm):
    with pytest.raises(ConfigError, match="cut"):
        llm.generate([[5] * 5000], stream=True)


def test_closing_the_engine_ends_its_streams(text_model, few_unread):
    llm = LLM(text_model, dtype="float32", device_cache="8MiB")
    stream = llm.generate("Once upon a time", LONG, stream=True)
    assert llm._core.wait_for(lambda: bool(llm._core.scheduler.paused), timeout=60)
    llm.close()
    assert len(next(stream).outputs[0].token_ids) == few_unread
    with pytest.raises(StoreClosedError):
        next(stream)
    assert list(stream) == []


def test_chats_are_streamed_as_prompts_are(llm):
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "Good evening")]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for messages in (chats[0], chats):
        deltas = llm.chat(messages, params, stream=True)
        expected = whole(llm.chat(messages, params))
        assert sorted(joined(deltas), key=str) == sorted(expected, key=str)
