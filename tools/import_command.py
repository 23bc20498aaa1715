"""``kvstore import DIR FILE``: put what an export holds into a cache."""

import sys

import click

from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import File, Size, directory_argument, yes_option
from tools.sizes import format_count
from tools.terminal import progress_bar, say


def _import(directory: str, file: str, capacity_bytes: int | None, yes: bool, as_json: bool) -> int:
    from kvstore.disk.offline.carry import import_documents

    is_stream = file == "-"
    if is_stream and sys.stdin.isatty():
        raise click.UsageError("an export is binary: redirect stdin, or name a FILE")
    with progress_bar("importing") as advance:
        counts = import_documents(
            directory,
            sys.stdin.buffer if is_stream else file,
            capacity_bytes=capacity_bytes,
            progress=advance,
        )
    if as_json:
        click.echo(json_text(counts))
    else:
        stored = format_count(counts["blocks"], "block")
        click.echo(f"imported    {stored}; there already: {counts['present']:,}")
    if counts["refused"]:
        say(f"no room for {format_count(counts['refused'], 'block')}: {counts['obstacle']}")
    elif counts["evicted"]:
        say(f"evicted to make room: {format_count(counts['evicted'], 'block')}")
    return 1 if counts["refused"] else 0


import_ = Command(
    name="import",
    callback=_import,
    help="Put the blocks of an export, FILE or - for stdin, into a cache, which is created where "
    "there is none. A file is checked first: of one that is cut or damaged nothing is stored. What "
    "comes through a pipe is stored as it comes, and kept up to where it is damaged. Blocks that "
    "are there already stay as they are. Import from people you trust as you trust model weights.",
    examples=(
        "kvstore import ~/.cache/kvstore/cache documents.kv",
        "kvstore import new-cache - --disk-cache-size 20GiB < documents.kv",
    ),
    params=[
        directory_argument(),
        click.Argument(["file"], metavar="FILE", type=File()),
        click.Option(
            ["--disk-cache-size", "capacity_bytes"],
            type=Size(),
            metavar="SIZE",
            help="What the directory may grow to.  [default: as it is; 50GiB for a new one]",
        ),
        yes_option(),
        JSON_OPTION,
    ],
)
