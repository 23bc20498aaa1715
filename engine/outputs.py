"""What comes back from a request: names as in vLLM, plus a breakdown by tier and by phase."""

from dataclasses import dataclass

from kvstore.costs.cost import LoadDecision


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position, by the model's own distribution.

    rank   1 for the most likely token
    """

    logprob: float
    decoded_token: str
    rank: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a prompt.

    finish_reason   "stop", "length" or "abort"; None while it runs
    stop_reason     the stop string or stop token that ended it; None for the model's own end
    logprobs        one mapping a token, the sampled one and the most likely ones; None unless asked
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Of all its tokens together; None unless logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(
            named[token_id].logprob
            for token_id, named in zip(self.token_ids, self.logprobs, strict=True)
        )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time and tokens went. Times in seconds.

    ttft_s           from arrival to the first sampled token, queue and promotion included
    queue_s          waiting for admission, apart from promotion
    promote_s        waiting for the disk probe and for blocks on their way to the device
    prefill_s        from the start of the first prefill step to the end of the last one
    decode_s         from the first sampled token to the last
    total_s          from arrival to the end
    computed_tokens  prompt tokens that the model computed
    cached_tokens    prompt tokens that were found, by the fastest tier that held them; together
                     with computed_tokens they add up to the prompt
    load_decision    how much of what slower tiers hold was loaded, and the estimates behind it;
                     None when the request ended before that was decided
    """

    ttft_s: float
    queue_s: float
    promote_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    computed_tokens: int
    cached_tokens: dict[str, int]
    load_decision: LoadDecision | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt.

    prompt_logprobs   None for the first token, and one mapping for each other one, as in
                      ``CompletionOutput.logprobs``; None unless asked
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.metrics.cached_tokens.values())
