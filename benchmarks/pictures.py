"""Pictures of results, legible in black and white: lines differ by marker and dash, not colour."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed to write a file

import matplotlib.pyplot as plt
from harness import Record, misses_goal
from matplotlib.ticker import LogLocator

_DASHES = {"median": "-", "p90": "--", "p99": ":"}
_FACES = {"uniform": "black", "zipf": "white"}
_MARKERS = {"uniform": "o", "zipf": "^"}
_HATCHES = {"device": "", "host": "//", "disk": "..", "computed": "xx"}
_GREYS = {"device": "0.25", "host": "0.5", "disk": "0.75", "computed": "1.0"}
# Of what a benchmark varies: tells records of one case apart.
_VARIED = ("value_bytes", "durability", "page_cache", "blocks", "document_tokens", "disk_mb_per_s")


def draw_goals(records: Sequence[Record], path: Path) -> None:
    """Every ratio over its goal: left of the line is better."""
    shown = [record for record in records if record.get("goal")]
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.28 * len(shown)))
    for place, record in enumerate(reversed(shown)):
        worse = record["ratio"] / record["goal"]
        if record["goal_is"] == "at least":
            worse = 1 / worse
        face = "white" if misses_goal(record) else "black"
        axes.plot(worse, place, "o", color="black", markerfacecolor=face)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(shown)))
    axes.set_yticklabels([_name(record, shown) for record in reversed(shown)], fontsize=8)
    axes.set_title("Every ratio over its goal", fontsize=10)
    axes.set_xlabel("left of 1 the goal is met; hollow: it is missed")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    _save(figure, path)


def draw_offload(records: Sequence[Record], path: Path) -> None:
    """Times to the first token, throughput, and where prompts were found, over the size of the
    working set."""
    tiers = list(dict.fromkeys(record["tier"] for record in records))
    kinds = list(dict.fromkeys(record["popularity"] for record in records))
    figure, rows = plt.subplots(
        3, len(tiers), figsize=(1.8 + 4.0 * len(tiers), 9), sharey="row", squeeze=False
    )
    for column, tier in enumerate(tiers):
        times, speeds, shares = (row[column] for row in rows)
        for kind in kinds:
            line = _points(records, tier=tier, popularity=kind)
            where = [record["multiple"] for record in line]
            look = {"color": "black", "marker": _MARKERS[kind], "markerfacecolor": _FACES[kind]}
            for statistic, dash in _DASHES.items():
                values = [1e3 * record["ttft_s"][statistic] for record in line]
                times.plot(where, values, dash, label=f"{kind}, {statistic}", **look)
            values = [record["tokens_per_s"] for record in line]
            speeds.plot(where, values, "-", label=kind, **look)
        line = _points(records, tier=tier, popularity=kinds[0])
        where = [record["multiple"] for record in line]
        plain = {"color": "0.6", "linewidth": 3, "zorder": 1.5}
        recomputed = [1e3 * record["recompute_ttft_s"]["median"] for record in line]
        times.plot(where, recomputed, label="recomputing, median", **plain)
        recomputed = [record["recompute_tokens_per_s"] for record in line]
        speeds.plot(where, recomputed, label="recomputing", **plain)
        times.set_title(f"slowest tier: {tier}", fontsize=10)
        for axes in (times, speeds):
            axes.set_xscale("log")
            axes.set_xticks(where, [f"{multiple:g}" for multiple in where])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.grid(color="0.9")
        _draw_shares(shares, records, tier, kinds)
    for row, label in zip(
        rows,
        ("time to first token, ms", "prompt tokens a second", "share of prompt tokens"),
        strict=True,
    ):
        row[0].set_ylabel(label)
        row[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.supxlabel("working set over the capacity of the slowest tier", fontsize=10)
    _save(figure, path)


def _draw_shares(axes: Any, records: Sequence[Record], tier: str, kinds: Sequence[str]) -> None:
    """Stacked bars, one for each multiple, popularities apart."""
    places: list[float] = []
    bars: list[Record] = []
    for kind in kinds:
        line = _points(records, tier=tier, popularity=kind)
        first = len(bars) + (1 if bars else 0)
        places += range(first, first + len(line))
        bars += line
        middle = first + (len(line) - 1) / 2
        axes.text(middle, 1.02, kind, ha="center", fontsize=9)
    bottom = [0.0] * len(bars)
    for source, grey in _GREYS.items():
        heights = [record["hit_share"].get(source, 0.0) for record in bars]
        axes.bar(
            places,
            heights,
            bottom=bottom,
            color=grey,
            edgecolor="black",
            linewidth=0.5,
            hatch=_HATCHES[source],
            label=source,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [f"{record['multiple']:g}" for record in bars])
    axes.set_ylim(0, 1.1)


def _points(records: Sequence[Record], **where: Any) -> list[Record]:
    found = [r for r in records if all(r.get(name) == value for name, value in where.items())]
    return sorted(found, key=lambda record: record["multiple"])


def _name(record: Record, among: Sequence[Record]) -> str:
    """Benchmark and case, and what tells it from others of the same case."""
    same = [
        r for r in among if (r["benchmark"], r["case"]) == (record["benchmark"], record["case"])
    ]
    told = [
        f"{name} {record[name]}"
        for name in _VARIED
        if name in record and len({other.get(name) for other in same}) > 1
    ]
    over = [f"over {record['over']}"] if "over" in record else []
    return ", ".join([f"{record['benchmark']}: {record['case']}", *over, *told])


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
