"""How one request's tokens are chosen: vLLM's names, meanings and defaults.

Importable without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError

# Below this a temperature divides by almost nothing and the draw is the argmax anyway.
GREEDY_TEMPERATURE = 1e-5

# Beyond this a penalty makes logits that are no numbers any more, of which nothing can be drawn.
_LEAST_PENALTY = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one request. An unknown argument is an error.

    n                   samples of the prompt, each with its own generator
    temperature         0 (anything below 1e-5) chooses the most likely token
    top_p               least probability mass that stays in play, in (0, 1]; 1 keeps all
    top_k               number of tokens that stay in play; 0 keeps all (-1 is taken as 0)
    min_p               tokens below this fraction of the most likely one's probability are dropped
    repetition_penalty  above 1, tokens of prompt and output become less likely; 1 changes nothing;
                        from 0.001 to 1000
    max_tokens          new tokens at most; None: as many as the model's context takes
    stop                strings that end the output; the text ends before the first one
    stop_token_ids      tokens that end the output; the token itself stays in ``token_ids``
    ignore_eos          go on after the model's end-of-sequence token
    seed                makes the samples reproducible whatever else runs; sample i uses seed + i
    logprobs            report this many most likely tokens beside each sampled one; None: none

    The tokens in play are what passes min_p, then top_k, then top_p. Sequences become tuples.
    Raises ``ConfigError`` for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, least=1)
        _number("temperature", self.temperature, _real(self.temperature) >= 0.0, "at least 0")
        _number("top_p", self.top_p, 0.0 < _real(self.top_p) <= 1.0, "in (0, 1]")
        _number("min_p", self.min_p, 0.0 <= _real(self.min_p) <= 1.0, "in [0, 1]")
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            _LEAST_PENALTY <= _real(self.repetition_penalty) <= 1 / _LEAST_PENALTY,
            f"from {_LEAST_PENALTY} to {1 / _LEAST_PENALTY:.0f}",
        )
        _integer("top_k", self.top_k, least=-1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, least=0)
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=2**63 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos: expected True or False, got {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise ConfigError(f"stop: expected non-empty strings, got {self.stop!r}")
        token_ids = _sequence("stop_token_ids", self.stop_token_ids)
        for token_id in token_ids:
            _integer("stop_token_ids", token_id, least=0)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as validated: always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _real(value: Any) -> float:
    """The number, or NaN, which fails every comparison."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) != float("inf") else float("nan")


def _number(name: str, value: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"{name}: expected a number {expected}, got {value!r}")


def _integer(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: expected an integer, got {value!r}")
    if value < least:
        raise ConfigError(f"{name}: expected at least {least}, got {value!r}")
    if most is not None and value > most:
        raise ConfigError(f"{name}: expected at most {most}, got {value!r}")


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}: expected a list, got {value!r}")
    return tuple(value)
