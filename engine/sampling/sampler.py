"""From logits to tokens.

Order of the steps, as in vLLM: what requests change about the logits (``logit_edits``),
temperature, min_p, top_k, top_p, draw. A draw takes one uniform number of the request's own
generator and inverts the cumulative distribution, so a seed gives the same sample whatever else is
in the batch and on whichever device.

Work is done for all rows at once, and what a row gets does not depend on the others. On CUDA
everything is enqueued before the one synchronisation that fetches tokens and log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling.logit_edits import edit_logits, to_device
from engine.sampling.sampling_params import SamplingParams

# Probabilities whose sums in float64 are looked at before they are themselves.
_RUN = 256


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row of the logits.

    generator      a CPU generator of this request alone; None for a greedy one
    token_ids      prompt and output so far; read only for what depends on them
    num_prompt     of them, the prompt
    end_token_ids  what must not come before ``min_tokens``
    bad_words      token ids of the texts that must not come
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    token_ids: Sequence[int] = ()
    num_prompt: int = 0
    end_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, where the request asks for them, log-probabilities of the model's own logits.

    logprob       of the token, before penalties and temperature; None unless asked for
    rank          of the token among all, 1 is the most likely; None unless asked for
    top_logprobs  the most likely tokens, descending; empty unless asked for
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def make_generator(seed: int) -> torch.Generator:
    """The generator of one sample of one request."""
    return torch.Generator().manual_seed(seed)


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
    """One token per row of ``logits`` [num_rows, vocab_size] float32, which is not changed."""
    if len(requests) != logits.shape[0]:
        raise ValueError(f"requests: expected {logits.shape[0]}, one per row, got {len(requests)}")
    scores = edit_logits(logits, requests)
    token_ids = scores.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if not request.params.is_greedy]
    if drawn:
        rows = to_device(drawn, np.int64, logits.device)
        chosen = _draw(scores.index_select(0, rows), [requests[row] for row in drawn])
        token_ids = token_ids.index_copy(0, rows, chosen)
    num_top = [request.params.logprobs for request in requests]
    if any(count is not None for count in num_top):
        return _with_logprobs(logits, token_ids, num_top)
    return [SampledToken(token_id) for token_id in token_ids.tolist()]


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """Log-probabilities of tokens that are known: row i of the logits is what ``token_ids[i]`` was
    chosen from. ``num_top`` as in ``SamplingParams.prompt_logprobs``."""
    known = to_device(list(token_ids), np.int64, logits.device)
    return _with_logprobs(logits, known, [num_top] * len(token_ids))


def _draw(scores: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    """One token id per row, int64 [num_rows]. Overwrites the scores."""
    settings = [(r.params.temperature, r.params.min_p, _uniform(r)) for r in requests]
    temperature, min_p, uniform = to_device(settings, np.float64, scores.device).T
    probs = scores.div_(temperature[:, None].float()).softmax(dim=-1)
    if any(request.params.min_p > 0.0 for request in requests):
        least = probs.amax(dim=-1) * min_p.float()
        probs = probs.masked_fill(probs < least[:, None], 0.0)
    ranked = [i for i, r in enumerate(requests) if r.params.top_k or r.params.top_p < 1.0]
    if not ranked:
        return _invert(probs, uniform)
    rows = to_device(ranked, np.int64, probs.device)
    restricted, token_ids = _most_likely(
        probs.index_select(0, rows), [requests[i].params for i in ranked]
    )
    chosen = _invert(restricted, uniform.take(rows))
    of_ranked = token_ids.gather(1, chosen[:, None])[:, 0]
    # A row that keeps all is inverted in the vocabulary's order, alone or beside others.
    result = of_ranked if len(ranked) == len(requests) else _invert(probs, uniform)
    return result.index_copy(0, rows, of_ranked)


def _uniform(request: SampleRequest) -> float:
    if request.generator is None:
        raise ValueError("generator: a request that is not greedy needs one")
    return float(torch.rand((), generator=request.generator, dtype=torch.float64))


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative sum of a row exceeds its share; never one of 0.

    In float64: at 100,000 tokens a float32 sum is off by more than a rare token's probability. Run
    by run, then within one: a whole vocabulary in float64 costs a CPU 1.3 ms a row, this 0.1 ms.
    """
    padded = torch.nn.functional.pad(probs, (0, -probs.shape[1] % _RUN))
    runs = padded.view(len(probs), -1, _RUN)
    cumulative = runs.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    run, share = _first_beyond(cumulative, uniform[:, None] * cumulative[:, -1:])
    before = torch.where(run > 0, cumulative.gather(1, (run - 1).clamp(min=0)), 0.0)
    chosen = runs.take_along_dim(run[:, :, None], dim=1)[:, 0].to(torch.float64)
    within, _ = _first_beyond(before + chosen.cumsum(dim=-1), share)
    return (run * _RUN + within)[:, 0].clamp(max=probs.shape[1] - 1)


def _first_beyond(
    cumulative: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first place of each row that exceeds its share [num_rows, 1], and the share.

    That is kept below the end, which rounding may take it to or beyond: behind the last place that
    adds something is nothing to be chosen. Where everything was forbidden nothing is a number, and
    any place is as good.
    """
    end = cumulative[:, -1:]
    share = torch.minimum(share, end.nextafter(torch.zeros_like(end)))
    found = torch.searchsorted(cumulative, share, right=True)
    return found.clamp(max=cumulative.shape[1] - 1), share


def _most_likely(
    probs: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What top_k and top_p keep: probabilities, descending, float64, and their token ids."""
    vocab_size = probs.shape[1]
    limits = [min(each.top_k, vocab_size) or vocab_size for each in params]
    settings = [(each.top_k > 0, each.top_p) for each in params]
    is_limited, top_p = to_device(settings, np.float64, probs.device).T[:, :, None]
    kept, token_ids = _descending(probs, limits, params)
    limit = to_device(limits, np.int64, probs.device)[:, None]
    ranks = torch.arange(kept.shape[1], device=probs.device)
    kept = kept.masked_fill(ranks >= limit, 0.0)
    cumulative = kept.cumsum(dim=-1)
    whole = probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    total = torch.where(is_limited > 0, cumulative[:, -1:], whole)
    is_beyond = (cumulative - kept >= top_p * total) & (top_p < 1.0)
    return kept.masked_fill(is_beyond, 0.0), token_ids


def _descending(
    probs: torch.Tensor, limits: Sequence[int], params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many of each row's most likely tokens as are needed, beside zeros, float64.

    A GPU sorts all rows at once, which costs it little; to look how many are needed would cost it a
    synchronisation. A CPU takes 20 times as long to sort a vocabulary as to find its upper part.
    """
    if probs.device.type != "cpu":
        values, token_ids = probs.sort(dim=-1, descending=True, stable=True)
        return values.to(torch.float64), token_ids
    heads = []
    for row, limit, each in zip(probs, limits, params, strict=True):
        if each.top_k:
            values, token_ids = row.topk(limit)
        else:
            # Tokens below this have less than 1 - top_p together: the others are enough.
            least = (1.0 - each.top_p) * float(row.sum()) / (2 * len(row))
            near = (row > least).nonzero()[:, 0]
            values, order = row.take(near).sort(descending=True, stable=True)
            token_ids = near.take(order)
        heads.append((values, token_ids))
    width = max(len(values) for values, _ in heads)
    kept = torch.zeros(len(heads), width, dtype=torch.float64)
    ids = torch.zeros(len(heads), width, dtype=torch.int64)
    for place, (values, token_ids) in enumerate(heads):
        kept[place, : len(values)] = values
        ids[place, : len(values)] = token_ids
    return kept, ids


def _with_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int | None]
) -> list[SampledToken]:
    """Tokens with what ``num_top`` asks for in each row: None, or a number, -1 for all."""
    vocab_size = logits.shape[1]
    counts = {
        row: vocab_size if count == -1 else min(count, vocab_size)
        for row, count in enumerate(num_top)
        if count is not None
    }
    rows, widest = to_device(list(counts), np.int64, logits.device), max(counts.values())
    is_all = len(counts) == len(num_top)
    logprobs = (logits if is_all else logits.index_select(0, rows)).log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids.take(rows)[:, None])
    rank = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    top = logprobs.topk(widest, dim=-1)
    # All in one array, since each fetch waits for the device; a float64 holds a token id exactly.
    table = [part.to(torch.float64) for part in (own, rank, top.values, top.indices)]
    fetched = torch.cat([token_ids.to(torch.float64), torch.cat(table, dim=-1).flatten()]).tolist()
    tokens = [SampledToken(int(token_id)) for token_id in fetched[: len(token_ids)]]
    for place, (row, count) in enumerate(counts.items()):
        start = len(token_ids) + place * (2 + 2 * widest)
        logprob, rank_of_it, *pairs = fetched[start : start + 2 + 2 * widest]
        named = zip(map(int, pairs[widest:][:count]), pairs[:count], strict=True)
        tokens[row] = SampledToken(tokens[row].token_id, logprob, int(rank_of_it), tuple(named))
    return tokens
