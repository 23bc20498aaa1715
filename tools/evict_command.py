"""``kvstore evict DIR``: drop blocks by age, model, document or size, and their bytes for good."""

import time
from pathlib import Path
from typing import Any

import click

from kvstore.config import expand_home
from kvstore.errors import ConfigError
from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import (
    Age,
    Size,
    directory_argument,
    document_option,
    namespace_option,
    yes_option,
)
from tools.sizes import format_age, format_bytes, format_count
from tools.terminal import is_confirmed, progress_bar, say
from tools.text import escape

_SHOWN = 10  # documents that are listed for people; --json has more


def _evict(
    directory: str,
    with_pinned: bool,
    scrub: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **conditions: Any,
) -> int:
    from kvstore.disk.offline.compact import compact, require_alone
    from kvstore.disk.offline.evict import evict

    if all(value is None for value in conditions.values()):
        raise ConfigError(
            "evict: say what: --older-than, --namespace, --document or --to-size "
            "(--to-size 0 empties the cache)"
        )
    if scrub:
        require_alone(directory)
    if not yes or dry_run:
        found = evict(directory, **conditions, with_pinned=with_pinned, dry_run=True)
        if dry_run:
            _print(found | {"dry_run": True}, as_json)
            return 0
        if found["blocks"] and not is_confirmed(f"Evict {_count(found)}?", yes=yes):
            return 1
    with progress_bar("evicting") as advance:
        found = evict(
            directory,
            **conditions,
            with_pinned=with_pinned,
            progress=lambda done: advance(done, None),
        )
    if scrub:
        with progress_bar("scrubbing") as advance:
            found |= compact(directory, progress=advance)
    _print(found | {"dry_run": False}, as_json)
    if scrub:
        _warn_of_damaged_files(Path(directory))
    return 0


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json_text(found))
        return
    lines = [f"{'would evict' if found['dry_run'] else 'evicted'}  {_count(found)}"]
    lines += [
        f"  {escape(str(each['model'] or 'unknown model'))} ({each['id'][:12]}): "
        f"{format_count(each['blocks'], 'block')}, {format_bytes(each['bytes'])}"
        for each in found["namespaces"]
    ]
    if found["dry_run"]:
        now = time.time()
        lines += [
            f"  {each['key'][:16]}  {format_count(each['blocks'], 'block')}, "
            f"used {format_age(now - each['touched'])} ago"
            for each in found["documents"][:_SHOWN]
        ]
        if found["num_documents"] > _SHOWN:
            lines.append(f"  and {found['num_documents'] - _SHOWN:,} more (--json lists 1,000)")
    if found["pinned_blocks"]:
        is_one = found["pinned_blocks"] == 1
        stay = format_count(found["pinned_blocks"], "pinned block")
        stay += " that was chosen stays" if is_one else " that were chosen stay"
        lines.append(f"  {stay} (--with-pinned takes {'it' if is_one else 'them'}, too)")
    if "bytes_after" in found:
        lines.append(f"scrubbed  the file takes {format_bytes(found['bytes_after'])}")
    click.echo("\n".join(lines))
    if found["blocks"] and not found["dry_run"] and "bytes_after" not in found:
        say("the file keeps its size and reuses the room; kvstore compact gives it back")


def _count(found: dict[str, Any]) -> str:
    return (
        f"{format_count(found['blocks'], 'block')} of "
        f"{format_count(found['num_documents'], 'document')}, {format_bytes(found['bytes'])}"
    )


def _warn_of_damaged_files(directory: Path) -> None:
    for path in sorted(expand_home(directory).glob("data.mdb.damaged-*")):
        say(f"{path} was set aside earlier and may hold the same documents; delete it, too")


evict = Command(
    name="evict",
    callback=_evict,
    help="Drop blocks from a cache. All conditions that are given must hold, for a block and for "
    "all that continues it. What a running engine uses meanwhile stays. Asks first; --dry-run "
    "shows what would go.",
    examples=(
        "kvstore evict ~/.cache/kvstore/cache --older-than 7d --dry-run",
        "kvstore evict ~/.cache/kvstore/cache --to-size 10GiB --yes",
    ),
    params=[
        directory_argument(),
        click.Option(
            ["--older-than", "unused_for_s"],
            type=Age(),
            metavar="AGE",
            help="Not used for this long: 90m, 12h, 7d, 2w.",
        ),
        namespace_option("Blocks"),
        document_option(
            "A document, by (the beginning of) the key of any of its blocks: that block, all that "
            "continues it, and what leads only there."
        ),
        click.Option(
            ["--to-size", "to_bytes"],
            type=Size(),
            metavar="SIZE",
            help="The least recently used, until the cache holds no more than this: 10GiB.",
        ),
        click.Option(
            ["--with-pinned"],
            is_flag=True,
            help="Also what is pinned: its pins are released. Without, pinned blocks stay.",
        ),
        click.Option(
            ["--scrub"],
            is_flag=True,
            help="And compact the file: freed pages keep old bytes. Nobody may use the cache.",
        ),
        click.Option(["--dry-run"], is_flag=True, help="Show what would go, and change nothing."),
        yes_option(),
        JSON_OPTION,
    ],
)
