"""What every benchmark shares: the machine it ran on, summaries of samples, one JSON record a case.

A benchmark checks the answer before it reports a time, alternates its contenders within one run,
and reports medians and their ratios: on a shared machine a single time says little.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def summarize(samples: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile and maximum; no average, which one outlier decides."""
    ordered = sorted(samples)

    def rank(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "median": statistics.median(ordered),
        "p90": rank(0.90),
        "p99": rank(0.99),
        "max": ordered[-1],
        "runs": len(ordered),
    }


def machine() -> dict[str, Any]:
    """Where a figure comes from: processor, memory, load, commit, versions."""
    versions = {}
    for package in ("torch", "transformers", "triton", "lmdb", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": _commit(),
        **versions,
    }


def alternate(contenders: Mapping[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Samples of each contender, A B A B …, after one round that is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(runs + 1):
        for name, run in contenders.items():
            seconds = run()
            if number:
                samples[name].append(seconds)
    return samples


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median of the ratios of samples taken side by side: drift of the machine cancels out."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def parse_arguments(description: str, *more: tuple[str, Any]) -> argparse.Namespace:
    """``--json``, ``--runs`` and what a benchmark adds as ("--name", default)."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    for name, default in more:
        kind = type(default) if default is not None else str
        parser.add_argument(name, type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


def report(name: str, records: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    """Print records as JSON lines, or as a table for people."""
    if arguments.json:
        for record in records:
            print(json.dumps({"benchmark": name, **record, "machine": machine()}))
        return
    print(f"{name} on {machine()['cpu']}, {machine()['cores']} cores, load {machine()['load']:.1f}")
    for record in records:
        print("  " + "  ".join(f"{key} {_text(value)}" for key, value in record.items()))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or None
