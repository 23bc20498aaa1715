"""``kvstore unpin DIR``: release pins that outlive the engines that made them."""

from typing import Any

import click

from kvstore.errors import ConfigError
from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import directory_argument, document_option, namespace_option, yes_option
from tools.sizes import format_age_until, format_bytes, format_count
from tools.terminal import is_confirmed

_SHOWN = 10  # pins that are listed for people; --json has them all


def _unpin(
    directory: str,
    document: str | None,
    namespace: str | None,
    is_all: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    from kvstore.disk.offline.unpin import unpin as unpin_directory

    meant = {"document": document, "namespace": namespace}
    if not is_all and not any(meant.values()):
        raise ConfigError(
            "unpin: say what: --document, --namespace or --all (kvstore inspect --pins lists them)"
        )
    if is_all and any(meant.values()):
        raise ConfigError("unpin: --all means all; leave it out beside --document and --namespace")
    found = None
    if dry_run or not yes:
        found = unpin_directory(directory, **meant, dry_run=True)
        if found["pins"] and not dry_run and not is_confirmed(_question(found), yes=yes):
            return 1
    if not dry_run:
        found = unpin_directory(directory, **meant)
    assert found is not None
    if as_json:
        click.echo(json_text(found | {"dry_run": dry_run}))
    else:
        click.echo(_describe(found, dry_run))
    return 0


def _question(found: dict[str, Any]) -> str:
    return f"Release {format_count(found['pins'], 'pin')}?"


def _describe(found: dict[str, Any], dry_run: bool) -> str:
    what = "would release" if dry_run else "released"
    lines = [f"{what}  {format_count(found['pins'], 'pin')}"]
    lines += [
        f"  {each['key'][:16]}  {format_count(each['blocks'], 'block')}, "
        f"{format_bytes(each['bytes'])}, {format_age_until(each['pinned_until'])}"
        for each in found["released"][:_SHOWN]
    ]
    if found["pins"] > _SHOWN:
        lines.append(f"  and {found['pins'] - _SHOWN:,} more (--json lists them)")
    return "\n".join(lines)


unpin = Command(
    name="unpin",
    callback=_unpin,
    help="Release pins that were made to last, with persist=True or ttl=, whoever made them. What "
    "they protected stays cached, and may be evicted from now on. kvstore inspect --pins lists "
    "them. Asks first; an engine may be using the directory.",
    examples=(
        "kvstore unpin ~/.cache/kvstore/cache --document 5f3a9c",
        "kvstore unpin ~/.cache/kvstore/cache --all --dry-run",
    ),
    params=[
        directory_argument(),
        document_option(
            "A document, by (the beginning of) the key of any of its blocks: pins of that block, "
            "of what it continues and of what continues it."
        ),
        namespace_option("Pins"),
        click.Option(["--all", "is_all"], is_flag=True, help="Every pin of the cache."),
        click.Option(["--dry-run"], is_flag=True, help="Show what would go, and change nothing."),
        yes_option(),
        JSON_OPTION,
    ],
)
