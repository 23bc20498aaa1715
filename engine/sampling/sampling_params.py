"""How one request's tokens are chosen: vLLM's names, meanings and defaults.

Importable without torch.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from kvstore.config import refuse_unknown
from kvstore.errors import ConfigError

# Below this a temperature divides by almost nothing and the draw is the argmax anyway.
GREEDY_TEMPERATURE = 1e-5

# Beyond this a penalty makes logits that are no numbers any more, of which nothing can be drawn.
_LEAST_PENALTY = 1e-3
_MOST_SAMPLES = 1 << 14  # each is a sequence with a generator of its own from the start


# Arguments of vLLM that have nothing to change here, with the values they are accepted at.
NEUTRAL_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "extra_args": (None,),
    "flat_logprobs": (False,),
    "guided_decoding": (None,),
    "logits_processors": (None,),
    "output_kind": (None, "DELTA", 1),
    "repetition_detection": (None,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
    "use_beam_search": (False,),
}

_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")

_T = TypeVar("_T")


def _accepts_neutral_arguments(cls: type[_T]) -> type[_T]:
    """Drops what ``NEUTRAL_ARGUMENTS`` accepts; at another value it is refused by name."""
    init = cls.__init__
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: _T, **arguments: Any) -> None:
        for name in [name for name in arguments if name in NEUTRAL_ARGUMENTS]:
            value, accepted = arguments.pop(name), NEUTRAL_ARGUMENTS[name]
            plain = value.name if isinstance(value, Enum) else value
            if not any(type(plain) is type(each) and plain == each for each in accepted):
                raise ConfigError(f"{name}: only {accepted[0]!r} is supported, got {value!r}")
        refuse_unknown("SamplingParams", arguments, known)
        init(self, **arguments)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls


@_accepts_neutral_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one request. An unknown argument is an error.

    n                           samples of the prompt, each with its own generator; at most 16,384
    temperature                 0 (anything below 1e-5) chooses the most likely token
    top_p                       least probability mass that stays in play, in (0, 1]; 1 keeps all
    top_k                       number of tokens that stay in play; 0 keeps all (-1 is taken as 0)
    min_p                       tokens below this fraction of the most likely one's probability are
                                dropped
    repetition_penalty          above 1, tokens of prompt and output become less likely; 1 changes
                                nothing; from 0.001 to 1000
    presence_penalty            taken from the logits of tokens that are in the output; from -2 to 2
    frequency_penalty           the same once for each time a token is in the output; from -2 to 2
    logit_bias                  added to the logits of tokens, by token id; cut to [-100, 100]
    allowed_token_ids           no other token is chosen; None: all are
    bad_words                   texts whose last token is not chosen where it would complete them
    max_tokens                  new tokens at most; None: as many as the model's context takes
    min_tokens                  before so many new tokens nothing ends the output
    stop                        strings that end the output; the text ends before the first one
    stop_token_ids              tokens that end the output; the token itself stays in ``token_ids``
    include_stop_str_in_output  the text includes what ended it, string or token
    ignore_eos                  go on after the model's end-of-sequence token
    seed                        the same draws whatever else runs, of logits that are the same up to
                                rounding (in deterministic mode: to the bit); sample i uses
                                seed + i; -1 is taken as None
    logprobs                    report this many most likely tokens beside each sampled one; -1:
                                all; None: none
    prompt_logprobs             the same for each token of the prompt, which is computed in full for
                                that
    detokenize                  off: no text, token ids only
    skip_special_tokens         leave special tokens out of the text
    truncate_prompt_tokens      take only so many tokens at the end of the prompt; -1: as many as
                                fit

    The tokens in play are what passes min_p, then top_k, then top_p. Sequences become tuples.
    Raises ``ConfigError`` for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, least=1, most=_MOST_SAMPLES)
        _number("temperature", self.temperature, _real(self.temperature) >= 0.0, "at least 0")
        _number("top_p", self.top_p, 0.0 < _real(self.top_p) <= 1.0, "in (0, 1]")
        _number("min_p", self.min_p, 0.0 <= _real(self.min_p) <= 1.0, "in [0, 1]")
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            _LEAST_PENALTY <= _real(self.repetition_penalty) <= 1 / _LEAST_PENALTY,
            f"from {_LEAST_PENALTY} to {1 / _LEAST_PENALTY:.0f}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _number(name, value, -2.0 <= _real(value) <= 2.0, "from -2 to 2")
        _integer("top_k", self.top_k, least=-1)
        _integer("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                raise ConfigError(
                    f"min_tokens: expected at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), least=-1)
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens: expected at least 1, or -1, got 0")
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=2**63 - 1)
        for name in _SWITCHES:
            _boolean(name, getattr(self, name))
        stop = (self.stop,) if isinstance(self.stop, str) else _texts("stop", self.stop)
        if not all(stop):
            raise ConfigError(f"stop: expected non-empty strings, got {self.stop!r}")
        if stop and not self.detokenize:
            raise ConfigError("stop: strings are looked for in the text, which needs detokenize")
        bad_words = _texts("bad_words", self.bad_words)
        if not all(bad_words):
            raise ConfigError(f"bad_words: expected non-empty strings, got {self.bad_words!r}")
        token_ids = _token_ids("stop_token_ids", self.stop_token_ids)
        allowed = None
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ConfigError("allowed_token_ids: expected at least one token")
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", token_ids)
        object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", bad_words)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def clone(self) -> "SamplingParams":
        """A copy, as vLLM has it; parameters never change, so whoever got them may keep them."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as validated: always a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def edits_logits(self) -> bool:
        """Whether a token is chosen by anything but the model's own logits."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.bad_words
            or self.logit_bias
            or self.allowed_token_ids
        )


def _real(value: Any) -> float:
    """The number, or NaN, which fails every comparison."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and abs(value) != math.inf else math.nan
    except OverflowError:  # an integer of more than 308 digits
        return math.nan


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


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r}")


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}: expected a list, got {value!r}")
    return tuple(value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = _sequence(name, value)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{name}: expected strings, got {value!r}")
    return texts


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    token_ids = _sequence(name, value)
    for token_id in token_ids:
        _integer(name, token_id, least=0)
    return token_ids


def _biases(value: Any) -> dict[int, float]:
    """By token id, which may be text as in the JSON of a server."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"logit_bias: expected token ids with numbers, got {value!r}")
    biases = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() else key
        _integer("logit_bias", token_id, least=0)
        _number("logit_bias", bias, not math.isnan(_real(bias)), "for each token")
        biases[token_id] = min(100.0, max(-100.0, float(bias)))
    return biases
