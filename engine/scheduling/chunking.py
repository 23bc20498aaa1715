"""How many tokens of a sequence a step computes, and what of them may be reused.

    AsFits       whatever the step's budget leaves
    WholeChunks  deterministic mode: a prompt in chunks that begin at multiples of a fixed size, and
                 what follows it token by token, also when that is known already because the
                 sequence was preempted

Blocks that were not computed in this way are nobody else's: they get no key.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.runner.determinism import FixedShapes
from engine.scheduling.sequence import Sequence


class Chunking(Protocol):
    @property
    def least_budget(self) -> int:
        """Tokens a step must have left for a sequence to begin."""

    @property
    def joins_anywhere(self) -> bool:
        """Whether a sequence may go on from any position that another one has computed."""

    def num_next(self, sequence: Sequence, budget: int) -> int:
        """Tokens that the sequence computes next; 0 when ``budget`` is too little."""

    def num_positions(self, num_tokens: int) -> int:
        """Positions that so many tokens of one sequence take in a forward."""

    def num_at_first(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        """Positions that are wanted for the sequence, and how many of them behind a cached prefix
        must be there for it to begin."""

    def num_reusable(self, sequence: Sequence) -> int:
        """Tokens at its front that may come out of the cache."""

    def num_cacheable(self, sequence: Sequence) -> int:
        """Computed tokens at its front whose blocks others may use."""


class AsFits:
    least_budget = 1
    joins_anywhere = True

    def num_next(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_uncomputed, budget)

    def num_positions(self, num_tokens: int) -> int:
        return num_tokens

    def num_at_first(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        return len(sequence.token_ids), budget

    def num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_reusable

    def num_cacheable(self, sequence: Sequence) -> int:
        return sequence.num_computed


@dataclass(frozen=True, slots=True)
class WholeChunks:
    shapes: FixedShapes
    joins_anywhere = False

    @property
    def least_budget(self) -> int:
        return self.shapes.chunk_tokens

    def num_next(self, sequence: Sequence, budget: int) -> int:
        of_prompt = sequence.num_prompt - sequence.num_computed
        if of_prompt <= 1:
            return min(1, sequence.num_uncomputed, budget)
        chunk_tokens = self.shapes.chunk_tokens
        return min(of_prompt, chunk_tokens) if budget >= chunk_tokens else 0

    def num_positions(self, num_tokens: int) -> int:
        return self.shapes.padded(num_tokens)

    def num_at_first(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        chunk_tokens = self.shapes.chunk_tokens
        return self.shapes.whole_chunks(sequence.num_prompt + chunk_tokens - 1), chunk_tokens

    def num_reusable(self, sequence: Sequence) -> int:
        of_prompt = sequence.num_prompt - (not sequence.prefill_only)
        return self.shapes.whole_chunks(min(of_prompt, sequence.num_reusable))

    def num_cacheable(self, sequence: Sequence) -> int:
        return self.shapes.whole_chunks(min(sequence.num_computed, sequence.num_prompt))
