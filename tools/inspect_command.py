"""``kvstore inspect DIR``: what is in a cache directory, beside a running engine or without one."""

import time
from typing import Any

import click

from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import Number, directory_argument, namespace_option
from tools.sizes import format_age, format_bytes, format_count
from tools.text import Reader, escape


def _inspect(
    directory: str,
    is_tree: bool,
    is_documents: bool,
    block: str | None,
    is_pins: bool,
    is_watch: bool,
    namespace: str | None,
    tokenizer: str | None,
    interval: float,
    count: int | None,
    as_json: bool,
) -> int:
    is_listing = is_tree or is_documents or is_pins
    if is_tree + is_documents + is_pins + is_watch + (block is not None) > 1:
        raise click.UsageError("--tree, --documents, --block, --pins and --watch: one at a time")
    if not is_watch and count is not None:
        raise click.UsageError("--count goes with --watch")
    if not is_listing and namespace is not None:
        raise click.UsageError("--namespace goes with --tree, --documents and --pins")
    if is_watch:
        from tools.inspect_watch import watch

        return watch(directory, interval=interval, count=count, as_json=as_json)
    if is_listing or block is not None:
        from tools import inspect_views as views

        reader = Reader(tokenizer)
        if block is not None:
            return views.show_block(directory, block, reader, as_json=as_json)
        show = views.show_pins if is_pins else views.show_documents
        show = views.show_tree if is_tree else show
        return show(directory, namespace, reader, as_json=as_json)
    from kvstore.disk.offline.look import survey

    found = survey(directory)
    click.echo(json_text(found) if as_json else _describe(found))
    return 0


def _describe(found: dict[str, Any]) -> str:
    lines = [
        f"cache       {escape(found['path'])}",
        f"size        {format_bytes(found['file_bytes'])} on disk, "
        f"{format_bytes(found['used_bytes'])} in use, "
        f"{format_bytes(found['capacity_bytes'])} at most",
        f"blocks      {found['blocks']:,} ({format_count(found['tokens'], 'token')})",
    ]
    if pages := found["pages"]:
        total = pages["live"] + pages["free"]
        lines.append(
            f"pages       {pages['live'] / total:.0%} live, {pages['free'] / total:.0%} free "
            f"({format_bytes(pages['free'] * pages['page_bytes'])} to be used again)"
        )
    if found["pinned_blocks"]:
        lines.append(
            f"pinned      {found['pinned_blocks']:,} (not evicted to make room; --pins lists why)"
        )
    if found["bad_blocks"]:
        lines.append(f"bad blocks  {found['bad_blocks']:,} (computed anew when asked for)")
    for each in found["attached"]:
        since = f" for {_age(each['since'])}" if each["since"] else ""
        lines.append(f"attached    {each['holder']}{since}")
    for namespace in found["namespaces"]:
        lines += _describe_namespace(namespace)
    num_all = found["blocks"] + found["bad_blocks"]
    if found["surveyed_blocks"] < num_all:
        surveyed = format_count(found["surveyed_blocks"], "block")
        lines += ["", f"Codecs and uses are those of {surveyed}, a sample."]
    return "\n".join(lines)


def _describe_namespace(namespace: dict[str, Any]) -> list[str]:
    shown = {
        name: "?" if value is None else escape(str(value)) for name, value in namespace.items()
    }
    lines = [
        "",
        f"model       {shown['model']} ({namespace['id'][:12]})",
        f"  format    {shown['dtype']}, {shown['block_size']} tokens a block, "
        f"{shown['num_layers']} layers, {shown['num_kv_heads']} heads of {shown['head_dim']}",
        f"  blocks    {namespace['blocks']:,} ({format_count(namespace['tokens'], 'token')}), "
        f"{format_bytes(namespace['bytes'])}",
    ]
    if namespace["oldest_use"] is not None:
        newest, oldest = _age(namespace["newest_use"]), _age(namespace["oldest_use"])
        codecs = ", ".join(f"{name} {count:,}" for name, count in namespace["codecs"].items())
        lines += [
            f"  codecs    {escape(codecs) or 'none'}",
            f"  uses      {namespace['hits']:,} recorded; the latest {newest} ago, of the block "
            f"unused for longest {oldest} ago",
        ]
    return lines


def _age(moment: float) -> str:
    return format_age(max(time.time() - moment, 0.0))


inspect = Command(
    name="inspect",
    callback=_inspect,
    help="Show what is in a cache directory: sizes, blocks, and which models they belong to; or "
    "the tree of prompts, one line per document, one block in full, or how engines are doing. "
    "Opens it read-only; an engine may be using it.",
    examples=(
        "kvstore inspect ~/.cache/kvstore/cache",
        "kvstore inspect --tree ~/.cache/kvstore/cache",
    ),
    params=[directory_argument(), JSON_OPTION],
    sections={
        "Views": [
            click.Option(
                ["--tree", "is_tree"],
                is_flag=True,
                help="The tree of prompts: a line for each run of blocks that does not fork.",
            ),
            click.Option(
                ["--documents", "is_documents"],
                is_flag=True,
                help="A line for each prompt that nothing continues.",
            ),
            click.Option(
                ["--block"], metavar="KEY", help="One block in full; the beginning of its key."
            ),
            click.Option(
                ["--pins", "is_pins"],
                is_flag=True,
                help="A line for each pin that outlives its engine, the first to end first.",
            ),
            click.Option(
                ["--watch", "is_watch"],
                is_flag=True,
                help="What engines are doing; off a terminal a line a second, or --json objects.",
            ),
        ],
        "Of the views": [
            namespace_option("Prompts"),
            click.Option(
                ["--tokenizer"],
                metavar="PATH",
                help="A tokenizer.json, or a directory with one, to show texts with.  "
                "[default: what the engine has left in the cache]",
            ),
            click.Option(
                ["--interval"],
                type=Number(0.1, 86400),
                default=1.0,
                show_default=True,
                metavar="S",
                help="Seconds between two looks of --watch.",
            ),
            click.Option(
                ["--count"],
                type=click.IntRange(min=1),
                metavar="N",
                help="End --watch after so many.",
            ),
        ],
    },
)
