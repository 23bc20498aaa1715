"""What requests took and what became of them: counts and histograms since the engine was made."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from engine.outputs import RequestMetrics
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from kvstore.block import TierName
from kvstore.reports.histogram import BOUNDS_S, Histogram, HistogramStats

FINISH_REASONS = ("stop", "length", "abort", "error")

# A long document or answer takes minutes, a token of a small model less than a millisecond.
_REQUEST_BOUNDS_S = (*BOUNDS_S, 120.0, 300.0, 600.0)
_TOKEN_BOUNDS_S = (0.0001, 0.00025, 0.0005, *BOUNDS_S[:-3])


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A snapshot. Of a document that is read ahead of its questions the prompt's tokens and times
    count; it has no answer.

    prompt_tokens         of requests whose prompt has been computed or found, samples apart
    cached_tokens         of them, found, by the fastest tier that held them
    generated_tokens      sampled, of all samples
    finished_requests     by why their answer ended: "abort" where any of their samples was aborted,
                          "length" where any was cut, else "stop"; "error" where there is none
    first_token_seconds   from arrival to the first token
    queue_seconds         of it, until the first sample ran, apart from waiting for slower tiers
    prefill_seconds       of it, from the start of the first prefill step to the end of the last
    output_token_seconds  from one token of a sample to its next one, on average, once a sample
    total_seconds         from arrival to the end
    """

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    generated_tokens: int
    finished_requests: Mapping[str, int]
    first_token_seconds: HistogramStats
    queue_seconds: HistogramStats
    prefill_seconds: HistogramStats
    output_token_seconds: HistogramStats
    total_seconds: HistogramStats


class RequestMeter:
    """Step thread. What it does a step is one addition."""

    def __init__(self) -> None:
        self._prompt_tokens = self._generated_tokens = 0
        self._cached_tokens: Counter[str] = Counter({tier.value: 0 for tier in TierName})
        self._finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._first_token, self._queue = Histogram(_REQUEST_BOUNDS_S), Histogram(_REQUEST_BOUNDS_S)
        self._prefill, self._total = Histogram(_REQUEST_BOUNDS_S), Histogram(_REQUEST_BOUNDS_S)
        self._output_token = Histogram(_TOKEN_BOUNDS_S)

    def generate(self, num_tokens: int) -> None:
        self._generated_tokens += num_tokens

    def read(self, metrics: RequestMetrics, *, has_token: bool) -> None:
        """A request's prompt has been computed, and with ``has_token`` the first token sampled."""
        self._prompt_tokens += metrics.computed_tokens + sum(metrics.cached_tokens.values())
        self._cached_tokens.update(metrics.cached_tokens)
        self._queue.observe(metrics.queue_s)
        self._prefill.observe(metrics.prefill_s)
        if has_token:
            self._first_token.observe(metrics.ttft_s)

    def finish_sample(self, sequence: Sequence) -> None:
        times, num_more = sequence.times, len(sequence.token_ids) - sequence.num_prompt - 1
        if num_more > 0:
            self._output_token.observe((times.finished_at - times.first_token_at) / num_more)

    def finish(self, request: Request) -> None:
        """All its samples have ended."""
        reasons = {each.finish_reason for each in request.sequences}
        for reason in ("abort", "length", "stop"):
            if reason in reasons:
                self._finished[reason] += 1
                self._total.observe(request.metrics().total_s)
                return

    def fail(self) -> None:
        """A request ends with an error."""
        self._finished["error"] += 1

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=dict(self._cached_tokens),
            generated_tokens=self._generated_tokens,
            finished_requests=dict(self._finished),
            first_token_seconds=self._first_token.stats(),
            queue_seconds=self._queue.stats(),
            prefill_seconds=self._prefill.stats(),
            output_token_seconds=self._output_token.stats(),
            total_seconds=self._total.stats(),
        )
