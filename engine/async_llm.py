"""``AsyncLLM``: the front for event loops, over the same engine as ``LLM``.

Nothing here blocks the loop: prompts are tokenised on a thread of their own, and everything else is
posted to the step thread, which wakes the loop when there is something to read.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from engine.llm import LLM
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.queue_stats import render_queue
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions
from engine.stream import Stream
from engine.text.prompts import Message, Prompt, refuse_adapter, salt_of
from kvstore.reports.metrics import render
from kvstore.stats import StoreStats

T = TypeVar("T")


class AsyncOutputStream(AsyncIterator[RequestOutput]):
    """Deltas of one request that has been submitted; ``close()`` aborts it."""

    def __init__(self, llm: LLM, request: Request, news: asyncio.Event) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self._core = llm._core
        self._request = request
        self._news = news
        self._is_open = True

    def __aiter__(self) -> "AsyncOutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        assert self._request.stream is not None
        try:
            while self._is_open:
                await self._news.wait()
                self._news.clear()
                delta = self._request.stream.take(self._request)
                if delta is not None:
                    self._is_open = not delta.finished
                    return delta
        except BaseException:  # what ended the request, or the reader's cancellation
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort the request if it still runs. Does not wait; calling it again does nothing."""
        if self._is_open:
            self._is_open = False
            self._core.abort_nowait([self._request])

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class AsyncLLM:
    """Takes every field of ``EngineConfig``, as ``LLM`` does, and raises what it raises.

    The constructor blocks while the model loads; on a running loop use ``await create(…)``. Use it
    as an asynchronous context manager, or ``await close()``.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._llm = LLM(model, **settings)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="kv-tokenize")

    @classmethod
    async def create(cls, model: str = "demo", **settings: Any) -> "AsyncLLM":
        """Make one without blocking the loop. Cancelled, it is made and closed at exit."""
        return await asyncio.to_thread(cls, model, **settings)

    @property
    def max_model_len(self) -> int:
        return self._llm.max_model_len

    # ---- answers -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield what is new of the answer as it comes; the last delta says ``finished``.

        Each ``RequestOutput`` holds only the samples that got something, with their new text,
        tokens and logprobs. Closing the iterator, or cancelling the task that reads it, aborts the
        request. Whoever stops reading pauses it (``engine.stream``).
        """
        refuse_adapter(lora_request)
        stream = await self.open(prompt, sampling_params, request_id, cache_salt=cache_salt)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The next message of a conversation, as ``generate`` yields it."""
        refuse_adapter(lora_request)
        prompt = await self.read_messages(messages)
        deltas = self.generate(prompt, sampling_params, request_id, cache_salt=cache_salt)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    async def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncOutputStream:
        """Submit a request and return its stream. What is wrong with it is raised here."""
        news, loop = asyncio.Event(), asyncio.get_running_loop()
        stream = Stream(partial(_wake, loop, news), self._llm._core.look_again)
        request = await self._submit(prompt, sampling_params, request_id, cache_salt, stream)
        request.result.add_done_callback(lambda _: _wake(loop, news))
        return AsyncOutputStream(self._llm, request, news)

    async def answer(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The whole answer at once. Cancelled, it is aborted."""
        request = await self._submit(prompt, sampling_params, request_id, cache_salt, None)
        try:
            return await asyncio.shield(asyncio.wrap_future(request.result))
        except asyncio.CancelledError:
            self._llm._core.abort_nowait([request])
            raise

    async def abort(self, request_id: str) -> None:
        """End a request where it is; an unknown or finished one is passed over."""
        await self._call(lambda: self._llm._core.roster.abort_ids([request_id]))

    async def abort_all(self) -> None:
        """End every request where it is."""
        self._llm._core.abort_all_nowait()
        await self._call(lambda: None)

    async def read(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return await self._tokenize(lambda: self._llm._reader.read(prompt)[1])

    async def read_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's next message begins."""
        return await self._tokenize(lambda: self._llm._reader.read_messages(messages))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        tokenizer = self._llm._reader.need_tokenizer("text")
        self._llm._requests.check_vocabulary(token_ids)
        return await self._tokenize(
            lambda: str(tokenizer.decode(token_ids, skip_special_tokens=True))
        )

    # ---- the engine ----------------------------------------------------------------------------

    async def stats(self) -> StoreStats:
        """A frozen snapshot of the cache; reading it changes nothing."""
        return await self._call(lambda: self._llm._core.store.stats())

    async def metrics_text(self) -> str:
        """The same numbers, and those of the queue, as Prometheus text."""
        core = self._llm._core
        stats, queue = await self._call(lambda: (core.store.stats(), core.roster.stats()))
        return render(stats) + render_queue(queue)

    async def reset_prefix_cache(
        self, tier: str | None = None, *, cache_salt: str | None = None
    ) -> int:
        """As ``LLM.reset_prefix_cache``."""
        return await asyncio.to_thread(self._llm.reset_prefix_cache, tier, cache_salt=cache_salt)

    async def check_health(self) -> None:
        """Raises ``StoreClosedError`` when the engine is closed or has failed."""
        self._llm._core.check_running()

    @property
    def is_running(self) -> bool:
        return not self._llm.is_closed

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model."""
        return self._llm.get_tokenizer()

    async def close(self, flush_s: float | None = None) -> None:
        """Abort running requests, write what is dirty within ``flush_s`` seconds, free memory."""
        await asyncio.to_thread(self._llm.close, flush_s)
        self._tokenizing.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- inside --------------------------------------------------------------------------------

    async def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        cache_salt: str | None,
        stream: Stream | None,
    ) -> Request:
        """A request that the step thread has taken."""
        llm, cache = self._llm, CacheOptions.of(salt_of(prompt, cache_salt))

        def make() -> Request:
            text, token_ids = llm._reader.read(prompt)
            return llm._requests.make(
                text,
                token_ids,
                params or SamplingParams(),
                cache,
                request_id=request_id,
                stream=stream,
            )

        request = await self._tokenize(make)
        llm._core.submit_nowait(request)
        try:
            await self._call(lambda: None)  # behind the request
        except BaseException:
            llm._core.abort_nowait([request])
            raise
        if request.result.done() and request.result.exception() is not None:
            request.result.result()
        return request

    async def _tokenize(self, function: Callable[[], T]) -> T:
        self._llm._core.check_running()  # else what runs the function may be gone
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run on the step thread, between steps. Cancelled, it runs all the same."""
        return await asyncio.shield(asyncio.wrap_future(self._llm._core.post(function)))


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
        loop.call_soon_threadsafe(news.set)
