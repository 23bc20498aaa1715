"""Time to the first token, estimated: what of a prompt is cached where, on which hardware."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from kvstore.block import TierName
from kvstore.planning.hardware import HardwareProfile
from kvstore.planning.request_batch import Floats, Ints

_SHORTEST_S, _STEP = 1e-4, 1.02  # of the distribution: intervals of 2 %
_NUM_INTERVALS = 1100  # up to about 80 hours


def first_token_s(
    profile: HardwareProfile, num_tokens: Ints, cached: Mapping[TierName, Ints]
) -> Floats:
    """Seconds [r] for prompts of ``num_tokens`` [r], of which each tier gives so many [r].

    Loading a prefix competes with computing it, as in the engine: the faster one is taken. Requests
    do not wait for each other here. At least one token is computed, whose logits are wanted.
    """
    seconds = cast(Any, profile.compute.seconds)  # it is plain arithmetic, of arrays too
    found = np.minimum(sum(cached.values(), np.zeros_like(num_tokens)), num_tokens - 1)
    found = np.maximum(found, 0)
    load_s = np.zeros(len(num_tokens))
    for tier, tokens in cached.items():
        if tier in profile.loads:
            estimate = profile.loads[tier]
            num_bytes = tokens * profile.bytes_per_token
            load_s += np.where(
                tokens > 0, estimate.latency_s + num_bytes / estimate.bytes_per_s, 0.0
            )
    with_cache = load_s + seconds(found, num_tokens, profile.chunk_tokens)
    best = np.minimum(with_cache, seconds(np.zeros_like(found), num_tokens, profile.chunk_tokens))
    return cast(Floats, best + profile.compute.step_s)


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """A distribution over requests, in seconds."""

    mean_s: float
    median_s: float
    p90_s: float
    p99_s: float


class FirstTokenHistogram:
    """Collects times in intervals that grow by 2 %: bounded memory for any number of requests."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_INTERVALS, np.int64)
        self._total_s = 0.0

    def add(self, seconds: Floats) -> None:
        place = np.log(np.maximum(seconds, _SHORTEST_S) / _SHORTEST_S) / np.log(_STEP)
        place = np.minimum(place.astype(np.int64), _NUM_INTERVALS - 1)
        self._counts += np.bincount(place, minlength=_NUM_INTERVALS)
        self._total_s += float(seconds.sum())

    def times(self) -> FirstTokenTimes | None:
        """None before the first one."""
        below = np.cumsum(self._counts)
        if below[-1] == 0:
            return None
        places = np.searchsorted(below, np.array([0.5, 0.9, 0.99]) * below[-1])
        median, p90, p99 = (_SHORTEST_S * _STEP ** (places + 0.5)).tolist()
        return FirstTokenTimes(self._total_s / int(below[-1]), median, p90, p99)
