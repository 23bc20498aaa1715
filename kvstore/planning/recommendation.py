"""Where a curve stops being worth it, and a sentence that says so."""

import math
from collections.abc import Callable, Sequence

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
    best = None
    for i, point in enumerate(points):
        saved = point.outcome.hit_ratio_tokens
        if saved < _WORTH:
            continue
        # A curve ends at the trace's distinct blocks, hardly beyond the point before: what a few
        # blocks more bring there says nothing of a doubling.
        most = point.capacity_blocks / 2
        halves = (each for each in reversed(points[:i]) if each.capacity_blocks <= most)
        half = next(halves, points[0])
        doublings = math.log2(point.capacity_blocks / half.capacity_blocks)
        if best is None or saved - half.outcome.hit_ratio_tokens >= _WORTH * doublings:
            best = point
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
