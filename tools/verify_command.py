"""``kvstore verify DIR``: is every block in a cache directory what it was when it was written?"""

import json
import sys
from typing import Any

import click

from tools.command import JSON_OPTION, Command
from tools.sizes import format_bytes

_SHOWN = 10  # bad blocks that are listed for people; --json has them all


def _verify(directory: str, fix: bool, as_json: bool) -> int:
    from kvstore.disk.offline import verify as verify_directory

    report = verify_directory(directory, fix=fix, progress=_show_progress)
    click.echo(json.dumps(report, indent=2) if as_json else _describe(report))
    return 1 if report["corrupt"] else 0


def _show_progress(done: int, total: int) -> None:
    """One line that is written over, on a terminal; else nothing."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\rchecked {done:,} of {total:,} blocks", end=end, file=sys.stderr, flush=True)


def _describe(report: dict[str, Any]) -> str:
    lines = [
        f"checked     {report['blocks_checked']:,} blocks, {format_bytes(report['bytes_checked'])}"
    ]
    for kind in ("corrupt", "orphans"):
        found = report[kind]
        lines.append(f"{kind:12}{len(found):,}")
        lines += [f"  {_describe_block(block)}" for block in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"  and {len(found) - _SHOWN:,} more (--json lists all)")
    if report["fixed"]:
        lines.append(f"fixed       {report['fixed']:,}")
    elif report["corrupt"]:
        lines.append("Run again with --fix to remove what is corrupt; it is then computed anew.")
    return "\n".join(lines)


def _describe_block(block: Any) -> str:
    if not isinstance(block, dict):
        return str(block)
    return " ".join(f"{name}={value}" for name, value in block.items())


verify = Command(
    name="verify",
    callback=_verify,
    short_help="Check every block in a cache directory.",
    help="Check every block in a cache directory: checksum, tokens, parent. Exit status 1 if any "
    "was corrupt, also when --fix removed it. An engine may be using the directory.",
    examples=(
        "kvstore verify ~/.cache/kvstore/cache",
        "kvstore verify ~/.cache/kvstore/cache --fix",
    ),
    params=[
        click.Argument(["directory"], metavar="DIR"),
        click.Option(["--fix"], is_flag=True, help="Remove what is corrupt: it is computed anew."),
        JSON_OPTION,
    ],
)
