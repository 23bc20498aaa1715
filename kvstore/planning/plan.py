"""What caches of many sizes would do for a trace: one pass for LRU, simulations for the rest."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.block import TierName
from kvstore.errors import ConfigError, TraceError
from kvstore.planning.first_token import FirstTokenHistogram, FirstTokenTimes, first_token_s
from kvstore.planning.hardware import HardwareProfile
from kvstore.planning.lru_curve import LruCurve, Misses
from kvstore.planning.request_batch import Ints, RequestBatch
from kvstore.planning.sampling import BlockSampler
from kvstore.planning.simulation import CacheSetup, Simulation
from kvstore.planning.spool import Spool
from kvstore.planning.stack_distance import COLD
from kvstore.policy import POLICIES

_GRID = tuple(2**k for k in range(36))
_NUM_POINTS = 14  # of the grid, from the distinct blocks downwards, each half the one before


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """``unique_blocks`` is an estimate when only a sample was looked at."""

    requests: int
    blocks: int
    tokens: int
    unique_blocks: int
    block_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cache saves of a trace. Ratios are of all input blocks and of all input tokens.

    error_blocks, error_tokens   half of the 95 % intervals of the ratios, 0 without sampling
    first_token                  estimated times, None without hardware or when only a sample was
                                 looked at, whose requests are incomplete
    """

    hit_blocks: float
    hit_tokens: float
    hit_ratio_blocks: float
    hit_ratio_tokens: float
    error_blocks: float
    error_tokens: float
    first_token: FirstTokenTimes | None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    capacity_blocks: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """A split of blocks over tiers. ``hit_tokens``, ``hit_blocks`` by the tier that had them."""

    setup: CacheSetup
    outcome: Outcome
    hit_blocks: Mapping[TierName, float]
    hit_tokens: Mapping[TierName, float]
    written_blocks: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is known of a trace and its caches.

    curves         by policy, in the order asked for
    splits         of blocks over tiers, in the order asked for
    unlimited      a cache that never evicts: what it misses are first uses
    without_cache  times to the first token when everything is computed
    sample_rate    share of the blocks that were looked at, 1.0 for all
    behind_hole    block references that a smaller cache would have held than the block before them:
                   0 in a trace of prefix keys. Sampling is exact on average only without them
    """

    trace: TraceSummary
    curves: Mapping[str, Sequence[CurvePoint]]
    splits: Sequence[TierOutcome]
    unlimited: Outcome
    without_cache: FirstTokenTimes | None
    sample_rate: float
    sampled_blocks: int
    behind_hole: int


def make_plan(
    batches: Iterable[RequestBatch],
    *,
    capacities: Sequence[int] | None = None,
    policies: Sequence[str] = ("lru",),
    setups: Sequence[CacheSetup] = (),
    hardware: HardwareProfile | None = None,
    tier: TierName = TierName.HOST,
    sampler: BlockSampler | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Run a trace through caches.

    capacities   in blocks; by default powers of two up to the trace's distinct blocks
    policies     for the curves: ``lru`` comes from one pass over the trace, others are simulated
    setups       splits over tiers, simulated
    hardware     for times to the first token; without it there are none
    tier         which one the curves' blocks are loaded from
    sampler      a sample of the blocks instead of all
    progress     called now and then with what is going on

    Raises ``ConfigError`` for settings, ``TraceError`` for a trace without requests.
    """
    for capacity in capacities or ():
        if capacity < 1:
            raise ConfigError(f"capacity_blocks: expected at least 1, got {capacity}")
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"policy: expected some of {', '.join(POLICIES)}, got {policy!r}")
    is_simulated = bool(setups) or any(policy != "lru" for policy in policies)
    planner = _Planner(capacities, hardware, tier, sampler or BlockSampler(), is_simulated)
    for batch in batches:
        planner.add(batch)
        progress(f"{planner.requests:,} requests, {planner.curve.num_blocks:,} blocks")
    if not planner.requests:
        raise TraceError("the trace has no requests")
    return planner.plan(policies, setups, progress)


class _Planner:
    def __init__(
        self,
        capacities: Sequence[int] | None,
        hardware: HardwareProfile | None,
        tier: TierName,
        sampler: BlockSampler,
        is_simulated: bool,
    ) -> None:
        self.curve = LruCurve(sampler)
        self.requests = 0
        self._capacities = sorted(set(capacities)) if capacities else None
        self._hardware = hardware
        self._tier = tier
        self._tokens = 0
        self._block_tokens = 0
        self._ended_s = 0.0
        sizes: tuple[int | None, ...] = (None, 0, *(self._capacities or _GRID))
        self._times = {size: FirstTokenHistogram() for size in sizes}  # None for no limit
        self._spool = Spool() if is_simulated else None

    def add(self, batch: RequestBatch) -> None:
        self.requests += len(batch)
        self._tokens += int(batch.num_tokens.sum())
        self._block_tokens = batch.block_tokens
        if len(batch):
            self._ended_s = float(batch.arrival_s[-1])
        above = self.curve.add(batch)
        if above is not None:
            self._time(batch, above)
        if self._spool is not None:
            self._spool.add(batch, self.curve.sampler)

    def plan(
        self,
        policies: Sequence[str],
        setups: Sequence[CacheSetup],
        progress: Callable[[str], None],
    ) -> Plan:
        capacities = self._capacities or self._default_capacities()
        num_simulated = sum(policy != "lru" for policy in policies) * len(capacities) + len(setups)
        done = 0

        def simulate(setup: CacheSetup, *, as_tier: TierName | None = None) -> TierOutcome:
            nonlocal done
            done += 1
            progress(f"simulation {done} of {num_simulated}: {setup.policy}")
            return self._simulate(setup, as_tier)

        curves: dict[str, list[CurvePoint]] = {}
        for policy in policies:
            if policy == "lru":
                curves[policy] = [CurvePoint(size, self._lru(size)) for size in capacities]
            else:
                curves[policy] = [
                    CurvePoint(
                        size,
                        simulate(CacheSetup(size, policy=policy), as_tier=self._tier).outcome,
                    )
                    for size in capacities
                ]
        return Plan(
            self._summary(),
            curves,
            [simulate(setup) for setup in setups],
            self._lru(None),
            self._times_of(0),
            self.curve.sampler.rate,
            self.curve.distances.num_blocks,
            self.curve.distances.num_behind_hole,
        )

    def _summary(self) -> TraceSummary:
        return TraceSummary(
            self.requests,
            self.curve.num_blocks,
            self._tokens,
            round(self.curve.num_unique),
            self._block_tokens,
            self._ended_s,
        )

    def _default_capacities(self) -> list[int]:
        num_unique = max(1, round(self.curve.num_unique))
        below = [size for size in _GRID if size < num_unique]
        return [*below[-_NUM_POINTS:], num_unique]

    # ---- LRU ---------------------------------------------------------------------------------

    def _time(self, batch: RequestBatch, above: Ints) -> None:
        """Add a batch to the distributions of times, one for each capacity."""
        if self._hardware is None:
            return
        tokens = batch.tokens_of_block()

        def seconds(capacity: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            assert self._hardware is not None
            cached = batch.per_request(np.where(above < capacity, tokens, 0))
            return first_token_s(self._hardware, batch.num_tokens, {self._tier: cached})

        unlimited = seconds(COLD)
        for size, times in self._times.items():
            if size is None or size >= self.curve.distances.num_blocks:
                times.add(unlimited)
            else:
                times.add(seconds(size))

    def _lru(self, capacity: int | None) -> Outcome:
        is_all = capacity is not None and capacity >= self.curve.num_unique
        missed = self.curve.misses(None if is_all else capacity)
        return self._outcome(missed, self._times_of(None if is_all else capacity))

    def _times_of(self, capacity: int | None) -> FirstTokenTimes | None:
        return self._times[capacity].times() if self.curve.sampler.rate == 1 else None

    def _outcome(self, missed: Misses, times: FirstTokenTimes | None) -> Outcome:
        blocks, tokens = max(1, self.curve.num_blocks), max(1, self._tokens)
        hit_blocks = max(0.0, self.curve.num_blocks - missed.blocks)
        hit_tokens = max(0.0, self.curve.num_tokens - missed.tokens)
        return Outcome(
            hit_blocks,
            hit_tokens,
            hit_blocks / blocks,
            hit_tokens / tokens,
            missed.error_blocks / blocks,
            missed.error_tokens / tokens,
            times,
        )

    # ---- simulation --------------------------------------------------------------------------

    def _simulate(self, setup: CacheSetup, as_tier: TierName | None) -> TierOutcome:
        """``as_tier``: count all hits as that tier's."""
        assert self._spool is not None
        rate = self.curve.sampler.rate
        times = FirstTokenHistogram()
        blocks, tokens = dict.fromkeys(TierName, 0.0), dict.fromkeys(TierName, 0.0)
        with Simulation(setup.scaled(rate)) as simulation:
            for batch, tokens_of_block in self._spool.batches(self.curve.sampler):
                replayed = simulation.replay(batch, tokens_of_block)
                for tier, counts in replayed.blocks.items():
                    blocks[as_tier or tier] += int(counts.sum()) / rate
                    tokens[as_tier or tier] += int(replayed.tokens[tier].sum()) / rate
                if rate == 1 and self._hardware is not None:
                    cached = replayed.tokens
                    if as_tier is not None:
                        cached = {as_tier: np.sum(list(cached.values()), axis=0)}
                    times.add(first_token_s(self._hardware, batch.num_tokens, cached))
            written = simulation.written_blocks / rate
        # As in the curve: of a sample it is the misses that stand for the whole.
        all_blocks, all_tokens = self._spool.totals
        missed = Misses(
            (all_blocks / rate) - sum(blocks.values()),
            (all_tokens / rate) - sum(tokens.values()),
        )
        outcome = self._outcome(missed, times.times())
        return TierOutcome(setup, outcome, blocks, tokens, written)
