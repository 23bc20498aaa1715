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
    return 0 if report["ok"] else 1


def _show_progress(done: int, total: int) -> None:
    """One line that is written over, on a terminal; else nothing."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        print(f"\rchecked {done:,} of {total:,} blocks", end=end, file=sys.stderr, flush=True)


def _describe(report: dict[str, Any]) -> str:
    corrupt = [f"{found['key'] or 'the cache'}: {found['reason']}" for found in report["corrupt"]]
    lines = [
        f"checked     {report['blocks_checked']:,} blocks, {format_bytes(report['bytes_checked'])}",
        *_listed("corrupt", corrupt),
        *_listed("orphans", report["orphans"]),
    ]
    if report["fixed"]:
        lines.append(f"fixed       {report['fixed']:,}")
    elif not report["ok"]:
        lines.append("Run it again with --fix to drop what is bad; it is then computed anew.")
    return "\n".join(lines)


def _listed(name: str, found: list[str]) -> list[str]:
    lines = [f"{name:12}{len(found):,}", *(f"  {item}" for item in found[:_SHOWN])]
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN:,} more (--json lists them)")
    return lines


verify = Command(
    name="verify",
    callback=_verify,
    help="Check every block in a cache directory: checksum, tokens, parent. Exit status 1 if "
    "anything was bad, also when --fix repaired it. An engine may be using the directory.",
    examples=(
        "kvstore verify ~/.cache/kvstore/cache",
        "kvstore verify ~/.cache/kvstore/cache --fix",
    ),
    params=[
        click.Argument(["directory"], metavar="DIR"),
        click.Option(
            ["--fix"], is_flag=True, help="Repair: what is bad is dropped and computed anew."
        ),
        JSON_OPTION,
    ],
)
