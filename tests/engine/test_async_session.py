"""Chats on an event loop."""

import asyncio
from dataclasses import replace

import pytest

from engine import AsyncLLM, SamplingParams
from kvstore.errors import ConfigError

BRIEF = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = replace(BRIEF, max_tokens=300)


@pytest.fixture(scope="module")
def llm(text_model):
    llm = AsyncLLM(text_model, dtype="float32", device_cache="16MiB", load_policy="always")
    yield llm
    assert llm._llm.check() == []
    asyncio.run(llm.close())


def test_its_turns_are_those_of_the_blocking_session(llm):
    expected = llm._llm.session("Be brief.")
    for question in ("Who keeps bees?", "Since when?"):
        expected.ask(question, BRIEF)

    async def main():
        waited, streamed = await llm.session("Be brief."), await llm.session("Be brief.")
        for question in ("Who keeps bees?", "Since when?"):
            await waited.ask(question, BRIEF)
            async for _ in streamed.ask(question, BRIEF, stream=True):
                pass
        fork = waited.fork()
        await fork.ask("Why?", BRIEF)
        assert len(fork.messages) == len(waited.messages) + 2
        assert repr(fork).startswith("AsyncSession(model=")
        return waited, streamed

    for session in asyncio.run(main()):
        assert session.messages == expected.messages
        assert session.token_ids == expected.token_ids


def test_a_turn_that_is_left_early_stays_with_what_was_read(llm):
    async def main():
        session = await llm.session()
        async for delta in session.ask("Who?", LONG, stream=True):
            text = delta.outputs[0].text
            break
        assert [each["content"] for each in session.messages] == ["Who?", text]
        await session.ask("When?", BRIEF)
        assert len(session.messages) == 4

    asyncio.run(main())


def test_a_turn_that_is_cancelled_is_undone(llm, hold_first):
    hold_first(llm._llm)
    core = llm._llm._core

    async def main():
        session = await llm.session()
        task = asyncio.create_task(session.ask("Who?", LONG))
        while not await asyncio.wrap_future(core.post(lambda: list(core.scheduler.running))):
            pass
        with pytest.raises(ConfigError, match="is answering already"):
            await session.ask("When?", BRIEF)
        with pytest.raises(ConfigError, match="is answering already"):
            await anext(session.ask("When?", BRIEF, stream=True))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.messages == []
        with pytest.raises(ConfigError, match="a question is text"):
            await anext(session.ask("", stream=True))
        await session.ask("Who?", BRIEF)

    asyncio.run(main())
