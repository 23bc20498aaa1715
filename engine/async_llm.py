"""``AsyncLLM``: the front for event loops, over the same engine as ``LLM``.

Nothing here blocks the loop: prompts are tokenised on a thread of their own, and requests are
posted to the step thread, which wakes the loop when there is something to read. Documents, sessions
and generations are those of ``LLM``: their requests are awaited here, and what they do with the
cache waits in a thread meanwhile.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from engine.async_document import AsyncDocument
from engine.async_generation import AsyncGeneration
from engine.async_session import AsyncSession
from engine.async_stream import AsyncOutputStream
from engine.config import EngineConfig
from engine.generation import Generation
from engine.llm import LLM
from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.queue_stats import QueueStats, render_queue
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions
from engine.text.prompts import Message, Prompt, are_messages, is_cut, refuse_adapter, salt_of
from kvstore.reports.metrics import render
from kvstore.stats import StoreStats
from kvstore.why.explanation import Explanation

T = TypeVar("T")

MakeRequests = Callable[[], list[Request]]

_MOST_WAITING = 16  # calls that do something with the cache; more of them wait for these


class AsyncLLM:
    """Takes every field of ``EngineConfig``, as ``LLM`` does, and raises what it raises.

    The constructor blocks while the model loads; on a running loop use ``await create(…)``. Use it
    as an asynchronous context manager, or ``await close()``.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self._llm = LLM(model, **settings)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="kv-tokenize")
        self._waiting = ThreadPoolExecutor(_MOST_WAITING, thread_name_prefix="kv-wait")

    @classmethod
    async def create(cls, model: str = "demo", **settings: Any) -> "AsyncLLM":
        """Make one without blocking the loop. Cancelled, it is made and closed at exit."""
        return await asyncio.to_thread(cls, model, **settings)

    @property
    def max_model_len(self) -> int:
        return self._llm.max_model_len

    @property
    def config(self) -> EngineConfig:
        return self._llm.config

    # ---- answers -------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> AsyncOutputStream:
        """Yield what is new of the answer as it comes; the last delta says ``finished``.

        Each ``RequestOutput`` holds only the samples that got something, with their new text,
        tokens and logprobs. Closing the iterator, or cancelling the task that reads it, aborts the
        request. Whoever stops reading pauses it (``engine.stream``).
        """
        refuse_adapter(lora_request)
        cache = CacheOptions.of(salt_of(prompt, cache_salt))
        return self._stream(
            lambda: [self._request(prompt, sampling_params, request_id, cache, True)]
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> AsyncOutputStream:
        """The next message of a conversation, as ``generate`` yields it."""
        refuse_adapter(lora_request)
        cache = CacheOptions.of(cache_salt)

        def make() -> list[Request]:
            prompt = self._llm._reader.read_messages(messages, is_cut=is_cut(sampling_params))
            return [self._request(prompt, sampling_params, request_id, cache, True)]

        return self._stream(make)

    async def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncOutputStream:
        """As ``generate``, submitted when this returns. What is wrong with it is raised here."""
        stream = self.generate(prompt, sampling_params, request_id, cache_salt=cache_salt)
        return await stream.open()

    async def answer(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """The whole answer at once, to a prompt or to messages. Cancelled, it is aborted."""
        given: Any = prompt
        cache = CacheOptions.of(salt_of(given, cache_salt))

        def make() -> list[Request]:
            asked = given
            if are_messages(given):
                asked = self._llm._reader.read_messages(given, is_cut=is_cut(sampling_params))
            return [self._request(asked, sampling_params, request_id, cache, False)]

        (output,) = await self._run(make)
        return output

    async def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
    ) -> AsyncGeneration:
        """As ``LLM.start``: an answer under way, which can be awaited, aborted and forked."""
        salt = salt_of(prompt, cache_salt)
        cache = CacheOptions.of(salt, cache_priority, cache_priority_ttl_s)
        (request,) = await self._submit(
            lambda: [self._request(prompt, sampling_params, request_id, cache, stream)]
        )
        return AsyncGeneration(self, Generation(self._llm, request, cache))

    async def session(
        self,
        system: str | None = None,
        *,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
    ) -> AsyncSession:
        """As ``LLM.session``: a chat whose every turn reuses everything before it."""
        session = await self._tokenize(
            lambda: self._llm.session(
                system,
                cache_salt=cache_salt,
                cache_priority=cache_priority,
                cache_priority_ttl_s=cache_priority_ttl_s,
            )
        )
        return AsyncSession(self, session)

    async def document(
        self,
        text_or_path: str | os.PathLike[str] | Sequence[Message],
        *,
        pin: bool = False,
        persist: bool = False,
        ttl: float | None = None,
        prefill: bool = True,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
    ) -> AsyncDocument:
        """As ``LLM.document``: read when this returns, unless ``prefill`` is off."""
        document = AsyncDocument(
            self,
            await self._tokenize(
                lambda: self._llm.document(
                    text_or_path,
                    prefill=False,
                    cache_salt=cache_salt,
                    cache_priority=cache_priority,
                    cache_priority_ttl_s=cache_priority_ttl_s,
                )
            ),
        )
        if pin or persist or ttl is not None:
            await document.pin(persist=persist, ttl=ttl)
        elif prefill:
            await document.prefill()
        return document

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests where they are; unknown and finished ones are passed over."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda: self._llm._core.roster.abort_ids(request_ids))

    async def abort_all(self) -> None:
        """End every request where it is."""
        self._llm._core.abort_all_nowait()
        await self._call(lambda: None)

    async def read(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> list[int]:
        """Token ids of a prompt for these parameters, what they will cut included."""
        cut = is_cut(sampling_params)
        return await self._tokenize(lambda: self._llm._reader.read(prompt, is_cut=cut)[1])

    async def read_messages(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> list[int]:
        """The same of a conversation, up to where the model's next message begins."""
        cut = is_cut(sampling_params)
        return await self._tokenize(lambda: self._llm._reader.read_messages(messages, is_cut=cut))

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

    async def queue_stats(self) -> QueueStats:
        """A frozen snapshot of how many requests wait, run, and were refused."""
        return await self._call(self._llm._core.roster.stats)

    async def metrics_text(self) -> str:
        """The same numbers, and those of the queue, as Prometheus text."""
        core = self._llm._core
        stats, queue = await self._call(lambda: (core.store.stats(), core.roster.stats()))
        return render(stats) + render_queue(queue)

    async def reset_prefix_cache(
        self, tier: str | None = None, *, cache_salt: str | None = None
    ) -> int:
        """As ``LLM.reset_prefix_cache``."""
        return await self._in_thread(
            lambda: self._llm.reset_prefix_cache(tier, cache_salt=cache_salt)
        )

    async def explain(self, prompt: Prompt, *, cache_salt: str | None = None) -> Explanation:
        """As ``LLM.explain``: where the match of a prompt would end now, and why."""
        return await self._in_thread(lambda: self._llm.explain(prompt, cache_salt=cache_salt))

    async def flush(self) -> None:
        """Wait until disk holds every cached block."""
        await self._in_thread(self._llm.flush)

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
        self._waiting.shutdown(wait=False)

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"

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

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        cache: CacheOptions,
        is_streamed: bool,
    ) -> Request:
        return self._llm._requests.of_prompt(
            prompt,
            params or SamplingParams(),
            cache,
            request_id=request_id,
            is_streamed=is_streamed,
        )

    def _stream(self, make: MakeRequests, *, is_held: bool = False) -> AsyncOutputStream:
        return AsyncOutputStream(self._llm._core, lambda: self._submit(make, is_held=is_held))

    async def _run(self, make: MakeRequests, *, is_held: bool = False) -> list[RequestOutput]:
        """Submit and wait. Any exception here aborts what is still running."""
        requests = await self._submit(make, is_held=is_held)
        results = [asyncio.wrap_future(request.result) for request in requests]
        try:
            return await asyncio.gather(*map(asyncio.shield, results))
        except BaseException:
            self._llm._core.abort_nowait(requests)
            raise

    async def _submit(self, make: MakeRequests, *, is_held: bool = False) -> list[Request]:
        """Requests that the step thread has taken. With ``is_held`` those that find no room wait
        for it, and else are refused."""
        core = self._llm._core
        requests = await self._tokenize(make)
        try:
            for request in requests:
                (core.submit if is_held else core.submit_nowait)(request)
            await self._call(lambda: None)  # behind them
            for request in requests:
                if request.result.done():
                    request.result.result()
        except BaseException:
            core.abort_nowait(requests)
            raise
        return requests

    async def _tokenize(self, function: Callable[[], T]) -> T:
        self._llm._core.check_running()  # else what runs the function may be gone
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run on the step thread, between steps. Cancelled, it runs all the same."""
        return await asyncio.shield(asyncio.wrap_future(self._llm._core.post(function)))

    async def _in_thread(
        self, function: Callable[[], T], undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """Run what blocks, elsewhere. Cancelled, it goes on; ``undo`` is called with what comes of
        it, which nobody has then."""
        self._llm._core.check_running()  # else what runs the function may be gone
        work = self._waiting.submit(function)
        try:
            return await asyncio.shield(asyncio.wrap_future(work))
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: work.exception() or undo(work.result()))
            raise
