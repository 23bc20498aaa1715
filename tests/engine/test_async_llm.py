"""``AsyncLLM``: the answers of ``LLM`` on an event loop that is never blocked."""

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest

from engine import AsyncLLM, SamplingParams
from engine.stream import Stream
from kvstore.errors import ConfigError, StoreClosedError

SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_model):
    llm = AsyncLLM(text_model, dtype="float32", device_cache="16MiB", load_policy="always")
    yield llm
    assert llm._llm.check() == []
    llm._llm.close()


def in_use(llm) -> int:
    core = llm._llm._core
    return core.call(lambda: sum(core.store.index.refcount) + len(core.roster.requests))


async def text_of(deltas) -> str:
    return "".join([delta.outputs[0].text async for delta in deltas])


def test_many_answers_at_once_are_those_of_the_blocking_front(llm):
    prompts = ["Once upon", "a time", "there was"]
    expected = [output.outputs[0].text for output in llm._llm.generate(prompts, SHORT)]

    async def main():
        streamed = await asyncio.gather(*(text_of(llm.generate(each, SHORT)) for each in prompts))
        outputs = await asyncio.gather(*(llm.answer(each, SHORT) for each in prompts))
        return streamed, [output.outputs[0].text for output in outputs]

    assert asyncio.run(main()) == (expected, expected)


def test_messages_are_answered_as_a_whole(llm):
    messages = [{"role": "user", "content": "Hello"}]
    (expected,) = llm._llm.chat(messages, SHORT)
    output = asyncio.run(llm.answer(messages, SHORT))
    assert output.outputs[0].text == expected.outputs[0].text


def test_a_text_that_is_far_too_long_is_read_only_to_be_cut(llm):
    text = "x" * 32 * llm.max_model_len  # no token stands for so many bytes
    messages = [{"role": "user", "content": text}]
    cut = replace(SHORT, truncate_prompt_tokens=9)
    (expected,) = llm._llm.generate(text, cut)
    assert len(expected.prompt_token_ids) == 9
    assert llm._llm.chat(messages, cut)[0].prompt_token_ids
    assert asyncio.run(text_of(llm.generate(text, cut))) == expected.outputs[0].text
    assert asyncio.run(text_of(llm.chat(messages, cut)))
    assert asyncio.run(llm.answer(text, cut)).outputs == expected.outputs
    assert asyncio.run(llm.answer(messages, cut)).prompt_token_ids
    refused = (
        llm.generate(text), llm.chat(messages), llm.document(text), llm.answer(messages),
    )  # fmt: skip
    for read in refused:
        with pytest.raises(ConfigError, match=r"has at least \d+ tokens"):
            asyncio.run(read if asyncio.iscoroutine(read) else text_of(read))


def test_chat_streams_the_next_message(llm):
    messages = [{"role": "user", "content": "Hello"}]
    (expected,) = llm._llm.chat(messages, SHORT)
    assert asyncio.run(text_of(llm.chat(messages, SHORT))) == expected.outputs[0].text


def test_closing_the_iterator_gives_the_blocks_back(llm):
    async def main():
        async with aclosing(llm.generate("Once upon", LONG)) as deltas:
            async for _ in deltas:
                break
        await llm.stats()  # behind the abort

    asyncio.run(main())
    assert in_use(llm) == 0


@pytest.mark.parametrize("is_streamed", [True, False])
def test_cancelling_the_task_gives_the_blocks_back(llm, hold_first, is_streamed):
    hold_first(llm._llm)
    core = llm._llm._core

    async def main():
        work = text_of(llm.generate("Once upon", LONG)) if is_streamed else llm.answer("Once", LONG)
        task = asyncio.create_task(work)
        while not await asyncio.wrap_future(core.post(lambda: list(core.scheduler.running))):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await llm.stats()

    asyncio.run(main())
    assert in_use(llm) == 0


def test_abort_ends_a_request_by_its_id(llm):
    async def main():
        ends = []
        async for delta in llm.generate("Once upon", LONG, request_id="mine"):
            ends.append(delta.outputs[0].finish_reason)
            await llm.abort("mine")
        await llm.abort("unknown")
        return ends

    ends = asyncio.run(main())
    assert ends[-1] == "abort"
    assert in_use(llm) == 0


def test_an_id_that_is_running_is_refused_and_its_owner_goes_on(llm, hold_first):
    go_on = hold_first(llm._llm)

    async def main():
        first = await llm.open("Once upon", SHORT, "mine")
        with pytest.raises(ConfigError, match="'mine' is running already"):
            await llm.open("another", SHORT, "mine")
        go_on()
        return await text_of(first)

    assert asyncio.run(main()) == llm._llm.generate("Once upon", SHORT)[0].outputs[0].text


def test_a_reader_that_sleeps_is_waited_for_and_others_are_not_held_up(llm, monkeypatch):
    monkeypatch.setattr(Stream, "max_unread_tokens", 16)
    scheduler = llm._llm._core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = llm._llm.generate("Once upon", params)

    async def main():
        stream = await llm.open("Once upon", params)
        await asyncio.to_thread(llm._llm._core.wait_for, lambda: bool(scheduler.paused), 60)
        held = await asyncio.to_thread(in_use, llm)
        await llm.answer("another", SHORT)
        first = await anext(stream)
        return held, first.outputs[0].token_ids, first.outputs[0].text + await text_of(stream)

    held, first, text = asyncio.run(main())
    assert held == 1  # the request itself, and no block
    assert len(first) == 16
    assert text == expected.outputs[0].text


def test_the_loop_runs_while_a_step_and_the_tokenizer_take_their_time(llm, monkeypatch):
    core, reader = llm._llm._core, llm._llm._reader
    execute, read = core.runner.execute, reader.read
    is_let_go = threading.Event()

    def wait_then(function):
        def waiting(*arguments, **options):
            assert is_let_go.wait(60), "the loop was blocked"
            return function(*arguments, **options)

        return waiting

    monkeypatch.setattr(core.runner, "execute", wait_then(execute))
    monkeypatch.setattr(reader, "read", wait_then(read))

    async def main():
        tasks = [asyncio.create_task(llm.answer("Once upon", SHORT)) for _ in range(2)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        is_let_go.set()
        return [(await task).finished for task in tasks]

    assert asyncio.run(main()) == [True, True]


def test_what_is_wrong_is_raised_before_anything_is_submitted(llm):
    async def main():
        with pytest.raises(ConfigError, match="cut"):
            await llm.open([5] * 5000, SHORT)
        with pytest.raises(ConfigError, match="cache_salt"):
            await llm.answer("x", SHORT, cache_salt=5)

    asyncio.run(main())
    assert in_use(llm) == 0


def test_it_is_an_asynchronous_context_manager_and_says_when_it_is_closed(text_model):
    async def main():
        async with await AsyncLLM.create(text_model, dtype="float32", device_cache="8MiB") as llm:
            await llm.check_health()
            assert llm.is_running
            assert "kvstore_used_bytes" in await llm.metrics_text()
            stream = await llm.open("Once upon", LONG)
        with pytest.raises(StoreClosedError):
            [delta async for delta in stream]
        with pytest.raises(StoreClosedError):
            await llm.check_health()
        with pytest.raises(StoreClosedError):
            await llm.answer("x", SHORT)

    asyncio.run(main())


def test_what_the_engine_knows_is_awaited(llm):
    prompt = "Once upon a time there was a loop that went on"

    async def main():
        await llm.answer(prompt, SHORT)
        await llm.flush()
        cached = await llm.explain(prompt)
        assert cached == llm._llm.explain(prompt)
        assert await llm.queue_stats() == llm._llm.queue_stats()
        assert await llm.reset_prefix_cache() == 0
        assert await llm.explain(prompt) != cached

    asyncio.run(main())
    assert repr(llm) == f"AsyncLLM(model={llm._llm.config.model!r}, max_model_len=512, running)"


def test_threads_that_encode_at_once_do_not_change_what_others_read(llm):
    """Whether special tokens are read is a state of the tokenizer: a text in one thread used to be
    read with the setting of another."""
    reader, text = llm._llm._reader, "x<|im_end|>" * 500
    lengths: dict[bool, set[int]] = {True: set(), False: set()}

    def encode(is_template):
        for _ in range(20):
            lengths[is_template].add(len(reader.encode(text, is_template=is_template)))

    threads = [threading.Thread(target=encode, args=(each,)) for each in (True, False, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == {True: {1000}, False: {500 * len("x<|im_end|>")}}


def test_a_second_reader_is_refused_and_the_first_reads_on(llm):
    """It ended in silence, or took half of the answer."""

    async def main():
        stream = llm.generate("Once upon", SHORT)
        first = asyncio.ensure_future(text_of(stream))
        await asyncio.sleep(0)  # it has begun to open
        with pytest.raises(ConfigError, match="has a reader already"):
            await anext(stream)
        return await first, (await llm.answer("Once upon", SHORT)).outputs[0].text

    text, expected = asyncio.run(main())
    assert text == expected


def test_a_stream_is_read_on_the_loop_that_began_it(llm):
    """A bare RuntimeError of asyncio, which ended it for the first loop, too."""

    async def main():
        stream = await llm.open("Once upon", SHORT)
        with pytest.raises(ConfigError, match="begun on another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(stream.open()))
        return await text_of(stream), (await llm.answer("Once upon", SHORT)).outputs[0].text

    text, expected = asyncio.run(main())
    assert text == expected
