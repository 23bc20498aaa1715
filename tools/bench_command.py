"""``kvstore bench NAME``: runs a benchmark of the checkout that this command belongs to."""

import ast
import subprocess
import sys
from pathlib import Path

import click

from tools.command import Command

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def _bench(name: str | None, options: tuple[str, ...]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in _FOLDER.glob("bench_*.py"))
    if not known:
        raise click.UsageError("benchmarks are not installed: run this from a checkout's own venv")
    if name is None:
        for stem in known:
            click.echo(f"{stem.replace('_', '-'):<18}{_purpose(stem)}")
        return 0
    stem = name.replace("-", "_")
    if stem not in known:
        there = ", ".join(known).replace("_", "-")
        raise click.UsageError(f"no benchmark {name!r}; there are {there}")
    script = _FOLDER / f"bench_{stem}.py"
    return subprocess.run([sys.executable, str(script), *options], check=False).returncode


def _purpose(stem: str) -> str:
    """The first line of its docstring; reading it imports nothing."""
    tree = ast.parse((_FOLDER / f"bench_{stem}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


bench = Command(
    name="bench",
    callback=_bench,
    help="Run a benchmark of this checkout, in a process of its own; without a name, list them. "
    "What stands after the name is the benchmark's own: --json, --runs and more (see its --help).",
    examples=("kvstore bench ttft", "kvstore bench disk --json"),
    params=[
        click.Argument(["name"], required=False),
        click.Argument(["options"], nargs=-1, type=click.UNPROCESSED),
    ],
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
