"""Where a curve stops being worth it, and a sentence that says so."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from kvstore.planning.plan import CurvePoint, Outcome

_WORTH = 0.03  # of all prefill tokens, for which it is worth doubling a cache


def knee(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The point farthest above the line from nothing to the last point, both axes linear.

    Satopää, Albrecht, Irwin and Raghavan, "Finding a kneedle in a haystack", 2011. None when no
    point lies above it.
    """
    if not points:
        return None
    last = points[-1]

    def height(point: CurvePoint) -> float:
        share = point.capacity_blocks / last.capacity_blocks
        return point.outcome.hit_ratio_tokens - share * last.outcome.hit_ratio_tokens

    best = max(points, key=height)
    return best if height(best) > 0 else None


def recommended(points: Sequence[CurvePoint]) -> CurvePoint | None:
    """The largest cache whose last doubling saves 3 % of prefill; else the smallest that does."""
    paying = (point for point in points if point.outcome.hit_ratio_tokens >= _WORTH)
    best = next(paying, None)
    for smaller, larger in pairwise(points):
        doublings = math.log2(larger.capacity_blocks / smaller.capacity_blocks)
        gain = larger.outcome.hit_ratio_tokens - smaller.outcome.hit_ratio_tokens
        if best is not None and gain >= _WORTH * doublings:
            best = larger
    return best


def recommendation(
    points: Sequence[CurvePoint],
    unlimited: Outcome,
    *,
    tier: str,
    size_of: Callable[[int], str],
) -> str:
    """One sentence, with the same claims as the curve. ``size_of`` names a number of blocks."""
    best = recommended(points)
    if best is None:
        most = points[-1].outcome if points else unlimited
        return (
            f"No size pays: the largest, {tier} {size_of(points[-1].capacity_blocks)}, saves "
            f"{_percent(most.hit_ratio_tokens)} of prefill, one that never evicts "
            f"{_percent(unlimited.hit_ratio_tokens)}."
        )
    saved = best.outcome.hit_ratio_tokens
    says = f"{tier} {size_of(best.capacity_blocks)} saves {_percent(saved)} of prefill"
    larger = [point for point in points if point.capacity_blocks > best.capacity_blocks]
    if larger:
        more = larger[0].outcome.hit_ratio_tokens - saved
        step = size_of(larger[0].capacity_blocks - best.capacity_blocks)
        return f"{says}; the next {step} save {_percent(more)} more."
    return f"{says}; one that never evicts would save {_percent(unlimited.hit_ratio_tokens)}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"
