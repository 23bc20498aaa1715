"""``LLM``: the blocking front of the engine, with vLLM's names."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from types import TracebackType
from typing import Any, Literal, overload

from engine.at_exit import close_at_exit, is_closed_now
from engine.config import EngineConfig
from engine.document import Document
from engine.explaining import explain_prompt
from engine.generation import Generation
from engine.model.loader import BeforeWeights, LoadedModel, load_model
from engine.outputs import RequestOutput
from engine.parts import build_core
from engine.preflight import check_cache_place
from engine.progress import answers_bar
from engine.resetting import reset_cache
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.queue_stats import QueueStats, render_queue
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions, check_salt
from engine.session import Session
from engine.stream import OutputStream
from engine.text.document_prompt import DocumentPrompt
from engine.text.prompts import (
    Message,
    Prompt,
    PromptReader,
    are_messages,
    as_params,
    as_prompts,
    is_cut,
    refuse_adapter,
    salt_of,
)
from engine.text.request_maker import RequestMaker
from kvstore.config import check_seconds
from kvstore.reports.events import Event
from kvstore.reports.metrics import render
from kvstore.stats import StoreStats
from kvstore.why.explanation import Explanation

_GLANCE_S = 0.2  # between two looks at what is under way


class LLM:
    """A language model with a tiered KV cache.

    Takes every field of ``EngineConfig`` as a keyword. Methods may be called from any thread; each
    blocks its caller until the answer is there. Use it as a context manager, or call ``close()``:
    that writes what disk does not hold yet.

    Raises ``ConfigError`` for a setting, model or cache directory that cannot be used, in one line
    that says what to change.

    ``before_weights`` is called with the tokenizer and the context length before the weights are
    loaded and a cache directory is made; what it raises ends the constructor.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        before_weights: BeforeWeights | None = None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        check_cache_place(self.config)
        self._loaded: LoadedModel = load_model(
            self.config.model,
            dtype=self.config.dtype,
            device=self.config.device,
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            tokenizer=self.config.tokenizer,
            revision=self.config.revision,
            trust_remote_code=self.config.trust_remote_code,
            attention_backend=self.config.attention_backend,
            deterministic=self.config.deterministic,
            skip_tokenizer_init=self.config.skip_tokenizer_init,
            before_weights=before_weights,
        )
        self.tokenizer = self._loaded.tokenizer
        self.max_model_len = self._loaded.max_model_len
        self._reader = PromptReader(self.tokenizer, self.max_model_len)
        self._requests = RequestMaker(self._loaded, self._reader, self.config.seed)
        self._core = build_core(self.config, self._loaded)
        close_at_exit(self._core)

    # ---- answers -------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: Literal[False] = False,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: Literal[True],
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
        lora_request: None = None,
    ) -> OutputStream: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: bool = False,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput] | OutputStream:
        """Answer prompts, all as one continuously batched set, in the order they were given.

        A prompt is text, a list of token ids, ``{"prompt": text}`` or ``{"prompt_token_ids":
        ids}``. ``sampling_params`` is one for all (default ``SamplingParams()``) or one each.
        Prompts with different ``cache_salt`` never share blocks; a dictionary may bring its own.
        Blocks of a lower ``cache_priority`` leave the device first; a priority ends after
        ``cache_priority_ttl_s``. Shows a progress bar on a terminal. After Ctrl-C the prompts of
        this call are aborted.

        With ``stream`` the answers come as an iterator of what is new (``engine.stream``); closing
        it aborts the rest.
        """
        many = as_prompts(prompts)
        params = as_params(sampling_params, len(many))
        refuse_adapter(lora_request)
        requests = [
            self._requests.of_prompt(
                prompt,
                each,
                CacheOptions.of(salt_of(prompt, cache_salt), cache_priority, cache_priority_ttl_s),
                is_streamed=stream,
            )
            for prompt, each in zip(many, params, strict=True)
        ]
        if stream:
            return self._stream(requests)
        return self._run(requests, show_progress=use_tqdm)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: Literal[False] = False,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: Literal[True],
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> OutputStream: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        stream: bool = False,
        cache_salt: str | None = None,
        lora_request: None = None,
    ) -> list[RequestOutput] | OutputStream:
        """Answer one conversation, or several, given as messages with role and content; with
        ``stream`` as ``generate`` does."""
        refuse_adapter(lora_request)
        is_one = isinstance(messages, str | Mapping) or are_messages(messages)
        conversations: Any = [messages] if is_one else messages
        params = as_params(sampling_params, len(conversations))
        prompts = [
            self._reader.read_messages(conversation, is_cut=is_cut(each))
            for conversation, each in zip(conversations, params, strict=True)
        ]
        if stream:
            return self.generate(prompts, params, stream=True, cache_salt=cache_salt)
        return self.generate(prompts, params, use_tqdm=use_tqdm, cache_salt=cache_salt)

    def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
    ) -> Generation:
        """Begin to answer one prompt and return at once, with what can be waited for, aborted and
        forked, and with ``stream`` read as it comes.

        Raises ``QueueFullError`` when too many requests wait, ``ConfigError`` for an id in use.
        """
        salt = salt_of(prompt, cache_salt)
        cache = CacheOptions.of(salt, cache_priority, cache_priority_ttl_s)
        request = self._requests.of_prompt(
            prompt,
            sampling_params or SamplingParams(),
            cache,
            request_id=request_id,
            is_streamed=stream,
        )
        self._core.submit_nowait(request)
        if request_id is not None:  # whether it is free is known behind the request
            self._core.call(lambda: None)
            if request.result.done():
                request.result.result()
        return Generation(self, request, cache)

    def session(
        self,
        system: str | None = None,
        *,
        cache_salt: str | None = None,
        cache_priority: int = 0,
        cache_priority_ttl_s: float | None = None,
    ) -> Session:
        """A chat of several turns, each of which reuses everything before it. ``system`` is its
        system message; None leaves that to the model's template."""
        cache = CacheOptions.of(cache_salt, cache_priority, cache_priority_ttl_s)
        return Session(self, system, cache)

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests where they are, with ``finish_reason`` "abort". Ids that are unknown, or of
        finished requests, are passed over."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._core.call(lambda: self._core.roster.abort_ids(request_ids))

    def document(
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
    ) -> Document:
        """A document to ask questions about. A ``str`` is its text, a path the file that holds it,
        messages a conversation to which each question is the user's next message.

        With ``prefill`` it is read now, unless the cache holds it, so that questions find it there;
        without, the first question reads it. With ``pin`` it is read and kept in memory until
        ``document.unpin()``; with ``persist`` or ``ttl`` (seconds) on disk, see ``Document.pin``.
        Raises ``ConfigError``, before anything is computed, when it is empty or does not fit the
        model's context.
        """
        prompt = DocumentPrompt.of(self._reader, text_or_path)
        cache = CacheOptions.of(cache_salt, cache_priority, cache_priority_ttl_s)
        document = Document(self, prompt, cache)
        if pin or persist or ttl is not None:
            document.pin(persist=persist, ttl=ttl)
        elif prefill:
            document.prefill()
        return document

    # ---- the cache -----------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A frozen snapshot of the cache; reading it changes nothing."""
        return self._core.call(lambda: self._core.store.stats())

    def metrics_text(self) -> str:
        """The same numbers, and those of the queue, as Prometheus text."""
        return render(self.stats()) + render_queue(self.queue_stats())

    def queue_stats(self) -> QueueStats:
        """A frozen snapshot of how many requests wait, run, and were refused."""
        return self._core.call(self._core.roster.stats)

    def subscribe(self, sink: Callable[[Sequence[Event]], None]) -> Callable[[], None]:
        """Hand ``sink`` what happens to blocks (``kvstore.reports.events``), in batches.

        It is called on the step thread and must not wait. Returns a function that ends it.
        """
        unsubscribe = self._core.call(lambda: self._core.store.events.subscribe(sink))
        return lambda: self._core.call(unsubscribe)

    def reset_prefix_cache(self, tier: str | None = None, *, cache_salt: str | None = None) -> int:
        """Forget this model's cached blocks of one salt, in one tier or in all of them.

        What is in use or pinned is skipped; returns how many copies were. With ``tier="device"`` or
        ``"host"`` only that tier's copies go: what disk does not hold yet is written first. Raises
        ``TierBrokenError`` when disk cannot be changed now, after what is in memory has gone.
        """
        return reset_cache(self._core, tier, cache_salt or "")

    def explain(self, prompt: Prompt, *, cache_salt: str | None = None) -> Explanation:
        """Where the match of a prompt would end now, and why (``kvstore.why.explain``).

        Nothing is computed, loaded or counted. ``print(llm.explain(text).sentence)``.
        """
        salt = salt_of(prompt, cache_salt) or ""
        check_salt(salt)
        _, token_ids = self._reader.read(prompt)
        return explain_prompt(self._core, self._loaded, self.config.disk_cache, token_ids, salt)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until disk holds every cached block; False when ``timeout`` seconds ran out."""
        store = self._core.store
        self._core.call(store.urge)
        return self._core.wait_for(lambda: store.is_clean, timeout)

    def check(self) -> list[str]:
        """Violated invariants of the cache, one sentence each; empty when all hold. O(blocks)."""
        return self._core.call(lambda: self._core.store.check())

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "running"
        return f"LLM(model={self.config.model!r}, max_model_len={self.max_model_len}, {state})"

    @property
    def is_closed(self) -> bool:
        return self._core.is_closed

    def close(self, timeout: float | None = None) -> None:
        """Abort running requests, write what is dirty within ``timeout`` seconds, free memory.

        Calling it again does nothing."""
        check_seconds("timeout", timeout, may_be_zero=True)
        is_closed_now(self._core)
        self._core.close(timeout)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- for the other fronts of this package --------------------------------------------------

    def _run(
        self,
        requests: Sequence[Request],
        *,
        show_progress: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[RequestOutput]:
        """Submit and wait, and call ``meanwhile`` a few times a second. Any exception here aborts
        what is still running."""
        results = [request.result for request in requests]
        try:
            for request in requests:
                self._core.submit(request)
            num_samples = sum(len(request.sequences) for request in requests)
            with answers_bar(num_samples, show_progress) as advance:
                while meanwhile is not None and wait(results, _GLANCE_S).not_done:
                    meanwhile()
                for result in as_completed(results):
                    advance(result.result())
        except BaseException:
            self._core.abort(requests)
            raise
        return [result.result() for result in results]

    def _stream(self, requests: Sequence[Request]) -> OutputStream:
        return OutputStream(self._core, requests).submit()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model."""
        return self._reader.need_tokenizer("get_tokenizer()")


LLM.__signature__ = inspect.signature(EngineConfig)  # type: ignore[attr-defined]
