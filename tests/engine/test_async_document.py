"""Documents on an event loop: what ``Document`` does, and the loop goes on meanwhile."""

import asyncio
import threading

import pytest

from engine import AsyncLLM, SamplingParams
from kvstore.errors import ConfigError, StoreClosedError

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
TEXT = "A document that is read once, and asked on an event loop. "


@pytest.fixture(scope="module")
def llm(text_model, tmp_path_factory):
    llm = AsyncLLM(
        text_model,
        dtype="float32",
        device_cache="16MiB",
        disk_cache=tmp_path_factory.mktemp("documents") / "cache",
        load_policy="always",
        max_num_batched_tokens=64,
    )
    yield llm
    assert llm._llm.check() == []
    asyncio.run(llm.close())


def in_use(llm) -> int:
    core = llm._llm._core
    return core.call(lambda: sum(core.store.index.refcount) + len(core.roster.requests))


def whole_blocks(document) -> int:
    return document.num_tokens // 16 * 16


def test_its_answers_are_those_of_the_blocking_document(llm):
    blocking, questions = llm._llm.document(TEXT * 2), ["Why?", "When?"]
    expected = [output.outputs[0].text for output in blocking.ask(questions, SHORT)]

    async def main():
        document = await llm.document(TEXT * 2)
        assert document.num_tokens == blocking.num_tokens
        assert document.prompt_token_ids("Why?") == blocking.prompt_token_ids("Why?")
        one = await document.ask("Why?", SHORT)
        assert one.num_cached_tokens >= whole_blocks(document)
        several = await document.ask(questions, SHORT)
        texts = {}
        async with document.ask(questions, SHORT, stream=True) as deltas:
            async for delta in deltas:
                texts.setdefault(delta.request_id, []).append(delta.outputs[0].text)
            streamed = ["".join(texts[request_id]) for request_id in deltas.request_ids]
        return one.outputs[0].text, [output.outputs[0].text for output in several], streamed

    assert asyncio.run(main()) == (expected[0], expected, expected)


def test_the_loop_goes_on_while_a_document_is_tokenised_and_read(llm, monkeypatch):
    core, reader = llm._llm._core, llm._llm._reader
    execute, encode, is_let_go = core.runner.execute, reader.encode, threading.Event()

    def wait_then(function):
        def waiting(*arguments, **options):
            assert is_let_go.wait(60), "the loop was blocked"
            return function(*arguments, **options)

        return waiting

    monkeypatch.setattr(core.runner, "execute", wait_then(execute))
    monkeypatch.setattr(reader, "encode", wait_then(encode))

    async def main():
        reading = asyncio.create_task(llm.document("The loop goes on. " + TEXT * 2, pin=True))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reading.done()
        is_let_go.set()
        document = await reading
        assert (await document.residency())["device"] == whole_blocks(document)
        await document.unpin()

    asyncio.run(main())


def test_a_pin_holds_until_it_is_released(llm):
    async def main():
        document = await llm.document("To be kept. " + TEXT, prefill=False)
        assert sum((await document.residency()).values()) < whole_blocks(document)
        async with await document.pin() as pin:
            assert pin.num_blocks == whole_blocks(document) // 16
            assert repr(pin) == f"AsyncPin(num_blocks={pin.num_blocks}, held)"
            assert repr(document.pinned) == repr(pin)
            assert (await document.evict())["device"] == 0
        assert document.pinned is None
        await document.pin(persist=True)
        assert await document.unpin()
        assert not await document.unpin()
        freed = await document.evict()
        assert freed["device"] >= whole_blocks(document) - 16
        await document.warm()
        assert repr(document).startswith("AsyncDocument(model=")

    asyncio.run(main())


def test_a_pin_that_comes_after_its_caller_was_cancelled_is_released(llm, monkeypatch):
    core, is_let_go = llm._llm._core, threading.Event()

    async def main():
        document = await llm.document("Cancelled. " + TEXT)
        pin = document._document.pin
        has_begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        pins = []

        def late(**options):
            loop.call_soon_threadsafe(has_begun.set)
            assert is_let_go.wait(60)
            pins.append(pin(**options))
            return pins[0]

        monkeypatch.setattr(document._document, "pin", late)
        task = asyncio.create_task(document.pin())
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_let_go.set()

        def is_unpinned():
            return (
                bool(pins) and document._document.pinned is None and not core.store.pinning.pinned
            )

        assert await asyncio.to_thread(core.wait_for, is_unpinned, 60)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["prefill", "ask"])
def test_cancelling_gives_the_blocks_back(llm, what, monkeypatch):
    core, execute = llm._llm._core, llm._llm._core.runner.execute
    has_begun, is_let_go = threading.Event(), threading.Event()

    def wait(steps):
        has_begun.set()
        assert is_let_go.wait(60)
        return execute(steps)

    async def main():
        document = await llm.document(f"{what} is cancelled. " + TEXT * 3, prefill=False)
        monkeypatch.setattr(core.runner, "execute", wait)
        task = asyncio.create_task(
            document.prefill() if what == "prefill" else document.ask(["Why?"] * 3, LONG)
        )
        await asyncio.to_thread(has_begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_let_go.set()
        await llm.stats()  # behind the abort

    asyncio.run(main())
    assert in_use(llm) == 0


def test_what_is_wrong_is_raised_where_it_is_awaited(llm):
    async def main():
        with pytest.raises(ConfigError, match="the document is empty"):
            await llm.document(" ")
        document = await llm.document(TEXT)
        with pytest.raises(ConfigError, match="a question is text"):
            await document.ask("")
        with pytest.raises(ConfigError, match="a question is text"):
            await anext(document.ask("", stream=True))

    asyncio.run(main())
    assert in_use(llm) == 0


def test_questions_are_held_back_and_not_refused_and_a_closed_engine_says_so(text_model):
    async def main():
        settings = {"dtype": "float32", "device_cache": "8MiB", "max_num_waiting": 1}
        async with await AsyncLLM.create(text_model, **settings) as llm:
            document = await llm.document(TEXT)
            outputs = await document.ask(["Why?"] * 5, SHORT)
            assert [output.finished for output in outputs] == [True] * 5
            assert (await llm.queue_stats()).refused_requests == 0
            pin = await document.pin()
        await pin.release()
        for work in (document.residency, document.unpin, document.prefill):
            with pytest.raises(StoreClosedError):
                await work()

    asyncio.run(main())
