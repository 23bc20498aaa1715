"""``kvstore export DIR FILE``: carry documents away, in one file or through a pipe."""

import sys
from pathlib import Path

import click

from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import (
    File,
    directory_argument,
    document_option,
    namespace_option,
    yes_option,
)
from tools.sizes import format_bytes, format_count
from tools.terminal import is_confirmed, progress_bar, say


def _export(
    directory: str,
    file: str,
    namespace: str | None,
    document: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    from kvstore.disk.offline.carry import export_documents

    is_stream = file == "-"
    if is_stream and sys.stdout.isatty():
        raise click.UsageError("an export is binary: redirect stdout, or name a FILE")
    is_there = not is_stream and Path(file).is_file()
    if is_there and not is_confirmed(f"{file} exists. Replace it?", yes=yes):
        return 1
    target = sys.stdout.buffer if is_stream else file
    with progress_bar("exporting") as advance:
        counts = export_documents(
            directory, target, namespace=namespace, document=document, progress=advance
        )
    if as_json:
        click.echo(json_text(counts), err=is_stream)
    else:
        text = f"{format_count(counts['blocks'], 'block')}, {format_bytes(counts['bytes'])}"
        click.echo(
            f"kvstore: exported {text}" if is_stream else f"exported    {text}", err=is_stream
        )
    if counts["left_out"]:
        say(f"left out: {format_count(counts['left_out'], 'block')}, bad or below a bad one")
    return 1 if counts["left_out"] else 0


export = Command(
    name="export",
    callback=_export,
    help="Write the blocks of a cache, or of one document, to FILE (- for stdout). Every block is "
    "verified first; exit status 1 if one had to be left out. The file holds the documents' text "
    "as tokens: only its owner can read it. An engine may be using the directory.",
    examples=(
        "kvstore export ~/.cache/kvstore/cache documents.kv",
        "kvstore export ~/.cache/kvstore/cache - | ssh host kvstore import cache -",
    ),
    params=[
        directory_argument(),
        click.Argument(["file"], metavar="FILE", type=File()),
        namespace_option("Only blocks"),
        document_option(
            "Only one document, by (the beginning of) the key of any of its blocks: that block, "
            "what it continues and what continues it."
        ),
        yes_option(),
        JSON_OPTION,
    ],
)
