"""Counters over values and over time: how long something took, how much came in a day."""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

# Seconds: from a copy in memory to a long load from a slow disk.
BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """A snapshot. ``counts[i]`` values were at most ``bounds[i]`` and above the bound before; the
    one count more is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' buckets: each bound and how many values were at most that."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Histogram:
    """Counts values. Not thread-safe."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def stats(self) -> HistogramStats:
        return HistogramStats(self._bounds, tuple(self._counts), self._total)


NO_TIMES = Histogram().stats()


class LastDay:
    """A sum over the last 24 hours, forgotten hour by hour."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hours: dict[int, int] = {}

    def add(self, amount: int) -> None:
        hour = self._now()
        if hour not in self._hours:
            self._hours = {h: n for h, n in self._hours.items() if h > hour - 24}
        self._hours[hour] = self._hours.get(hour, 0) + amount

    def total(self) -> int:
        hour = self._now()
        return sum(n for h, n in self._hours.items() if h > hour - 24)

    def _now(self) -> int:
        return math.floor(self._clock() / 3600)
