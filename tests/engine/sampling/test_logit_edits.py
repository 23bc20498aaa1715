import random

import pytest
import torch
from plain_sampling import edited

from engine.sampling.logit_edits import edit_logits
from engine.sampling.sampler import SampleRequest
from engine.sampling.sampling_params import SamplingParams

VOCAB = 40


def some_request(rng: random.Random) -> SampleRequest:
    """One with about half of what can change logits, over few enough tokens that it applies."""

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]

    choices = {
        "repetition_penalty": rng.uniform(0.5, 2.0),
        "presence_penalty": rng.uniform(-2.0, 2.0),
        "frequency_penalty": rng.uniform(-2.0, 2.0),
        "min_tokens": rng.randint(0, 8),
        "logit_bias": {token: rng.uniform(-120.0, 120.0) for token in tokens(1, 6)},
        "allowed_token_ids": tokens(1, 30),
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.5}
    prompt, output = tokens(1, 20), tokens(0, 12)
    bad_words = [tokens(1, 1)] + [output[-n:] + tokens(1, 1) for n in (1, 2) if len(output) >= n]
    bad_words += [tokens(2, 3), output + output + [3]]
    if rng.random() < 0.5:
        bad_words = []
    return SampleRequest(
        SamplingParams(**chosen, bad_words=["x"] * len(bad_words)),
        token_ids=prompt + output,
        num_prompt=len(prompt),
        end_token_ids=tokens(1, 3),
        bad_words=bad_words,
    )


def by_definition(row: torch.Tensor, request: SampleRequest) -> torch.Tensor:
    prompt = request.token_ids[: request.num_prompt]
    output = request.token_ids[request.num_prompt :]
    ends, bad_words = request.end_token_ids, request.bad_words
    return torch.tensor(edited(row.tolist(), request.params, prompt, output, ends, bad_words))


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_changed_as_their_parameters_say(seed):
    rng = random.Random(seed)
    requests = [some_request(rng) for _ in range(6)]
    requests.insert(3, SampleRequest(SamplingParams()))
    logits = 4 * torch.randn(len(requests), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    got = edit_logits(logits, requests)
    for row, request in enumerate(requests):
        expected = by_definition(logits[row], request)
        assert torch.equal(got[row].isinf(), expected.isinf())
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_logits_that_nobody_changes_are_not_copied():
    logits = torch.randn(2, VOCAB)
    assert edit_logits(logits, [SampleRequest(SamplingParams(seed=1, top_p=0.5))] * 2) is logits


def test_a_row_does_not_change_its_neighbours():
    logits = torch.zeros(3, VOCAB)
    changing = SampleRequest(
        SamplingParams(repetition_penalty=2.0, logit_bias={0: 5.0, VOCAB - 1: -5.0}),
        token_ids=[0, VOCAB - 1],
    )
    got = edit_logits(logits, [SampleRequest(SamplingParams()), changing, changing])
    assert torch.equal(got[0], logits[0])
    assert torch.equal(got[1], got[2])
    assert (got[1, 0], got[1, -1]) == (2.5, -10.0)


def test_tokens_beyond_the_vocabulary_forbid_nothing_in_the_next_row():
    early = SampleRequest(
        SamplingParams(min_tokens=3, bad_words=["x"]),
        token_ids=[1],
        num_prompt=1,
        end_token_ids=[2, VOCAB + 3],
        bad_words=[[VOCAB + 4]],
    )
    plain = SampleRequest(SamplingParams(), token_ids=[1])
    logits = torch.zeros(2, VOCAB)
    expected = logits.clone()
    expected[0, 2] = -torch.inf
    assert torch.equal(edit_logits(logits, [early, plain]), expected)
    assert torch.equal(edit_logits(logits[:1], [early]), expected[:1])
