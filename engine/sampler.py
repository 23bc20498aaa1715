"""From logits to tokens.

Order of the steps, as in vLLM: repetition penalty, temperature, min_p, top_k, top_p, draw. A draw
takes one uniform number of the request's own generator and inverts the cumulative distribution, so
a seed gives the same sample whatever else is in the batch and on whichever device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.sampling_params import SamplingParams

# The head of a distribution that is sorted first: top_p rarely needs more, and sorting a whole
# vocabulary costs milliseconds on a CPU.
_HEAD = 1024


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row of the logits.

    generator  a CPU generator of this request alone; None for a greedy one
    token_ids  prompt and output so far; read only for a repetition penalty
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, where the request asks for them, log-probabilities of the model's own logits.

    logprob       of the token, before penalties and temperature; None unless asked for
    top_logprobs  the most likely tokens, descending; empty unless asked for
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def make_generator(seed: int) -> torch.Generator:
    """The generator of one sample of one request."""
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One token per row of ``logits`` [num_rows, vocab_size] float32, which is not changed.

    On CUDA everything is enqueued before the one synchronisation that fetches the tokens, unless
    a request asks for log-probabilities.
    """
    if len(requests) != logits.shape[0]:
        raise ValueError(f"requests: expected {logits.shape[0]}, one per row, got {len(requests)}")
    scores = _penalised(logits, requests)
    token_ids = scores.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if drawn:
        chosen = _draw(scores[drawn], [requests[row] for row in drawn])
        token_ids[drawn] = chosen
    ids: list[int] = token_ids.tolist()
    return [
        SampledToken(token_id)
        if request.params.logprobs is None
        else _with_logprobs(logits[row], token_id, request.params.logprobs)
        for row, (token_id, request) in enumerate(zip(ids, requests, strict=True))
    ]


def _penalised(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """The logits, copied only when a request has a repetition penalty."""
    rows = [row for row, r in enumerate(requests) if r.params.repetition_penalty != 1.0]
    if not rows:
        return logits
    scores = logits.clone()
    for row in rows:
        seen = torch.tensor(requests[row].token_ids, dtype=torch.int64, device=logits.device)
        old = scores[row, seen]
        penalty = requests[row].params.repetition_penalty
        scores[row, seen] = torch.where(old > 0, old / penalty, old * penalty)
    return scores


def _draw(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """One token id per row, int64 [num_rows]."""
    device = scores.device
    temperatures = [request.params.temperature for request in requests]
    probs = (scores / torch.tensor(temperatures, device=device)[:, None]).softmax(dim=-1)
    uniform = torch.tensor(
        [_uniform(request) for request in requests], dtype=torch.float64, device=device
    )
    chosen = torch.empty(len(requests), dtype=torch.int64, device=device)
    whole = []
    for row, request in enumerate(requests):
        params = request.params
        if params.min_p > 0.0:
            probs[row].masked_fill_(probs[row] < probs[row].max() * params.min_p, 0.0)
        if params.top_k or params.top_p < 1.0:
            kept, ids = _most_likely(probs[row], params)
            chosen[row] = ids[_invert(kept[None], uniform[row : row + 1])[0]]
        else:
            whole.append(row)
    if whole:
        chosen[whole] = _invert(probs[whole], uniform[whole])
    return chosen


def _uniform(request: SampleRequest) -> float:
    if request.generator is None:
        raise ValueError("generator: a request that is not greedy needs one")
    return float(torch.rand((), generator=request.generator, dtype=torch.float64))


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative sum of a row exceeds its share; never one of 0.

    In float64: at 100,000 tokens a float32 sum is off by more than a rare token's probability.
    """
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, beyond the last token that has a probability.
    share = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, share, right=True)[:, 0]


def _most_likely(probs: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What top_k and top_p keep of one row: probabilities, descending, and their token ids."""
    total = probs.sum()
    if 0 < params.top_k < probs.shape[0]:
        kept, ids = probs.topk(params.top_k)
        total = kept.sum()
    else:
        kept, ids = probs.topk(min(_HEAD, probs.shape[0]))
        # On CUDA the comparison would cost a synchronisation, and a full sort costs little.
        if probs.is_cuda or kept.sum() < params.top_p * total:
            kept, ids = probs.sort(descending=True)
    if params.top_p < 1.0:
        before = kept.cumsum(dim=-1) - kept
        kept = kept.masked_fill(before >= params.top_p * total, 0.0)
    return kept, ids


def _with_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> SampledToken:
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), top)
