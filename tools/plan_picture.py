"""A plan's curves as a picture that survives a black-and-white printer."""

from pathlib import Path

import click

from kvstore.errors import ConfigError
from kvstore.planning import HardwareProfile, Plan, knee

_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))
_SUFFIXES = (".png", ".svg")


def check_picture(path: Path) -> None:
    """Before the work: matplotlib is there and the file's name says which kind it is."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"plot: {path} should end in {' or '.join(_SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"plot: there is no directory {path.resolve().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from None


def draw(plan: Plan, hardware: HardwareProfile, path: Path, title: str) -> None:
    """Tokens saved over the size of the cache, and the time to the first token where it is known.

    Curves differ by line and marker, not by colour alone.
    """
    from matplotlib.figure import Figure

    block_gib = plan.trace.block_tokens * hardware.bytes_per_token / 2**30
    has_times = plan.unlimited.first_token is not None
    figure = Figure(figsize=(7.0, 6.4 if has_times else 3.8), layout="constrained")
    axes = figure.subplots(2 if has_times else 1, 1, sharex=True, squeeze=False)[:, 0]
    hits = axes[0]
    for (policy, points), (line, marker) in zip(plan.curves.items(), _STYLES, strict=False):
        sizes = [point.capacity_blocks * block_gib for point in points]
        ratios = [100 * point.outcome.hit_ratio_tokens for point in points]
        errors = [100 * point.outcome.error_tokens for point in points]
        hits.errorbar(
            sizes, ratios, yerr=errors if any(errors) else None, capsize=3, color="black",
            linestyle=line, marker=marker, markersize=5, markerfacecolor="white", label=policy,
        )  # fmt: skip
        if (best := knee(points)) is not None:
            hits.plot(
                best.capacity_blocks * block_gib, 100 * best.outcome.hit_ratio_tokens,
                marker=marker, markersize=9, color="black", zorder=3,
            )  # fmt: skip
    hits.axhline(100 * plan.unlimited.hit_ratio_tokens, color="0.5", linewidth=0.8)
    hits.annotate(
        "never evicts", (0.01, 100 * plan.unlimited.hit_ratio_tokens), xytext=(0, -10),
        xycoords=("axes fraction", "data"), textcoords="offset points", color="0.3", fontsize=8,
    )  # fmt: skip
    hits.set_ylabel("prefill tokens saved (%)")
    hits.set_ylim(bottom=0)
    hits.set_title(title, fontsize=9, loc="left")
    hits.legend(frameon=False, loc="lower right", title="filled: the knee")
    if has_times:
        _draw_times(plan, axes[1], block_gib)
    for each in axes:
        each.set_xscale("log", base=2)
        each.grid(color="0.9")
        each.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(f"size of the cache (GiB, {hardware.model})")
    axes[-1].xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_times(plan: Plan, axes: "object", block_gib: float) -> None:
    """Quantiles of the first policy's curve."""
    from matplotlib.axes import Axes
    from matplotlib.ticker import LogLocator, NullFormatter

    assert isinstance(axes, Axes)
    policy, points = next(iter(plan.curves.items()))
    timed = [(p.capacity_blocks * block_gib, p.outcome.first_token) for p in points]
    for name, (line, marker) in zip(("p99_s", "p90_s", "median_s"), _STYLES, strict=False):
        axes.plot(
            [size for size, times in timed if times],
            [getattr(times, name) for _, times in timed if times],
            color="black", linestyle=line, marker=marker, markersize=4, markerfacecolor="white",
            label=name.removesuffix("_s"),
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"time to first token (s), {policy}")
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
