"""One sample of one prompt while it is being computed: its tokens, its blocks, its times."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from engine.outputs import CompletionOutput, Logprob
from engine.sampling.sampler import SampledToken, SampleRequest, score
from engine.sampling.sampling_params import SamplingParams
from engine.stream import Stream
from engine.text.detokenizer import Detokenizer
from kvstore.block import TierName
from kvstore.config import check_seconds
from kvstore.costs.cost import LoadDecision
from kvstore.errors import ConfigError
from kvstore.hashing import encode_tokens
from kvstore.lease import Lease, Lookup


def check_salt(salt: object) -> None:
    """Raises ``ConfigError`` for what cannot be hashed into block keys."""
    try:
        is_text = isinstance(salt, str) and salt.encode() is not None
    except UnicodeEncodeError:  # a lone surrogate
        is_text = False
    if not is_text:
        raise ConfigError(f"cache_salt: expected text, got {salt!r}")


class SequenceState(Enum):
    WAITING = auto()  # for its turn, for room, or for another sequence that computes its prefix
    PROBING = auto()  # disk is asked for the rest of its prefix
    PROMOTING = auto()  # blocks of its prefix are on their way to the device
    RUNNING = auto()
    PAUSED = auto()  # its reader is far behind
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How a request's blocks are kept.

    salt            requests with different salts never share blocks
    priority        blocks of a lower priority are evicted first; 0 is ordinary
    priority_ttl_s  for so long; None: as long as they stay on the device
    """

    salt: str = ""
    priority: int = 0
    priority_ttl_s: float | None = None

    @classmethod
    def of(
        cls, salt: str | None, priority: int = 0, priority_ttl_s: float | None = None
    ) -> "CacheOptions":
        """From the arguments of ``LLM``'s methods, where no salt is None."""
        return cls("" if salt is None else salt, priority, priority_ttl_s)

    def __post_init__(self) -> None:
        """Checked here, in the caller's thread: the step thread must be able to rely on it."""
        check_salt(self.salt)
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ConfigError(f"cache_priority: expected an integer, got {self.priority!r}")
        if self.priority_ttl_s != math.inf:
            check_seconds("cache_priority_ttl_s", self.priority_ttl_s)


@dataclass(slots=True)
class SequenceTimes:
    """Clock times in seconds; 0.0 for what has not happened.

    promote_s        that it waited for tiers, so far
    first_promote_s  of it, before it ran first
    """

    promote_s: float = 0.0
    first_promote_s: float = 0.0
    promote_since: float = 0.0
    queued_at: float = 0.0
    running_at: float = 0.0
    prefill_at: float = 0.0
    prefilled_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0

    def begin_promoting(self, now: float) -> None:
        """It waits for an answer from disk, or for blocks on their way."""
        self.promote_since = now

    def end_promoting(self, now: float) -> None:
        self.promote_s += now - self.promote_since

    def begin_running(self, now: float) -> None:
        """For the first time."""
        self.running_at, self.first_promote_s = now, self.promote_s

    def late_at(self, deadline_s: float | None) -> float:
        """When it has waited for tiers so long, all its waits together; infinity for None."""
        return math.inf if deadline_s is None else self.promote_since - self.promote_s + deadline_s


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the step thread.

    token_ids      prompt and output
    num_prompt     of them, the prompt
    num_computed   of them, those whose K and V lie in the lease's blocks
    lookup, lease  what it has of the store; None before, and again after a preemption
    cached_tokens  of the prompt, by tier, as first matched
    load_decision  what of it was to be loaded, and why
    prefill_only   computes its tokens and samples none
    bad_words      token ids of what its output must not contain
    prompt_logprobs
                   of the prompt's tokens so far, None for the first; None where nobody asked
    others         samples of the same prompt that begin where its prompt ends
    arrival        its place in the order of arrival, -1 before it has one
    num_announced  keys at the front of its lookup of which nobody waits for this sequence any more
    stream         of its request, where what it adds is put
    num_delivered  output tokens that were put there
    """

    request_id: str
    index: int
    params: SamplingParams
    cache: CacheOptions
    token_ids: list[int]
    num_prompt: int
    max_len: int
    eos_token_ids: frozenset[int]
    detokenizer: Detokenizer | None
    generator: torch.Generator | None
    prefill_only: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    others: "list[Sequence]" = field(default_factory=list)
    stream: Stream | None = None
    state: SequenceState = SequenceState.WAITING
    lookup: Lookup | None = None
    lease: Lease | None = None
    num_computed: int = 0
    cached_tokens: dict[TierName, int] | None = None
    load_decision: LoadDecision | None = None
    times: SequenceTimes = field(default_factory=SequenceTimes)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    token_bytes: bytearray = field(default_factory=bytearray)
    num_delivered: int = 0
    arrival: int = -1
    num_announced: int = 0

    def __post_init__(self) -> None:
        self.token_bytes += encode_tokens(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_reusable(self) -> int:
        """Tokens at its front whose logits nobody wants: blocks from the cache will do."""
        if self.is_scored:
            return len(self.token_ids) - (not self.prefill_only)
        assert self.prompt_logprobs is not None
        return len(self.prompt_logprobs) - 1

    @property
    def is_scored(self) -> bool:
        """Whether no log-probability of its prompt is wanted any more."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) == self.num_prompt

    def sample_request(self) -> SampleRequest:
        params = self.params
        if not params.edits_logits:
            return SampleRequest(params, self.generator, self.token_ids)
        ending = [*(params.stop_token_ids or ()), *self.eos_token_ids]
        return SampleRequest(
            params, self.generator, self.token_ids, self.num_prompt, ending, self.bad_words
        )

    def score_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Take the logits [n, vocab_size] behind its tokens from position ``start`` on."""
        if self.is_scored:
            return
        assert self.prompt_logprobs is not None
        first = len(self.prompt_logprobs)  # token whose logits come next
        assert start < first, "logits that were wanted have been skipped"
        rows = logits[first - 1 - start : self.num_prompt - 1 - start]
        known = self.token_ids[first : first + len(rows)]
        if known:
            scored = score(rows, known, self.params.prompt_logprobs or 0)
            self.prompt_logprobs += map(self._named_logprobs, scored)

    def append(self, token: SampledToken) -> None:
        """Take a sampled token and decide whether it was the last.

        A token that ends the answer is one of its tokens, and in its text only if asked for."""
        self.token_ids.append(token.token_id)
        self.token_bytes += token.token_id.to_bytes(4, "little")
        if self.params.logprobs is not None:
            self.logprobs.append(self._named_logprobs(token))
        is_eos = token.token_id in self.eos_token_ids and not self.params.ignore_eos
        is_stop = token.token_id in (self.params.stop_token_ids or ())
        is_end, is_longest = is_eos or is_stop, len(self.token_ids) >= self.max_len
        stop_string = None
        if self.detokenizer is not None:
            may_stop = len(self.token_ids) - self.num_prompt > self.params.min_tokens
            if self.params.include_stop_str_in_output or not is_end:
                stop_string = self.detokenizer.append(
                    token.token_id, may_stop=may_stop and not is_end
                )
            if stop_string is None and (is_end or is_longest):
                stop_string = self.detokenizer.finish(may_stop=may_stop)
        if stop_string is not None:  # the text is cut there, whatever token came with it
            self.finish_reason, self.stop_reason = "stop", stop_string
        elif is_end:
            self.finish_reason, self.stop_reason = "stop", None if is_eos else token.token_id
        elif is_longest:
            self.finish_reason = "length"

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer else "",
            token_ids=self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
        )

    @property
    def is_ahead(self) -> bool:
        """Whether its reader is to catch up before it goes on."""
        return self.stream is not None and self.stream.is_full

    def take_delta(self) -> CompletionOutput:
        """What was added since the last call. Text that may become a stop string stays back until
        it cannot, or the sample is finished."""
        start = self.num_delivered
        token_ids = self.token_ids[self.num_prompt + start :]
        self.num_delivered += len(token_ids)
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.take_delta(is_finished=self.finish_reason is not None)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs[start:] if self.params.logprobs is not None else None,
        )

    def _named_logprobs(self, token: SampledToken) -> dict[int, Logprob]:
        assert token.logprob is not None
        assert token.rank is not None
        name = self.detokenizer.token_text if self.detokenizer else str
        own = Logprob(token.logprob, name(token.token_id), token.rank)
        ranked = enumerate(token.top_logprobs, start=1)
        top = {token_id: Logprob(p, name(token_id), rank) for rank, (token_id, p) in ranked}
        return top | {token.token_id: own}
