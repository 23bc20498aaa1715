"""An answer under way: waited for, ended early, or continued in another direction."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from engine.outputs import RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions
from engine.stream import OutputStream, Stream
from kvstore.config import check_seconds
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from engine.llm import LLM


class Generation:
    """Made by ``LLM.start`` and by ``fork``. Methods may be called from any thread.

    Made with ``stream``, it is iterated over once: what is new each time, as of
    ``LLM.generate(stream=True)``. Whoever leaves the loop early aborts it, and so does the end of a
    ``with`` block, made with ``stream`` or without.

    A branch of an answer costs what is new in it: what both have in common is computed once.
    """

    def __init__(self, llm: "LLM", request: Request, cache: CacheOptions) -> None:
        self._llm = llm
        self._request = request
        self._cache = cache
        self._is_read = False

    def __iter__(self) -> Iterator[RequestOutput]:
        with OutputStream(self._llm._core, self._to_read()) as deltas:
            yield from deltas

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        """A stream that nobody can read any more would pause, and hold its place, for ever. One
        that is being read is its reader's to end."""
        with contextlib.suppress(Exception):
            if self._request.stream is not None and not self._is_read:
                self._llm._core.abort_nowait([self._request])

    def __repr__(self) -> str:
        sample = self._request.sequences[0]
        state = sample.finish_reason or sample.state.name.lower()
        num_tokens = len(sample.token_ids) - sample.num_prompt
        return f"Generation(request_id={self.request_id!r}, num_tokens={num_tokens}, {state})"

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def is_finished(self) -> bool:
        return self._request.result.done()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the answer. Raises ``TimeoutError`` after ``timeout`` seconds, and what ended
        the request if that was an error. Whether a stream of it is read makes no difference."""
        check_seconds("timeout", timeout, may_be_zero=True)
        self._run_ahead()
        try:
            return self._request.result.result(timeout)
        except TimeoutError:
            if self.is_finished:
                raise
            raise TimeoutError(
                f"no answer within {timeout} s: it goes on; wait longer, or abort() it"
            ) from None

    def so_far(self) -> RequestOutput:
        """What there is of the answer now."""
        if self.is_finished:
            return self.result()
        return self._llm._core.call(self._request.output)

    def abort(self) -> None:
        """End it where it is; its result has ``finish_reason`` "abort"."""
        self._llm._core.abort([self._request])

    def fork(
        self,
        sampling_params: SamplingParams | None = None,
        *,
        append: str | Tokens[int] | None = None,
        index: int = 0,
        request_id: str | None = None,
        stream: bool = False,
    ) -> "Generation":
        """Another answer that goes on from where sample ``index`` is now, finished or not.

        Its prompt is all of the sample's tokens, prompt and answer, and ``append``, text or token
        ids, behind them. Without ``sampling_params`` it has those of this one, but one sample and
        no seed, which would draw the same tokens in every branch. Blocks of a running sample are
        shared as they are, the last one copied; of a finished one, the cache has those that are
        full. This one goes on unchanged.

        Raises ``ConfigError`` when that is longer than the model's context, ``QueueFullError`` when
        too many requests wait.
        """
        request = self._request
        if index not in range(len(request.sequences)):
            raise ConfigError(
                f"index: expected a sample in [0, {len(request.sequences)}), got {index!r}"
            )
        params = sampling_params or replace(
            request.params, n=1, seed=None, prompt_logprobs=None, truncate_prompt_tokens=None
        )
        reader = self._llm._reader
        more = reader.encode(append) if isinstance(append, str) else reader.read(append or [])[1]

        def make(token_ids: list[int]) -> Request:
            return self._llm._requests.make(
                None,
                [*token_ids, *more],
                params,
                self._cache,
                request_id=request_id,
                stream=Stream() if stream else None,
            )

        return Generation(self._llm, self._llm._core.fork(request, index, make), self._cache)

    def _run_ahead(self) -> None:
        if self._request.stream is not None:
            self._request.stream.run_ahead(self._llm._core.look_again)

    def _to_read(self) -> list[Request]:
        """What a stream is made of, once."""
        if self._request.stream is None:
            raise ConfigError("stream: this generation was made without; wait for its result()")
        if self._is_read:
            raise ConfigError("this generation has been read; its result() has all of it")
        self._is_read = True
        return [self._request]
