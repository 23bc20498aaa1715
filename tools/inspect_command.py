"""``kvstore inspect DIR``: what is in a cache directory, beside a running engine or without one."""

import json
from typing import Any

import click

from tools.command import JSON_OPTION, Command
from tools.sizes import format_bytes


def _inspect(directory: str, as_json: bool) -> int:
    from kvstore.disk.offline import summarize

    summary = summarize(directory)
    click.echo(json.dumps(summary, indent=2) if as_json else _describe(summary))
    return 0


def _describe(summary: dict[str, Any]) -> str:
    lines = [
        f"cache       {summary['path']}",
        f"size        {format_bytes(summary['file_bytes'])} on disk, "
        f"{format_bytes(summary['used_bytes'])} in use, "
        f"{format_bytes(summary['capacity_bytes'])} at most",
        f"blocks      {summary['blocks']:,} ({summary['tokens']:,} tokens)",
    ]
    if summary["pinned_blocks"]:
        lines.append(f"pinned      {summary['pinned_blocks']:,} (not evicted to make room)")
    if summary["bad_blocks"]:
        lines.append(f"bad blocks  {summary['bad_blocks']:,} (computed anew when asked for)")
    for namespace in summary["namespaces"]:
        shown = {name: "?" if value is None else value for name, value in namespace.items()}
        lines += [
            "",
            f"model       {shown['model']} ({namespace['id'][:12]})",
            f"  format    {shown['dtype']}, {shown['block_size']} tokens a block, "
            f"{shown['num_layers']} layers, {shown['num_kv_heads']} heads of {shown['head_dim']}",
            f"  blocks    {namespace['blocks']:,} ({namespace['tokens']:,} tokens), "
            f"{format_bytes(namespace['bytes'])}",
        ]
    return "\n".join(lines)


inspect = Command(
    name="inspect",
    callback=_inspect,
    help="Show what is in a cache directory: sizes, blocks, and which models they belong to. "
    "Opens it read-only; an engine may be using it.",
    examples=(
        "kvstore inspect ~/.cache/kvstore/cache",
        "kvstore inspect --json ~/.cache/kvstore/cache | jq .blocks",
    ),
    params=[click.Argument(["directory"], metavar="DIR"), JSON_OPTION],
)
