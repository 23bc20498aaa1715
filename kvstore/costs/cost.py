"""Load or recompute: what bringing a prefix from slower tiers costs, and what computing it again.

    load       latency + (queued + bytes) / bandwidth, per tier
    compute    a·steps + b·tokens + d·Σ context, where a token's context is the positions before it

A prefix of n blocks is cut at c: blocks before c are loaded, the others computed. What a load costs
grows evenly from block to block; what computing saves grows too, as later tokens see more context.
So within a run of blocks from one tier the sum is concave, and the best cut is a border of runs.

Both estimates are least squares of *relative* errors over one running mean per order of magnitude,
with no negative coefficient: a flood of small steps then cannot wash out what the few large ones
told. Loads start from a self-measurement.

A verdict to compute brings no news of the tier that was too slow, so now and then such a request
tries it: it loads a few blocks, and decides again with what that told. So an estimate never fades
out: a tier that was slow is tried before it is trusted with a whole prefix.

Pure arithmetic of one thread: knows no tier, no torch and no request.
"""

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Literal

from kvstore.block import TierName
from kvstore.costs.least_squares import least_squares

_MEMORY_S = 60.0  # a load counts e^(-age / this), its age at the last one
_PROBE_SHARE = 1 / 32  # of the requests that would compute what a tier holds
_PROBE_EVERY_S = 60.0  # and the first one after so long without news of it
_PROBE_COST = 0.25  # the blocks tried take at most this share of computing, as was known last
_LEAST_GAIN = 0.10  # of the load's time, for which it is worth computing what is there
_REACH = 4  # a fit is trusted up to this many times the largest step and context it has seen
_LONG_BUSY_S = 1.0  # a tier that is never idle is observed this often
_ROUNDS = 4  # of a fit that weighs errors by its own predictions
_WEAK = 0.01  # weight of what an estimate falls back to where observations leave it open


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """What loading from one tier costs: once, and per byte."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


# Guesses, for a tier nobody has measured. Hopeful ones: a load that is tried corrects them.
_GUESSES = {
    TierName.HOST: LoadEstimate(0.0002, 5e9),
    TierName.DISK: LoadEstimate(0.001, 1e9),
    TierName.REMOTE: LoadEstimate(0.010, 1e8),
}


class LoadReason(StrEnum):
    """Why a prefix was cut where it was."""

    NOTHING_TO_LOAD = "nothing_to_load"  # all that was found is on the device
    ALWAYS = "always"  # load_policy
    NEVER = "never"  # load_policy
    UNFITTED = "unfitted"  # loads: nothing is known yet of steps of this size
    LOAD = "load"  # loading is faster
    SMALL_GAIN = "small_gain"  # computing is faster by too little
    COMPUTE = "compute"  # computing is faster
    PARTIAL = "partial"  # loading the front and computing the rest is faster
    PROBE = "probe"  # computing is faster, but a few blocks are loaded to see: decide again then


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What was decided for one request, with the estimates it rests on.

    cut_blocks    blocks before the cut may be loaded, those after it only be used where they are
    num_blocks    blocks that were found
    load_s        to load what needs loading before the cut
    compute_s     to compute what lies after it
    load_all_s    to load everything instead
    """

    cut_blocks: int
    num_blocks: int
    reason: LoadReason
    load_s: float = 0.0
    compute_s: float = 0.0
    load_all_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeEstimate:
    """Seconds per step, per token, and per pair of a token and a position before it."""

    step_s: float
    token_s: float
    context_s: float

    def seconds(self, start: int, end: int, chunk_tokens: int) -> float:
        """For the tokens at positions [start, end), in steps they share with what follows."""
        num_tokens = end - start
        context = (end * end - start * start) / 2
        return (
            self.step_s * num_tokens / chunk_tokens
            + self.token_s * num_tokens
            + self.context_s * context
        )


@dataclass(slots=True)
class _LoadMean:
    """Loads of about one size."""

    num_bytes: float
    seconds: float
    at: float
    trust: float = 1.0


@dataclass(slots=True)
class _StepMean:
    """Steps of about one size and context."""

    num_steps: float
    num_tokens: float
    context: float
    seconds: float
    count: int = 1


@dataclass(slots=True)
class _Traffic:
    """Loads from one tier since it was idle last."""

    num_loads: int = 0
    queued_bytes: int = 0
    done_bytes: int = 0
    busy_since: float = 0.0
    ended_at: float = -math.inf


@dataclass(slots=True)
class _TierCost:
    start: LoadEstimate
    means: dict[int, _LoadMean] = field(default_factory=dict)
    estimate: LoadEstimate | None = None  # None: to be fitted anew
    traffic: _Traffic = field(default_factory=_Traffic)
    num_slow: int = 0  # loads in a row that took a quarter longer than was thought, or more
    tried_at: float = -math.inf  # when a load last ended, or was decided on as a probe


class CostModel:
    """Decides per request what is loaded and what is computed. One thread.

    policy         "auto" decides; "always" and "never" load everything, nothing
    chunk_tokens   tokens of a full prefill step
    uniform        random numbers in [0, 1)
    """

    def __init__(
        self,
        policy: Literal["auto", "always", "never"] = "auto",
        *,
        chunk_tokens: int = 2048,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self.policy = policy
        self.chunk_tokens = chunk_tokens
        self.uniform = uniform
        self._clock = clock
        self._tiers = {tier: _TierCost(guess) for tier, guess in _GUESSES.items()}
        self._steps: dict[tuple[int, int], _StepMean] = {}
        self._compute: ComputeEstimate | None = None  # as load estimates
        self._largest_step = 0.0  # tokens
        self._largest_context = 0.0  # positions before a token

    # ---- what was measured ---------------------------------------------------------------------

    def start_from(self, tier: TierName, estimate: LoadEstimate) -> None:
        """A self-measurement: what the estimate is without observations."""
        self._tiers[tier].start, self._tiers[tier].estimate = estimate, None

    def observe_load(self, tier: TierName, num_bytes: int, seconds: float) -> None:
        """A load from ``tier``, its own waiting behind other loads left out."""
        now, cost = self._clock(), self._tiers[tier]
        seconds = max(seconds, 1e-9)
        cost.tried_at = now
        surprise = seconds / self.load_estimate(tier).seconds(num_bytes)
        cost.estimate = None
        # Disks change: another user, a page cache that is cold or warm. What contradicts all that
        # was known outweighs it; a fast load at once, as noise only ever makes things slower, and a
        # slow one that is the second in a row.
        cost.num_slow = cost.num_slow + 1 if surprise > 1.25 else 0
        if surprise < 0.5 or cost.num_slow > 1:
            cost.means.clear()
        elif surprise > 2:
            for other in cost.means.values():
                other.trust *= 0.5
        size = num_bytes.bit_length()
        mean = cost.means.get(size)
        if mean is None:
            cost.means[size] = _LoadMean(num_bytes, seconds, now)
        else:
            mean.num_bytes = math.sqrt(mean.num_bytes * num_bytes)
            mean.seconds = math.sqrt(mean.seconds * seconds)
            mean.at, mean.trust = now, 1.0

    def observe_step(
        self, num_tokens: int, context: float, seconds: float, *, num_steps: int = 1
    ) -> None:
        """A prefill step (or several, timed as one): its tokens, and the sum over them of the
        positions before each."""
        seconds, self._compute = max(seconds, 1e-9), None
        per_step = num_tokens / num_steps
        self._largest_step = max(self._largest_step, per_step)
        self._largest_context = max(self._largest_context, context / num_tokens)
        cell = (round(math.log2(per_step)), round(math.log2(1 + context / num_tokens)))
        mean = self._steps.get(cell)
        scale = num_tokens / mean.num_tokens if mean else 1.0
        if mean is None or seconds < 0.5 * scale * mean.seconds:  # only noise is slower
            self._steps[cell] = _StepMean(num_steps, num_tokens, context, seconds)
            return
        mean.count += 1
        share = max(1 / mean.count, 0.2)
        mean.num_steps += share * (num_steps - mean.num_steps)
        mean.num_tokens += share * (num_tokens - mean.num_tokens)
        mean.context += share * (context - mean.context)
        mean.seconds += share * (seconds - mean.seconds)

    def begin_load(self, tier: TierName, num_bytes: int) -> None:
        """A load is submitted; it counts as queued until ``end_load``."""
        traffic = self._tiers[tier].traffic
        if traffic.num_loads == 0:
            traffic.busy_since, traffic.done_bytes = self._clock(), 0
        traffic.num_loads += 1
        traffic.queued_bytes += num_bytes

    def end_load(
        self, tier: TierName, num_bytes: int, *, began_at: float, ended_at: float, is_good: bool
    ) -> float:
        """The load has ended; returns how long it waited behind the load that ended before it.

        Loads that overlap share a tier's bandwidth, so what is observed is the whole time in which
        the tier was busy.
        """
        traffic = self._tiers[tier].traffic
        queued_s = min(max(0.0, traffic.ended_at - began_at), max(0.0, ended_at - began_at))
        traffic.ended_at = max(traffic.ended_at, ended_at)
        traffic.num_loads -= 1
        traffic.queued_bytes -= num_bytes
        if is_good:
            traffic.done_bytes += num_bytes
        busy_s = traffic.ended_at - traffic.busy_since
        if traffic.num_loads == 0 or busy_s > _LONG_BUSY_S:
            if traffic.done_bytes:
                self.observe_load(tier, traffic.done_bytes, busy_s)
            traffic.busy_since, traffic.done_bytes = traffic.ended_at, 0
        return queued_s

    def queued_bytes(self, tier: TierName) -> int:
        """Bytes of the loads under way."""
        return self._tiers[tier].traffic.queued_bytes

    # ---- what is believed ----------------------------------------------------------------------

    def load_estimate(self, tier: TierName) -> LoadEstimate:
        """Latency and bandwidth as the last loads had them."""
        cost = self._tiers[tier]
        if cost.estimate is None:
            cost.estimate = _fit_load(cost) if cost.means else cost.start
        return cost.estimate

    def compute_estimate(self) -> ComputeEstimate | None:
        """None until a step was observed."""
        if self._compute is None and self._steps:
            self._compute = _fit_compute(self._steps.values())
        return self._compute

    # ---- the decision --------------------------------------------------------------------------

    def choose(
        self,
        sources: Sequence[TierName],
        *,
        block_tokens: int,
        block_bytes: int,
        queued_bytes: Mapping[TierName, int] | None = None,
        may_probe: bool = True,
        skips_disk: bool = False,
    ) -> LoadDecision:
        """Where to cut a prefix whose blocks are found in ``sources``.

        ``queued_bytes`` are waited for before a load from their tier begins. A request that has
        followed a ``PROBE`` asks again, without ``may_probe``. With ``skips_disk`` disk was not
        asked, and may have more.
        """
        num_blocks = len(sources)
        runs = [(tier, len(list(run))) for tier, run in groupby(sources)]
        if all(tier is TierName.DEVICE for tier, _ in runs):
            reason = LoadReason.NEVER if skips_disk else LoadReason.NOTHING_TO_LOAD
            return LoadDecision(num_blocks, num_blocks, reason)
        if self.policy == "never":
            return LoadDecision(0, num_blocks, LoadReason.NEVER)

        block_s = {TierName.DEVICE: 0.0}  # to load one more block
        first_s = {TierName.DEVICE: 0.0}  # before the first one
        for tier in {tier for tier, _ in runs} - {TierName.DEVICE}:
            load = self.load_estimate(tier)
            block_s[tier] = block_bytes / load.bytes_per_s
            first_s[tier] = load.seconds((queued_bytes or {}).get(tier, 0))
        borders, loads = [0], [0.0]
        waited = dict(first_s)
        for tier, count in runs:
            borders.append(borders[-1] + count)
            loads.append(loads[-1] + waited.pop(tier, 0.0) + count * block_s[tier])

        def load_all(reason: LoadReason) -> LoadDecision:
            return LoadDecision(num_blocks, num_blocks, reason, loads[-1], 0.0, loads[-1])

        if self.policy == "always":
            return load_all(LoadReason.ALWAYS)
        compute = self.compute_estimate()
        num_tokens = num_blocks * block_tokens
        if compute is None or not self._reaches(num_tokens):
            return load_all(LoadReason.UNFITTED)

        def compute_s(cut: int) -> float:
            return compute.seconds(cut * block_tokens, num_tokens, self.chunk_tokens)

        costs = [load_s + compute_s(cut) for load_s, cut in zip(loads, borders, strict=True)]
        best = min(range(len(costs)), key=lambda i: (costs[i], -i))
        if best == len(runs):
            return load_all(LoadReason.LOAD)
        if costs[best] > (1 - _LEAST_GAIN) * loads[-1]:
            return load_all(LoadReason.SMALL_GAIN)
        cut, load_s = borders[best], loads[best]
        tier, count = runs[best]  # the first that is not loaded, hence not the device
        reason = LoadReason.PARTIAL if load_s else LoadReason.COMPUTE
        if may_probe and self._is_probe_due(tier):
            affordable = int((_PROBE_COST * compute_s(cut) - first_s[tier]) / block_s[tier])
            probed = min(count, max(1, affordable))
            cut, load_s = cut + probed, load_s + first_s[tier] + probed * block_s[tier]
            reason = LoadReason.PROBE
        return LoadDecision(cut, num_blocks, reason, load_s, compute_s(cut), loads[-1])

    def _reaches(self, num_tokens: int) -> bool:
        """Whether steps like those that would compute so many tokens have been seen."""
        step = min(num_tokens, self.chunk_tokens)
        return _REACH * self._largest_step >= step and _REACH * self._largest_context >= num_tokens

    def _is_probe_due(self, tier: TierName) -> bool:
        now, cost = self._clock(), self._tiers[tier]
        is_due = now - cost.tried_at >= _PROBE_EVERY_S or self.uniform() < _PROBE_SHARE
        if is_due:
            cost.tried_at = now
        return is_due


def _fit_load(cost: _TierCost) -> LoadEstimate:
    newest = max(mean.at for mean in cost.means.values())
    means = [
        (mean, mean.trust * math.exp((mean.at - newest) / _MEMORY_S))
        for mean in cost.means.values()
    ]
    # What the loads leave open, latency or bandwidth, is as far from the self-measurement as
    # they are on average.
    start, weight = cost.start, sum(w for _, w in means)
    off = sum(w * math.log(m.seconds / start.seconds(m.num_bytes)) for m, w in means)
    factor = math.exp(off / weight)
    latency, byte_s = factor * start.latency_s, factor / start.bytes_per_s
    open_ends = [
        ((1.0, 0.0), latency, _WEAK / latency**2),
        ((0.0, 1.0), byte_s, _WEAK / byte_s**2),
    ]
    for _ in range(_ROUNDS):  # errors are weighed by what was predicted, which they change
        rows = list(open_ends)
        for mean, w in means:
            predicted = latency + byte_s * mean.num_bytes
            rows.append(((1.0, mean.num_bytes), mean.seconds, w / predicted / mean.seconds))
        latency, byte_s = (max(each, 1e-15) for each in least_squares(rows))
    return LoadEstimate(latency, 1 / byte_s)


def _fit_compute(steps: Collection[_StepMean]) -> ComputeEstimate:
    rows: list[tuple[tuple[float, ...], float, float]] = []
    for mean in steps:
        features = (mean.num_steps, mean.num_tokens, mean.context)
        row = tuple(each / mean.seconds for each in features)
        rows.append((row, 1.0, min(mean.count, 4)))
    # Steps of one size do not tell what belongs to the step and what to its tokens: believe the
    # tokens, which makes computing dear rather than cheap.
    fastest = min(mean.seconds for mean in steps)
    rows.append(((1 / fastest, 0.0, 0.0), 0.0, _WEAK))
    return ComputeEstimate(*least_squares(rows))
