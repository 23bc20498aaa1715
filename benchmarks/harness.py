"""What every benchmark shares: its options, the machine it ran on, summaries, one JSON line a case.

A benchmark is a file ``bench_NAME.py`` with ``OPTIONS``, the defaults of what it can be asked, and
``measure(arguments)``, which returns records. It checks the answer before it reports a time,
alternates its contenders within one run, and reports medians and their ratios: on a shared machine
a single time says little.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Sets how threads of OpenMP wait, before torch is loaded; other systems' processes inherit it, and
# transformers is fastest with it, too.
import engine  # noqa: F401

_ROOT = Path(__file__).parents[1]

Record = dict[str, Any]
Measure = Callable[[argparse.Namespace], list[Record]]

# Of every JSON line. A change that would mislead a reader of old lines gets the next number.
SCHEMA = 1
_MACHINE = {"cpu": str, "cores": int, "memory_gib": float, "load": float, "python": str}


def main(doc: str | None, measure: Measure, options: Mapping[str, Any]) -> None:
    """What a benchmark does when it is run by itself: options in, records out."""
    arguments = parse_arguments(doc or "", options)
    name = Path(sys.argv[0]).stem.removeprefix("bench_").replace("_", "-")
    where = machine()  # its load before ours
    command = shlex.join(["kvstore", "bench", name, *(a for a in sys.argv[1:] if a != "--json")])
    records = [record | {"command": command} for record in measure(arguments)]
    report(name, records, where, arguments.json)


def parse_arguments(description: str, options: Mapping[str, Any]) -> argparse.Namespace:
    """``--json``, and an option for each default: ``num_documents`` is ``--num-documents``."""
    parser = argparse.ArgumentParser(
        description=description.partition("\n\n")[0],
        epilog=description.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line on stdout")
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        kind = str if default is None else type(default)
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    return parser.parse_args()


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


def machine() -> Record:
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


def report(name: str, records: Sequence[Mapping[str, Any]], where: Record, as_json: bool) -> None:
    """Print records as JSON lines, or as text for people.

    What a record read from disk was in the page cache unless it says otherwise.
    """
    if as_json:
        for record in records:
            line = {"schema": SCHEMA, "benchmark": name, "page_cache": "warm", **record}
            print(json.dumps({**line, "machine": where}))
        return
    print(f"{name} on {where['cpu']}, {where['cores']} cores, load {where['load']:.1f}")
    for record in records:
        shown = {key: value for key, value in record.items() if key != "command"}
        print("  " + "  ".join(f"{key} {text(value)}" for key, value in shown.items()))


def problems(line: Mapping[str, Any]) -> list[str]:
    """What is wrong with one decoded JSON line; empty when it keeps the schema.

    Every line has ``schema``, ``benchmark``, ``case``, ``page_cache`` and ``machine``; one with a
    ``goal`` has the ``ratio`` that is held against it, and ``goal_is``: "at most" or "at least".
    """
    found = []
    if line.get("schema") != SCHEMA:
        found.append(f"schema: expected {SCHEMA}, got {line.get('schema')!r}")
    where = line.get("machine") or {}
    typed = {name: (line.get(name), str) for name in ("benchmark", "case", "page_cache")}
    typed |= {f"machine.{name}": (where.get(name), kind) for name, kind in _MACHINE.items()}
    found += [
        f"{name}: expected {kind.__name__}, got {value!r}"
        for name, (value, kind) in typed.items()
        if not isinstance(value, kind)
    ]
    if line.get("goal") is not None and not (
        isinstance(line.get("ratio"), float | int) and line.get("goal_is") in _IS_WORSE
    ):
        found.append("goal: expected a ratio beside it, and goal_is")
    return found


_IS_WORSE: dict[str, Callable[[float, float, float], bool]] = {
    "at most": lambda ratio, goal, slack: ratio > goal * slack,
    "at least": lambda ratio, goal, slack: ratio < goal / slack,
}


def misses_goal(record: Mapping[str, Any], slack: float = 1.0) -> bool:
    """Whether a record's ratio is worse than ``slack`` times its goal."""
    if record.get("goal") is None:
        return False
    return _IS_WORSE[record["goal_is"]](record["ratio"], record["goal"], slack)


def read_results(paths: Iterable[Path]) -> list[Record]:
    """The lines of result files. Raises ``ValueError`` with file, line and problem."""
    records = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if wrong := problems(record):
                raise ValueError(f"{path}:{number}: {'; '.join(wrong)}")
            records.append(record)
    return records


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Progress:
    """Tells on stderr what part of a long run is done, and about how long the rest will take."""

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done = total, 0.0
        self._clock, self._started = clock, clock()

    def add(self, amount: float, what: str) -> None:
        """``what`` is done, ``amount`` of the total."""
        self._done += amount
        share = self._done / self._total
        left_s = (self._clock() - self._started) * (1 - share) / share
        say(f"{share:4.0%}  about {left_s / 60:.1f} min left  {what}")


def text(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={text(each)}" for key, each in value.items())
    return str(value)


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
