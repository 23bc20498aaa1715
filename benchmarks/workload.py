"""Documents and questions that benchmarks ask, and what makes two answers the same."""

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

QUESTION = "What is this text about?"
TOKENS_PER_WORD = 1.4  # of the example text, by the demo model's tokenizer; rounded up

# Two rows of the same product differ by rounding when its number of rows differs. A token whose
# lead over the next one is smaller than this, in nats, may come out either way.
_TIE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


@cache
def _sentences() -> list[str]:
    path = Path(__file__).parents[1] / "examples" / "long.txt"
    joined = " ".join(path.read_text(encoding="utf-8").split())
    return re.split(r"(?<=[.?!:;]) ", joined)


def document(number: int, num_tokens: int) -> str:
    """Text of about ``num_tokens`` tokens: the example text's sentences in an order of its own.

    Two numbers give two documents that share no prefix.
    """
    order = random.Random(number)
    words: list[str] = ["Report", f"{number}."]
    while len(words) * TOKENS_PER_WORD < num_tokens:
        shuffled = _sentences().copy()
        order.shuffle(shuffled)
        words += " ".join(shuffled).split()
    return " ".join(words[: int(num_tokens / TOKENS_PER_WORD)])


def popularity(name: str, num_documents: int) -> list[float]:
    """Weights of documents: "uniform", or "zipf" with exponent 1, the first the most popular."""
    if name == "uniform":
        return [1.0] * num_documents
    if name == "zipf":
        return [1 / rank for rank in range(1, num_documents + 1)]
    raise ValueError(f"popularity: expected uniform or zipf, got {name!r}")


def draws(name: str, num_documents: int, count: int, seed: int) -> list[int]:
    """Which document each of ``count`` questions is about."""
    weights = popularity(name, num_documents)
    return random.Random(seed).choices(range(num_documents), weights, k=count)


class Answers:
    """What uncached runs answered, and the check that every cached run answers the same.

    Token ids are the same, or they part at a token that was a tie in the uncached run; how many
    did is in ``num_ties``. Runs must ask for ``logprobs=2``, all of
    them: it costs time.
    """

    def __init__(self, dtype: str) -> None:
        self._tie = _TIE[dtype]
        self._expected: dict[Any, Any] = {}
        self.num_compared = 0
        self.num_ties = 0

    def expect(self, name: Any, answer: Any) -> None:
        """``answer`` is a ``CompletionOutput`` of the uncached run for what is called ``name``."""
        self._expected[name] = answer

    def knows(self, name: Any) -> bool:
        return name in self._expected

    def check(self, name: Any, token_ids: Sequence[int]) -> None:
        """Raises ``AssertionError`` when the answer is another one."""
        expected = self._expected[name]
        self.num_compared += 1
        pairs = enumerate(zip(expected.token_ids, token_ids, strict=False))
        parted = next((i for i, (a, b) in pairs if a != b), None)
        if parted is None:
            assert len(expected.token_ids) == len(token_ids), f"{name}: an answer was cut"
            return
        likely = sorted((each.logprob for each in expected.logprobs[parted].values()), reverse=True)
        lead = likely[0] - likely[1]
        assert lead < self._tie, f"{name}: token {parted} of the answer changed (lead {lead:.3g})"
        self.num_ties += 1
