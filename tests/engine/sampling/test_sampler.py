import contextlib
from collections import Counter

import pytest
import torch

from engine.sampling.sampler import SampleRequest, make_generator, sample, score
from engine.sampling.sampling_params import SamplingParams

VOCAB = 50


def logits(rows: int = 1, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=make_generator(seed))


def draws(row: torch.Tensor, count: int, token_ids=(), **params) -> Counter:
    generator = make_generator(1)
    request = SampleRequest(SamplingParams(**params), generator, token_ids)
    rows, requests = row.expand(count, -1), [request] * count
    return Counter(token.token_id for token in sample(rows, requests))


def kept_by_definition(row: torch.Tensor, *, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, float]:
    """The distribution that is left, a token at a time and straight from the definitions."""
    probs = row.double().softmax(-1).tolist()
    ranked = sorted(range(len(probs)), key=lambda t: -probs[t])
    ranked = [t for t in ranked if probs[t] >= min_p * probs[ranked[0]]]
    ranked = ranked[: top_k or None]
    total = sum(probs[t] for t in ranked)
    kept, mass = {}, 0.0
    for token in ranked:
        if mass >= top_p * total and top_p < 1.0:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return {token: p / sum(kept.values()) for token, p in kept.items()}


def test_greedy_takes_the_most_likely_token_of_each_row():
    rows = logits(4)
    requests = [SampleRequest(SamplingParams(temperature=0))] * 4
    assert [t.token_id for t in sample(rows, requests)] == rows.argmax(-1).tolist()


@pytest.mark.parametrize(
    "restriction",
    [
        {},
        {"top_k": 5},
        {"top_k": VOCAB + 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.7},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution_that_is_left(restriction):
    row = logits(seed=3)[0]
    expected = kept_by_definition(row, **restriction)
    counts = draws(row, 4000, **restriction)
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        deviation = (4000 * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - 4000 * probability) < 5 * deviation + 5


def test_top_p_keeps_as_much_of_a_flat_distribution_as_it_says():
    flat = torch.zeros(5000)
    counts = draws(flat, 3000, top_p=0.9)
    assert len(counts) > 1024 + 500
    assert len(counts) <= 4500


def test_temperature_scales_the_logits():
    row = logits(seed=4)[0]
    expected = kept_by_definition(row / 0.5)
    counts = draws(row, 4000, temperature=0.5)
    top = max(expected, key=expected.get)
    assert abs(counts[top] / 4000 - expected[top]) < 0.05


def test_a_token_without_probability_is_never_drawn():
    row = torch.full((VOCAB,), -torch.inf)
    row[[7, 31]] = 0.0
    assert set(draws(row, 500)) == {7, 31}


def test_repetition_penalty_lowers_every_seen_token_once():
    row = torch.tensor([2.0, 1.9, -1.0, -1.1])
    greedy = SamplingParams(temperature=0, repetition_penalty=1.5)
    token = sample(row[None], [SampleRequest(greedy, token_ids=[0, 0, 2])])[0]
    assert token.token_id == 1  # 2.0 / 1.5 < 1.9
    masked = torch.tensor([-torch.inf, -torch.inf, -1.0, -1.1])
    token = sample(masked[None], [SampleRequest(greedy, token_ids=[2])])[0]
    assert token.token_id == 3  # -1.0 * 1.5 < -1.1


def test_the_logits_are_not_changed():
    rows = logits(3)
    before = rows.clone()
    params = SamplingParams(repetition_penalty=2.0, top_p=0.5, min_p=0.1, seed=1, logprobs=2)
    sample(rows, [SampleRequest(params, make_generator(1), [1, 2, 3])] * 3)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("restriction", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.02}])
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(restriction):
    steps = logits(12, seed=5)
    params = SamplingParams(temperature=0.8, seed=17, **restriction)

    def tokens_in_company(company: list[SampleRequest], place: int) -> list[int]:
        mine, found = SampleRequest(params, make_generator(17)), []
        for step in steps:
            rows = torch.cat([logits(len(company), seed=9), step[None]]).roll(place, 0)
            requests = [*company, mine]
            requests = requests[-place:] + requests[:-place]
            found.append(sample(rows, requests)[(len(company) + place) % len(requests)].token_id)
        return found

    others = [
        SampleRequest(SamplingParams(temperature=0)),
        SampleRequest(SamplingParams(seed=3), make_generator(3)),
        SampleRequest(SamplingParams(seed=4, top_p=0.5), make_generator(4)),
        SampleRequest(SamplingParams(temperature=2.0, top_k=3), make_generator(5), [1]),
    ]
    alone = tokens_in_company([], 0)
    assert len(set(alone)) > 1
    assert tokens_in_company(others, 0) == alone
    assert tokens_in_company(others, 2) == alone


def test_one_draw_takes_one_number_of_the_generator():
    used, expected = make_generator(5), make_generator(5)
    request = SampleRequest(SamplingParams(top_p=0.9, top_k=3), used)
    sample(logits(), [request])
    torch.rand((), generator=expected, dtype=torch.float64)
    assert torch.equal(used.get_state(), expected.get_state())


def test_logprobs_are_those_of_the_model_before_penalty_and_temperature():
    rows = logits(2, seed=6)
    expected = rows.log_softmax(-1)
    params = SamplingParams(temperature=0.3, repetition_penalty=3.0, seed=2, logprobs=3)
    plain = SamplingParams(temperature=0)
    requests = [SampleRequest(params, make_generator(2), [4, 5]), SampleRequest(plain)]
    with_logprobs, without = sample(rows, requests)
    assert with_logprobs.logprob == pytest.approx(float(expected[0, with_logprobs.token_id]))
    top = expected[0].topk(3)
    assert [token for token, _ in with_logprobs.top_logprobs] == top.indices.tolist()
    assert [p for _, p in with_logprobs.top_logprobs] == pytest.approx(top.values.tolist())
    assert without.logprob is None
    assert without.top_logprobs == ()


def test_zero_logprobs_reports_the_sampled_token_alone():
    params = SamplingParams(temperature=0, logprobs=0)
    token = sample(logits(), [SampleRequest(params)])[0]
    assert token.logprob is not None
    assert token.top_logprobs == ()


def test_a_request_that_draws_needs_a_generator():
    with pytest.raises(ValueError, match="generator"):
        sample(logits(), [SampleRequest(SamplingParams())])


def test_every_row_needs_a_request():
    with pytest.raises(ValueError, match="expected 2, one per row, got 1"):
        sample(logits(2), [SampleRequest(SamplingParams(temperature=0))])


def test_minus_one_logprobs_reports_every_token_with_its_rank():
    rows = logits(2, seed=8)
    everything = SamplingParams(seed=3, logprobs=-1)
    beside = SamplingParams(temperature=0, logprobs=1)
    first, second = sample(
        rows, [SampleRequest(everything, make_generator(3)), SampleRequest(beside)]
    )
    ranked = rows.argsort(-1, descending=True).tolist()
    assert [token for token, _ in first.top_logprobs] == ranked[0]
    assert ranked[0][first.rank - 1] == first.token_id
    assert (second.rank, [token for token, _ in second.top_logprobs]) == (1, ranked[1][:1])


def test_known_tokens_are_scored_as_if_they_had_been_chosen():
    rows = logits(3, seed=9)
    expected = rows.log_softmax(-1)
    for row, (token, scored) in enumerate(zip([4, 0, 49], score(rows, [4, 0, 49], 2), strict=True)):
        assert scored.token_id == token
        assert scored.logprob == pytest.approx(float(expected[row, token]))
        assert scored.rank == 1 + int((expected[row] > expected[row, token]).sum())
        assert [t for t, _ in scored.top_logprobs] == expected[row].topk(2).indices.tolist()


def test_a_row_where_everything_is_forbidden_ends_nothing():
    """Not a number has no place in a distribution; the index beyond the end failed the step."""
    row = torch.full((1, VOCAB), -torch.inf)
    token = sample(row, [SampleRequest(SamplingParams(), make_generator(1))])[0]
    assert 0 <= token.token_id < VOCAB


@pytest.mark.parametrize("logprobs", [None, 3])
def test_nothing_is_read_before_all_is_enqueued(logprobs, monkeypatch):
    """One synchronisation a step: on tensors that have no values everything runs up to the fetch of
    the tokens."""
    requests = [
        SampleRequest(SamplingParams(temperature=0, logprobs=logprobs)),
        SampleRequest(SamplingParams(top_p=0.5, min_p=0.1), make_generator(1)),
        SampleRequest(SamplingParams(top_k=3), make_generator(2)),
        SampleRequest(SamplingParams(), make_generator(3)),
        SampleRequest(
            SamplingParams(
                temperature=0,
                repetition_penalty=2.0,
                frequency_penalty=1.0,
                logit_bias={1: 2.0},
                allowed_token_ids=[1, 2, 3],
                min_tokens=5,
            ),
            token_ids=[1, 2],
            num_prompt=1,
            end_token_ids=[2],
        ),
    ]
    fetched = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: fetched.append(self.shape) or [])
    with contextlib.suppress(ValueError):  # nothing came
        sample(torch.empty(len(requests), VOCAB, device="meta"), requests)
    assert len(fetched) == 1


@pytest.mark.parametrize("vocab_size", [255, 256, 1000])
def test_every_share_of_a_large_vocabulary_finds_its_token(vocab_size, monkeypatch):
    """Sums are taken in runs of 256: the first and the last token of each, and none without
    probability, whatever the share."""
    row = logits(seed=11, vocab_size=vocab_size)
    row[0, ::3] = -torch.inf
    probs = row.double().softmax(-1)[0]
    ends = probs.cumsum(0).tolist()
    for token in [t for t in range(vocab_size) if probs[t] > 1e-4][:: vocab_size // 50]:
        share = ends[token] - float(probs[token]) / 2
        monkeypatch.setattr("engine.sampling.sampler._uniform", lambda request, share=share: share)
        request = SampleRequest(SamplingParams(), make_generator(0))
        assert sample(row, [request])[0].token_id == token
    for share in (0.0, 1.0 - 1e-16):
        monkeypatch.setattr("engine.sampling.sampler._uniform", lambda request, share=share: share)
        assert probs[sample(row, [request])[0].token_id] > 0
