"""A request on its way through the engine: one prompt and its samples."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.outputs import Logprob, RequestMetrics, RequestOutput
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.sequence import Sequence, SequenceState
from engine.stream import Stream
from kvstore.block import TierName


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. The step thread sets ``result``; a prefill request samples nothing.

    stream   where what each step adds is put, None for a request that is only awaited
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float
    sequences: list[Sequence]
    stream: Stream | None = None
    result: "Future[RequestOutput]" = field(default_factory=Future)

    @property
    def is_finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompt and of all samples at their longest."""
        num_prompt = len(self.prompt_token_ids)
        return num_prompt + sum(each.max_len - num_prompt for each in self.sequences)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[each.output() for each in self.sequences if not each.prefill_only],
            finished=self.is_finished,
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs,
        )

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """None as well while some are missing: another sample may be ahead of the first."""
        first = self.sequences[0]
        return first.prompt_logprobs if first.is_scored else None

    def metrics(self, now: float = 0.0) -> RequestMetrics:
        """Times and counts of the first sample: the prompt counts once.

        ``now`` stands for the end of samples that still run."""
        first = self.sequences[0]
        times, arrival = first.times, self.arrival_s
        end = max(sequence.times.finished_at or now for sequence in self.sequences)
        cached = {tier.value: (first.cached_tokens or {}).get(tier, 0) for tier in TierName}
        return RequestMetrics(
            ttft_s=max(0.0, times.first_token_at - arrival),
            queue_s=max(0.0, times.running_at - arrival - times.first_promote_s),
            promote_s=times.promote_s,
            prefill_s=max(0.0, times.prefilled_at - times.prefill_at) if times.prefill_at else 0.0,
            decode_s=max(0.0, end - times.first_token_at) if times.first_token_at else 0.0,
            total_s=max(0.0, end - arrival),
            computed_tokens=len(self.prompt_token_ids) - sum(cached.values()),
            cached_tokens=cached,
            load_decision=first.load_decision,
        )
