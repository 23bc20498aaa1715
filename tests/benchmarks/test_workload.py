from types import SimpleNamespace

import pytest
import workload


def answer(*token_ids, leads=()):
    """An uncached answer whose tokens lead by ``leads`` (default: clearly)."""
    leads = [*leads, *[5.0] * (len(token_ids) - len(leads))]
    logprobs = [
        {token: SimpleNamespace(logprob=-0.1), -1: SimpleNamespace(logprob=-0.1 - lead)}
        for token, lead in zip(token_ids, leads, strict=True)
    ]
    return SimpleNamespace(token_ids=list(token_ids), logprobs=logprobs)


def test_documents_are_reproducible_and_share_no_prefix():
    texts = [workload.document(number, 200) for number in range(20)]
    assert texts == [workload.document(number, 200) for number in range(20)]
    assert len({text[:16] for text in texts}) == len(texts)
    assert all(130 < len(text.split()) < 150 for text in texts)


def test_zipf_asks_most_about_the_first_document():
    drawn = workload.draws("zipf", 10, 10_000, seed=0)
    counts = [drawn.count(number) for number in range(10)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.3)
    uniform = workload.draws("uniform", 10, 10_000, seed=0)
    assert min(uniform.count(number) for number in range(10)) > 850


def test_an_answer_that_changed_fails_the_benchmark():
    answers = workload.Answers("float32")
    answers.expect("a", answer(1, 2, 3))
    answers.check("a", [1, 2, 3])
    with pytest.raises(AssertionError, match="a: token 1 of the answer changed"):
        answers.check("a", [1, 9, 3])
    with pytest.raises(AssertionError, match="a: an answer was cut"):
        answers.check("a", [1, 2])


def test_an_answer_may_part_at_a_tie_which_is_counted():
    answers = workload.Answers("float32")
    answers.expect("a", answer(1, 2, 3, leads=[5.0, 1e-4]))
    answers.check("a", [1, 9, 9])
    assert (answers.num_compared, answers.num_ties) == (1, 1)
