"""``kvstore verify DIR``: is every block in a cache directory what it was when it was written?"""

from typing import Any

import click

from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import directory_argument
from tools.sizes import format_bytes, format_count
from tools.terminal import progress_bar

_SHOWN = 10  # bad blocks that are listed for people; --json has them all


def _verify(directory: str, fix: bool, dry_run: bool, as_json: bool) -> int:
    from kvstore.disk.offline.verify import verify as verify_directory

    with progress_bar("verifying") as advance:
        report = verify_directory(directory, fix=fix and not dry_run, progress=advance)
    click.echo(json_text(report) if as_json else _describe(report, fix, dry_run))
    return 0 if report["ok"] else 1


def _describe(report: dict[str, Any], fix: bool, dry_run: bool) -> str:
    corrupt = [f"{found['key'] or 'the cache'}: {found['reason']}" for found in report["corrupt"]]
    orphans = [f"{key}: nothing it continues" for key in report["orphans"]]
    num_found = len(corrupt) + len(orphans)
    checked = format_count(report["blocks_checked"], "block")
    lines = [
        f"checked     {checked}, {format_bytes(report['bytes_checked'])}",
        *_listed("corrupt", corrupt),
        *_listed("orphans", orphans),
    ]
    if report["fixed"]:
        lines.append(f"fixed       {report['fixed']:,}; what was dropped is computed anew")
    elif report["obstacle"]:
        lines.append(f"not fixed   {report['obstacle']}")
    elif fix and dry_run and not report["ok"]:
        lines.append(
            f"would fix   {num_found:,}: drop what is bad, and rebuild the index from the rest"
        )
    elif not report["ok"]:
        lines.append("Run it again with --fix to drop what is bad; it is then computed anew.")
    if report["bad_blocks"]:
        waiting = format_count(report["bad_blocks"], "block")
        lines.append(
            f"waiting     {waiting} without bytes: others continue what stood there, so the place "
            "is kept until it is computed anew"
        )
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
    "anything was bad, also when --fix repaired it. An engine may be using the directory; without "
    "one the structure of the file is checked, too.",
    examples=(
        "kvstore verify ~/.cache/kvstore/cache",
        "kvstore verify ~/.cache/kvstore/cache --fix",
    ),
    params=[
        directory_argument(),
        click.Option(
            ["--fix"], is_flag=True, help="Repair: what is bad is dropped and computed anew."
        ),
        click.Option(["--dry-run"], is_flag=True, help="With --fix: say what it would do."),
        JSON_OPTION,
    ],
)
