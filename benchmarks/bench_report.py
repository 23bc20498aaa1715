"""One Markdown page, with pictures, from the JSON lines of other benchmarks.

    kvstore bench report DIR [--output PAGE]

Reads every ``*.jsonl`` in the directory. The page is ``DIR/report.md`` unless named otherwise; the
pictures lie beside it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Record, misses_goal, read_results, text

_NOT_SHOWN = {"schema", "benchmark", "machine", "goal_is", "command"}
_OF_RATIO = {"ratio", "over", "goal", "goal_is"}


def page(records: Sequence[Record], folder: Path) -> str:
    """The whole page; draws the pictures into ``folder`` on the way."""
    import pictures

    parts = ["# Benchmark results", ""]
    parts += ["Ratios compare contenders that took turns in one run; a cell with four numbers is"]
    parts += ["median, 90th and 99th percentile and maximum.", ""]
    if any(record.get("goal") for record in records):
        pictures.draw_goals(records, folder / "goals.svg")
        parts += ["![Every ratio over its goal](goals.svg)", ""]
    for name in dict.fromkeys(record["benchmark"] for record in records):
        mine = [record for record in records if record["benchmark"] == name]
        parts += [f"## {name}", "", *_commands(name, mine), ""]
        if name == "offload":
            pictures.draw_offload(mine, folder / "offload.svg")
            parts += ["![Time to first token and hits over the working set](offload.svg)", ""]
        parts += [*_tables(mine), *_machines(mine), ""]
    return "\n".join(parts)


def _commands(name: str, records: Sequence[Record]) -> list[str]:
    """As they were given; results of before that was recorded name only the benchmark."""
    given = dict.fromkeys(record.get("command", f"kvstore bench {name}") for record in records)
    return ["; ".join(f"`{command}`" for command in given)]


def _tables(records: Sequence[Record]) -> list[str]:
    """A table for each set of columns: one for all would be mostly empty cells."""
    alike: dict[frozenset[str], list[Record]] = {}
    for record in records:
        alike.setdefault(frozenset(set(record) - _OF_RATIO), []).append(record)
    return [line for group in alike.values() for line in (*_table(group), "")]


def _table(records: Sequence[Record]) -> list[str]:
    """Columns are what differs; what all records share stands once below."""
    names = [name for r in records for name in r if name not in _NOT_SHOWN]
    names = list(dict.fromkeys(names))
    shared = [
        name
        for name in names
        if name not in ("case", "goal")
        and all(record.get(name) == records[0].get(name) for record in records)
    ]
    if len(records) == 1:
        shared = []
    columns = [name for name in names if name not in shared]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(name, r) for name in columns) + " |" for r in records]
    if shared:
        same = ", ".join(f"{name} {_cell(name, records[0])}" for name in shared)
        lines += ["", f"In all rows: {same}."]
    return lines


def _cell(name: str, record: Record) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if name == "goal":
        return f"{record['goal_is']} {text(value)}{' **missed**' if misses_goal(record) else ''}"
    if isinstance(value, Mapping) and "median" in value:
        return " · ".join(text(value[rank]) for rank in ("median", "p90", "p99", "max"))
    return text(value).replace("|", "\\|")


def _machines(records: Sequence[Record]) -> list[str]:
    """One line for each machine, commit and set of versions that the records come from."""
    found: dict[str, list[float]] = {}
    for record in records:
        where = record["machine"]
        versions = [
            f"{name} {where[name]}"
            for name in ("torch", "transformers", "lmdb", "numpy")
            if where.get(name)
        ]
        said = (
            f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, "
            f"Python {where['python']}, {', '.join(versions)}, commit {where.get('commit')}"
        )
        found.setdefault(said, []).append(where["load"])
    return [f"{said}; load {max(loads):.1f}." for said, loads in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="One Markdown page from the JSON lines of other benchmarks, beside them."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="holds results as JSON lines")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PAGE",
        help="where the page goes, and its pictures beside it; default: DIR/report.md",
    )
    arguments = parser.parse_args()
    paths = sorted(arguments.directory.glob("*.jsonl"))
    if not paths:
        parser.error(
            f"{arguments.directory}: no *.jsonl there; write some with --json > NAME.jsonl"
        )
    output = arguments.output or arguments.directory / "report.md"
    try:
        records = read_results(paths)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page(records, output.parent), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"bench report: {error}")
    except ModuleNotFoundError:
        sys.exit("bench report: pictures need matplotlib: pip install matplotlib")
    print(output)


if __name__ == "__main__":
    main()
