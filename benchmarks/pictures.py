"""Pictures of results, legible in black and white: lines differ by marker and dash, not colour."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file

import matplotlib.pyplot as plt
from harness import Record, misses_goal

_LINES = [("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("x", "--"), ("*", ":")]
_HATCHES = {"device": "", "host": "//", "disk": "..", "computed": "xx"}
_GREYS = {"device": "0.25", "host": "0.5", "disk": "0.75", "computed": "1.0"}


def draw_goals(records: Sequence[Record], path: Path) -> None:
    """Every ratio over its goal: left of the line is better."""
    shown = [record for record in records if record.get("goal")]
    figure, axes = plt.subplots(figsize=(8, 0.8 + 0.28 * len(shown)))
    for place, record in enumerate(reversed(shown)):
        worse = record["ratio"] / record["goal"]
        if record["goal_is"] == "at least":
            worse = 1 / worse
        face = "white" if misses_goal(record) else "black"
        axes.plot(worse, place, "o", color="black", markerfacecolor=face)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(shown)))
    axes.set_yticklabels([_name(record) for record in reversed(shown)], fontsize=8)
    axes.set_xlabel("measured over goal; left of 1 it is met (hollow: missed)")
    axes.grid(axis="x", which="both", color="0.9")
    _save(figure, path)


def draw_offload(records: Sequence[Record], path: Path) -> None:
    """Time to the first token, and where prompts were found, over the size of the working set."""
    tiers = list(dict.fromkeys(record["tier"] for record in records))
    kinds = list(dict.fromkeys(record["popularity"] for record in records))
    figure, rows = plt.subplots(
        2, len(tiers), figsize=(4.2 * len(tiers), 6.4), sharey="row", squeeze=False
    )
    for column, tier in enumerate(tiers):
        above, below = rows[0][column], rows[1][column]
        styles = cycle(_LINES)
        for kind in kinds:
            line = _points(records, tier=tier, popularity=kind)
            where = [record["multiple"] for record in line]
            for statistic in ("median", "p90"):
                marker, dash = next(styles)
                times = [1e3 * record["ttft_s"][statistic] for record in line]
                label = f"{kind}, {statistic}"
                above.plot(where, times, dash, marker=marker, color="black", label=label)
        line = _points(records, tier=tier, popularity=kinds[0])
        recomputed = [1e3 * record["recompute_ttft_s"]["median"] for record in line]
        above.plot([r["multiple"] for r in line], recomputed, color="0.6", label="recomputing")
        above.set(title=f"slowest tier: {tier}", xscale="log", yscale="log")
        above.set_xticks(where, [f"{multiple:g}" for multiple in where])
        above.minorticks_off()
        _draw_shares(below, records, tier, kinds)
    rows[0][0].set_ylabel("time to first token, ms")
    rows[1][0].set_ylabel("share of prompt tokens")
    for row in rows:
        row[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.supxlabel("working set over the capacity of the slowest tier", fontsize=9)
    _save(figure, path)


def _draw_shares(axes: Any, records: Sequence[Record], tier: str, kinds: Sequence[str]) -> None:
    """Stacked bars, one for each multiple and popularity."""
    bars = [record for kind in kinds for record in _points(records, tier=tier, popularity=kind)]
    names = [f"{record['popularity'][0]} {record['multiple']:g}" for record in bars]
    bottom = [0.0] * len(bars)
    for source, grey in _GREYS.items():
        heights = [record["hit_share"].get(source, 0.0) for record in bars]
        axes.bar(
            names,
            heights,
            bottom=bottom,
            color=grey,
            edgecolor="black",
            linewidth=0.5,
            hatch=_HATCHES[source],
            label=source,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", labelsize=7, rotation=60)


def _points(records: Sequence[Record], **where: Any) -> list[Record]:
    found = [r for r in records if all(r.get(name) == value for name, value in where.items())]
    return sorted(found, key=lambda record: record["multiple"])


def _name(record: Record) -> str:
    over = f" / {record['over']}" if "over" in record else ""
    return f"{record['benchmark']}: {record['case']}{over}"


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
