"""What requests change about their logits before a token is chosen, as in vLLM and in its order:
allowed tokens, bad words, least length, bias, then repetition, frequency and presence penalties.

Rows that change nothing cost a look at their parameters; the others one array of places and one of
values for each kind of change, whatever their number, and no synchronisation with the device.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.sampling.sampler import SampleRequest


def edit_logits(logits: torch.Tensor, requests: "Sequence[SampleRequest]") -> torch.Tensor:
    """The logits [num_rows, vocab_size] as requests want them; a copy if any wants them changed."""
    rows = [row for row, request in enumerate(requests) if request.params.edits_logits]
    if not rows:
        return logits
    edited = _Edited(logits)
    chosen = [(row, requests[row]) for row in rows]
    edited.keep_only([(row, each.params.allowed_token_ids or ()) for row, each in chosen])
    edited.forbid([(row, _forbidden(each)) for row, each in chosen])
    edited.add([(row, list((each.params.logit_bias or {}).items())) for row, each in chosen])
    edited.divide(
        [
            (row, each.token_ids, each.params.repetition_penalty)
            for row, each in chosen
            if each.params.repetition_penalty != 1.0
        ]
    )
    edited.add([(row, _penalties(each)) for row, each in chosen])
    return edited.logits


def _forbidden(request: "SampleRequest") -> list[int]:
    """Last tokens of bad words that have come so far, and what would end an output too early."""
    output = request.token_ids[request.num_prompt :]
    forbidden = [
        word[-1]
        for word in request.bad_words
        if len(word) == 1 or list(word[:-1]) == list(output[1 - len(word) :])
    ]
    if len(output) < request.params.min_tokens:
        forbidden += request.end_token_ids
    return forbidden


def _penalties(request: "SampleRequest") -> list[tuple[int, float]]:
    """Tokens of the output, and what is added to their logits."""
    params = request.params
    if not (params.frequency_penalty or params.presence_penalty):
        return []
    output = np.asarray(request.token_ids[request.num_prompt :], np.int64)
    tokens, counts = np.unique(output, return_counts=True)
    added = -params.frequency_penalty * counts - params.presence_penalty
    return list(zip(tokens.tolist(), added.tolist(), strict=True))


class _Edited:
    """A copy of logits, changed at places that are given row by row."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits.clone()
        self._flat = self.logits.view(-1)
        self._width = logits.shape[1]

    def keep_only(self, allowed: Iterable[tuple[int, Sequence[int]]]) -> None:
        restricted = [(row, token_ids) for row, token_ids in allowed if token_ids]
        if restricted:
            places = self._places(restricted)
            kept = self._flat.take(places)
            whole = to_device([row for row, _ in restricted], np.int64, self.logits.device)
            self.logits.index_fill_(0, whole, -torch.inf)
            self._flat.index_copy_(0, places, kept)

    def forbid(self, forbidden: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Tokens that the model does not have, though its tokenizer may, never come anyway; their
        places would be those of the next row."""
        known = [(row, [each for each in ids if each < self._width]) for row, ids in forbidden]
        places = self._places(known)
        if len(places):
            self._flat.index_fill_(0, places, -torch.inf)

    def add(self, added: Iterable[tuple[int, Sequence[tuple[int, float]]]]) -> None:
        """No token twice in a row."""
        wanted = [(row, pairs) for row, pairs in added if pairs]
        if wanted:
            places = self._places([(row, [token for token, _ in pairs]) for row, pairs in wanted])
            values = [value for _, pairs in wanted for _, value in pairs]
            self._flat.index_add_(0, places, to_device(values, np.float32, self.logits.device))

    def divide(self, penalties: Sequence[tuple[int, Sequence[int], float]]) -> None:
        """Positive logits by the penalty, negative ones times it; a token that comes twice once."""
        if penalties:
            places = self._places([(row, token_ids) for row, token_ids, _ in penalties])
            repeated = np.repeat(
                [penalty for *_, penalty in penalties], [len(ids) for _, ids, _ in penalties]
            )
            factors = to_device(repeated, np.float32, self.logits.device)
            old = self._flat.take(places)
            changed = torch.where(old > 0, old / factors, old * factors)
            self._flat.index_copy_(0, places, changed)

    def _places(self, by_row: Iterable[tuple[int, Sequence[int]]]) -> torch.Tensor:
        parts = [np.asarray(ids, np.int64) + row * self._width for row, ids in by_row if len(ids)]
        return to_device(np.concatenate(parts) if parts else [], np.int64, self.logits.device)


def to_device(values: object, dtype: object, device: torch.device) -> torch.Tensor:
    """A tensor of ``values``. On CUDA from page-locked memory: else the host would wait."""
    tensor = torch.from_numpy(np.asarray(values, dtype))  # type: ignore[call-overload]
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
