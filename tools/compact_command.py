"""``kvstore compact DIR``: give the file's unused pages back to the volume."""

import click

from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import directory_argument, yes_option
from tools.sizes import format_bytes
from tools.terminal import progress_bar


def _compact(directory: str, yes: bool, as_json: bool) -> int:
    from kvstore.disk.offline.compact import compact as compact_directory

    with progress_bar("compacting") as advance:
        sizes = compact_directory(directory, progress=advance)
    if as_json:
        click.echo(json_text(sizes))
    else:
        before, after = sizes["bytes_before"], sizes["bytes_after"]
        click.echo(
            f"before      {format_bytes(before)}\n"
            f"after       {format_bytes(after)}, {format_bytes(max(before - after, 0))} given back"
        )
    return 0


compact = Command(
    name="compact",
    callback=_compact,
    help="Replace a cache's file by a copy without unused pages. It loses nothing, so it does not "
    "ask. Nobody else may use the directory meanwhile, and the volume needs room for the copy; "
    "until that is complete the old file stays.",
    examples=(
        "kvstore compact ~/.cache/kvstore/cache",
        "kvstore compact ~/.cache/kvstore/cache --json",
    ),
    params=[directory_argument(), yes_option(), JSON_OPTION],
)
