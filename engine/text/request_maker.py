"""Requests, checked against the model before the step thread sees them."""

import itertools
import threading
import time
from collections.abc import Sequence as Tokens

from engine.model.loader import LoadedModel
from engine.sampling.sampler import make_generator
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.request import Request
from engine.scheduling.sequence import CacheOptions, Sequence
from engine.stream import Stream
from engine.text.detokenizer import Detokenizer
from engine.text.prompts import Prompt, PromptReader, is_cut
from kvstore.errors import ConfigError


class RequestMaker:
    """Makes the requests of one engine. Any thread.

    seed   of requests that bring none of their own: of each sample that is drawn, one more than of
           the one before
    """

    def __init__(self, loaded: LoadedModel, reader: PromptReader, seed: int) -> None:
        self._loaded = loaded
        self._reader = reader
        self._next_seed = seed
        self._seeding = threading.Lock()
        self._numbers = itertools.count()

    def of_prompt(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache: CacheOptions,
        *,
        request_id: str | None = None,
        is_streamed: bool = False,
    ) -> Request:
        """The request of what a caller gave. Raises ``ConfigError`` for what is wrong with it."""
        text, token_ids = self._reader.read(prompt, is_cut=is_cut(params))
        return self.make(
            text,
            token_ids,
            params,
            cache,
            request_id=request_id,
            stream=Stream() if is_streamed else None,
        )

    def make(
        self,
        text: str | None,
        token_ids: Tokens[int],
        params: SamplingParams,
        cache: CacheOptions,
        *,
        prefill_only: bool = False,
        request_id: str | None = None,
        stream: Stream | None = None,
    ) -> Request:
        """Raises ``ConfigError`` for a prompt or parameters that the model cannot take."""
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling_params: expected SamplingParams, got {params!r}")
        if not isinstance(request_id, str | None):
            raise ConfigError(f"request_id: expected text, got {request_id!r}")
        limit = self._loaded.max_model_len - (0 if prefill_only else 1)
        if params.truncate_prompt_tokens is not None:
            kept = params.truncate_prompt_tokens
            token_ids = token_ids[-(limit if kept == -1 else kept) :]
        self._check(token_ids, limit)
        self._check_token_ids(params)
        bad_words = self._bad_words(params)
        request_id = str(next(self._numbers)) if request_id is None else request_id
        most = self._loaded.max_model_len if params.max_tokens is None else params.max_tokens
        seed = self._first_seed(params)
        wants_prompt = params.prompt_logprobs is not None and not prefill_only
        samples = [
            Sequence(
                request_id=request_id,
                index=index,
                params=params,
                cache=cache,
                token_ids=list(token_ids),
                num_prompt=len(token_ids),
                max_len=min(len(token_ids) + most, self._loaded.max_model_len),
                eos_token_ids=frozenset(self._loaded.eos_token_ids),
                detokenizer=self._detokenizer(token_ids, params),
                generator=None if params.is_greedy else make_generator(seed + index),
                prefill_only=prefill_only,
                bad_words=bad_words,
                prompt_logprobs=[None] if index == 0 and wants_prompt else None,
                stream=stream,
            )
            for index in range(1 if prefill_only else params.n)
        ]
        samples[0].others = samples[1:]
        arrival_s = time.monotonic()
        return Request(request_id, text, list(token_ids), params, arrival_s, samples, stream)

    def _first_seed(self, params: SamplingParams) -> int:
        """Of its samples, each of which has one more than the one before."""
        if params.seed is not None:
            return params.seed
        with self._seeding:
            seed = self._next_seed
            self._next_seed += 0 if params.is_greedy else params.n
        return seed

    def _check(self, token_ids: Tokens[int], limit: int) -> None:
        if not token_ids:
            raise ConfigError("the prompt is empty: it has no tokens")
        if len(token_ids) > limit:
            raise ConfigError(
                f"the prompt has {len(token_ids)} tokens and the model takes {limit} beside its "
                f"answer: cut {len(token_ids) - limit}"
            )
        self.check_vocabulary(token_ids)

    def check_vocabulary(self, token_ids: Tokens[int]) -> None:
        """Raises ``ConfigError`` for a token that the model does not have."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._loaded.vocab_size:
            raise ConfigError(
                f"prompt token ids: expected integers in [0, {self._loaded.vocab_size})"
            )

    def _check_token_ids(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            given = getattr(params, name) or ()
            if given and max(given) >= self._loaded.vocab_size:
                raise ConfigError(
                    f"{name}: expected token ids in [0, {self._loaded.vocab_size}), "
                    f"got {max(given)}"
                )

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each text as it is written at a start and, if that is as many tokens, behind a space."""
        found: list[tuple[int, ...]] = []
        for text in params.bad_words or ():
            self._reader.need_tokenizer("bad_words=")
            plain, spaced = (
                tuple(self._reader.encode(start + text.lstrip(), is_template=True))
                for start in ("", " ")
            )
            found.append(plain)
            if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(word for word in found if word)

    def _detokenizer(self, token_ids: Tokens[int], params: SamplingParams) -> Detokenizer | None:
        if self._reader.tokenizer is None:
            if params.stop_strings:
                self._reader.need_tokenizer("stop=")
            return None
        if not params.detokenize:
            return None
        return Detokenizer(
            self._reader.tokenizer,
            token_ids,
            params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
        )
