"""A plan as JSON, as CSV and as a table."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvstore.block import TierName
from kvstore.planning import (
    CurvePoint,
    HardwareProfile,
    Outcome,
    Plan,
    TierOutcome,
    knee,
    recommendation,
)
from tools.sizes import format_bytes, format_count

_TIMES = ("mean_s", "median_s", "p90_s", "p99_s")


class PlanReport:
    """One plan, for the hardware it was made for, its curves loaded from ``tier``."""

    def __init__(self, plan: Plan, hardware: HardwareProfile, tier: TierName) -> None:
        self._plan = plan
        self._hardware = hardware
        self._tier = tier
        self._block_bytes = plan.trace.block_tokens * hardware.bytes_per_token

    # ---- JSON ----------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        plan = self._plan
        curves = {policy: self._curve(points) for policy, points in plan.curves.items()}
        first = next(iter(curves))
        best = knee(plan.curves[first])
        sampling = None
        if plan.sample_rate < 1:
            sampling = {
                "rate": plan.sample_rate,
                "sampled_blocks": plan.sampled_blocks,
                "confidence": 0.95,
            }
        return {
            "trace": asdict(plan.trace),
            "policy": first,
            "curve": curves[first],
            "policies": [{"policy": name, "curve": curve} for name, curve in curves.items()],
            "tiers": [self._split(split) for split in plan.splits],
            "unlimited": self._outcome(plan.unlimited),
            "without_cache": {"ttft": _times(plan.without_cache)},
            "knee": None if best is None else {"capacity_blocks": best.capacity_blocks},
            "recommendation": self.recommendation(),
            "sampling": sampling,
            "blocks_behind_hole": plan.behind_hole,
            "hardware": {
                "name": self._hardware.name,
                "model": self._hardware.model,
                "bytes_per_token": self._hardware.bytes_per_token,
                "loaded_from": self._tier.value,
                "source": self._hardware.source,
            },
        }

    def recommendation(self) -> str:
        """Of the first policy's curve."""
        points = next(iter(self._plan.curves.values()))
        return recommendation(
            points, self._plan.unlimited, tier=self._tier.value, size_of=self.size_of
        )

    def size_of(self, num_blocks: int) -> str:
        return format_bytes(num_blocks * self._block_bytes).replace(".0 ", " ")

    def _curve(self, points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
        return [
            {
                "capacity_blocks": point.capacity_blocks,
                "capacity_bytes": point.capacity_blocks * self._block_bytes,
                **self._outcome(point.outcome),
            }
            for point in points
        ]

    def _split(self, split: TierOutcome) -> dict[str, Any]:
        tiers = ("device", "host", "disk")
        return {
            "policy": split.setup.policy,
            "write_policy": split.setup.write_policy,
            "device_blocks": split.setup.device_blocks,
            "host_blocks": split.setup.host_blocks,
            "disk_blocks": split.setup.disk_blocks,
            **self._outcome(split.outcome),
            "hit_blocks_by_tier": {tier: round(split.hit_blocks[TierName(tier)]) for tier in tiers},
            "hit_tokens_by_tier": {tier: round(split.hit_tokens[TierName(tier)]) for tier in tiers},
            "written_blocks": round(split.written_blocks),
        }

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "hit_ratio_blocks": outcome.hit_ratio_blocks,
            "hit_ratio_tokens": outcome.hit_ratio_tokens,
            "error_blocks": outcome.error_blocks,
            "error_tokens": outcome.error_tokens,
            "hit_blocks": round(outcome.hit_blocks),
            "saved_prefill_tokens": round(outcome.hit_tokens),
            "ttft": _times(outcome.first_token),
        }

    # ---- CSV -----------------------------------------------------------------------------------

    def as_csv(self) -> str:
        """One row a point of a curve, then one a split; a column that says nothing is empty."""
        report = self.as_json()
        rows = [
            {"policy": curve["policy"], **point}
            for curve in report["policies"]
            for point in curve["curve"]
        ]
        columns = [name for name in ("policy", *report["curve"][0]) if name != "ttft"]
        if report["tiers"]:
            rows += report["tiers"]
            columns[1:1] = ["write_policy", "device_blocks", "host_blocks", "disk_blocks"]
            columns += ["device_tokens", "host_tokens", "disk_tokens", "written_blocks"]
        columns += [f"ttft_{name}" for name in _TIMES]
        for row in rows:
            row |= {f"ttft_{name}": value for name, value in (row["ttft"] or {}).items()}
            for tier, tokens in row.get("hit_tokens_by_tier", {}).items():
                row[f"{tier}_tokens"] = tokens
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().rstrip("\n")

    # ---- for people ----------------------------------------------------------------------------

    def as_text(self) -> str:
        plan, trace = self._plan, self._plan.trace
        about = "about " if plan.sample_rate < 1 else ""
        lines = [
            f"trace       {format_count(trace.requests, 'request')}, "
            f"{format_count(trace.tokens, 'token')}, {format_count(trace.blocks, 'block')} of "
            f"{format_count(trace.block_tokens, 'token')}, "
            f"{about}{trace.unique_blocks:,} of them distinct",
            f"cache       {self._hardware.model}: {format_bytes(self._hardware.bytes_per_token)} "
            f"a token, {self.size_of(1)} a block",
            f"hardware    {self._hardware.name}, blocks loaded from {self._tier.value} "
            f"({self._hardware.source})",
        ]
        if plan.sample_rate < 1:
            lines.append(
                f"sample      {100 * plan.sample_rate:.3g} % of the blocks, "
                f"{plan.sampled_blocks:,}; ± is half of the 95 % interval"
            )
        if plan.behind_hole and plan.sample_rate < 1:
            lines.append(
                f"            {format_count(plan.behind_hole, 'reference')} to what follows "
                "a block that a smaller cache would have lost: the ids are no prefix hashes, "
                "and the sample may flatter"
            )
        for policy, points in plan.curves.items():
            best = knee(points)
            marks = {} if best is None else {best.capacity_blocks: "knee"}
            lines += ["", f"{policy}", *self._table(points, marks)]
        if plan.splits:
            lines += ["", *self._split_table()]
        lines += ["", self.recommendation()]
        return "\n".join(lines)

    def _table(self, points: Sequence[CurvePoint], marks: dict[int, str]) -> list[str]:
        plan = self._plan
        rows = [["size", "blocks", *_HEADS]]
        rows.append(["none", "0", *_cells(None, plan.without_cache)])
        for point in points:
            cells = [self.size_of(point.capacity_blocks), f"{point.capacity_blocks:,}"]
            outcome = point.outcome
            mark = marks.get(point.capacity_blocks, "")
            rows.append([*cells, *_cells(outcome, outcome.first_token), mark])
        rows.append(
            ["no limit", "", *_cells(plan.unlimited, plan.unlimited.first_token), "first uses only"]
        )
        return _aligned(rows)

    def _split_table(self) -> list[str]:
        rows = [["device", "host", "disk", "policy", "writes", *_HEADS, "by tier", "written"]]
        for split in self._plan.splits:
            setup, outcome = split.setup, split.outcome
            sizes = (setup.device_blocks, setup.host_blocks, setup.disk_blocks)
            tokens = max(1, self._plan.trace.tokens)
            shares = [
                f"{100 * split.hit_tokens[tier] / tokens:.1f}"
                for tier in (TierName.DEVICE, TierName.HOST, TierName.DISK)
            ]
            rows.append(
                [
                    *(self.size_of(size) if size else "-" for size in sizes),
                    setup.policy,
                    setup.write_policy,
                    *_cells(outcome, outcome.first_token),
                    " + ".join(shares),
                    f"{round(split.written_blocks):,}",
                ]
            )
        return _aligned(rows)


_HEADS = ("hit blocks", "hit tokens", "saved tokens", "ttft p50", "p90", "p99")


def _cells(outcome: Outcome | None, times: Any) -> list[str]:
    ratios = ["-", "-", "0"]
    if outcome is not None:
        ratios = [
            _ratio(outcome.hit_ratio_blocks, outcome.error_blocks),
            _ratio(outcome.hit_ratio_tokens, outcome.error_tokens),
            f"{round(outcome.hit_tokens):,}",
        ]
    if times is None:
        return [*ratios, "-", "-", "-"]
    return [*ratios, *map(_seconds, (times.median_s, times.p90_s, times.p99_s))]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _ratio(value: float, error: float) -> str:
    return f"{100 * value:.1f} %" + (f" ± {100 * error:.1f}" if error else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    width = max(map(len, rows))
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        "  ".join(f"{cell:>{size}}" for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in full
    ]


def _times(times: Any) -> dict[str, float] | None:
    return None if times is None else asdict(times)
