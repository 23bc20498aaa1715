"""Answers under way on an event loop."""

import asyncio
from dataclasses import replace

import pytest

from engine import AsyncLLM, SamplingParams
from kvstore.errors import ConfigError

SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = replace(SHORT, max_tokens=300)


@pytest.fixture(scope="module")
def llm(text_model):
    llm = AsyncLLM(text_model, dtype="float32", device_cache="16MiB", load_policy="always")
    yield llm
    assert llm._llm.check() == []
    asyncio.run(llm.close())


async def text_of(deltas) -> str:
    return "".join([delta.outputs[0].text async for delta in deltas])


def test_it_is_awaited_read_and_forked(llm):
    (expected,) = llm._llm.generate("Once upon", SHORT)
    text = expected.outputs[0].text

    async def main():
        first = await llm.start("Once upon", SHORT)
        fork = await first.fork()
        streamed = await llm.start("Once upon", SHORT, stream=True)
        assert await text_of(streamed) == text
        assert await text_of(await llm.start("Once upon", SHORT, stream=True)) == text  # not kept
        with pytest.raises(ConfigError, match="has been read"):
            await text_of(streamed)
        with pytest.raises(ConfigError, match="made without"):
            await text_of(first)
        output = await first.result()
        assert output.outputs[0].text == text
        assert await first.so_far() == output
        assert first.is_finished
        assert (await fork.result()).prompt_token_ids[: len(output.prompt_token_ids)] == (
            output.prompt_token_ids
        )
        with pytest.raises(ConfigError, match="index"):
            await first.fork(index=1)

    asyncio.run(main())


def test_it_is_aborted_by_itself_by_its_id_and_by_leaving_its_stream(llm, hold_first):
    hold_first(llm._llm, and_each=True)

    async def main():
        four = await llm.start("Once upon", LONG, stream=True)
        one = await llm.start("Once upon", LONG)
        two, three = [await llm.start("Once upon", LONG, request_id=name) for name in "ab"]
        assert repr(two).startswith("AsyncGeneration(request_id='a', num_tokens=")
        with pytest.raises(ConfigError, match="'a' is running already"):
            await llm.start("another", SHORT, request_id="a")
        waiting = asyncio.create_task(one.result())
        await asyncio.sleep(0)
        waiting.cancel()  # which leaves the answer alone
        async with four:
            async for _ in four:
                break
        async with await llm.start("Once upon", LONG) as five:
            pass
        assert not one.is_finished
        await one.abort()
        await llm.abort(["a", "b", "unknown"])
        results = [await each.result() for each in (one, two, three, four, five)]
        assert [output.outputs[0].finish_reason for output in results] == ["abort"] * 5

    asyncio.run(main())
