"""One step: what is scheduled goes through the model, and tokens come out."""

from collections.abc import Sequence as Steps

import torch

from engine.runner.model_runner import ModelRunner, SequenceStep
from engine.sampling.sampler import SampledToken, sample
from engine.scheduling.scheduler import ScheduledSequence
from engine.scheduling.sequence import Sequence


def make_steps(batch: Steps[ScheduledSequence]) -> list[SequenceStep]:
    """What the runner is given, one step a scheduled sequence."""
    steps = []
    for each in batch:
        sequence, start = each.sequence, each.sequence.num_computed
        assert sequence.lease is not None
        ends = each.num_tokens == sequence.num_uncomputed
        steps.append(
            SequenceStep(
                token_ids=sequence.token_ids[start : start + each.num_tokens],
                num_prefix=start,
                block_ids=sequence.lease.block_ids,
                wants_logits=ends and not sequence.prefill_only,
                wants_all=not sequence.is_scored,
            )
        )
    return steps


def compute(
    runner: ModelRunner, batch: Steps[ScheduledSequence], steps: Steps[SequenceStep]
) -> dict[Sequence, SampledToken]:
    """The next tokens of the sequences that have no other tokens left to compute.

    The other samples of a prompt that ends here begin with a draw from the same logits: they are
    among the keys. Sequences that asked for it are told the log-probabilities of their prompt.
    """
    logits = _score_prompts(batch, steps, runner.execute(steps))
    ending = [each.sequence for each, step in zip(batch, steps, strict=True) if step.wants_logits]
    groups = [(each, *each.others) for each in ending]
    sequences = [each for group in groups for each in group]
    if not sequences:
        return {}
    if len(sequences) > len(groups):
        rows = [row for row, group in enumerate(groups) for _ in group]
        logits = logits[torch.tensor(rows, device=logits.device)]
    tokens = sample(logits, [each.sample_request() for each in sequences])
    return dict(zip(sequences, tokens, strict=True))


def _score_prompts(
    batch: Steps[ScheduledSequence], steps: Steps[SequenceStep], logits: torch.Tensor
) -> torch.Tensor:
    """Hand logits of prompt tokens to those that asked; returns the rows to choose from."""
    if not any(step.wants_all for step in steps):
        return logits
    sampled = []
    parts = torch.split(logits, [step.num_logits for step in steps])
    for each, step, rows in zip(batch, steps, parts, strict=True):
        if step.wants_all:
            each.sequence.score_prompt(step.num_prefix, rows)
        sampled.append(rows[-1:] if step.wants_logits else rows[:0])
    return torch.cat(sampled)
