"""``kvstore inspect --tree``, ``--documents`` and ``--block``: written as they are read."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import click

from kvstore.config import expand_home
from tools.json_text import json_text
from tools.sizes import format_age, format_age_until, format_bytes, format_count
from tools.terminal import say
from tools.text import Reader, escape, shorten

_PIPE_WIDTH = 132  # of a line that no terminal limits
_LEAST_TEXT = 24

# Names of a row's fields in JSON, where they are not their own.
_NAMES = {
    "num_blocks": "blocks",
    "num_tokens": "tokens",
    "num_bytes": "bytes",
    "num_bad": "bad_blocks",
    "num_pinned": "pinned_blocks",
    "num_children": "children",
}


def show_tree(directory: str, namespace: str | None, reader: Reader, *, as_json: bool) -> int:
    from kvstore.disk.offline.branches import branches

    def describe(row: dict[str, Any]) -> str:
        return f"{'  ' * row['level']}{row['key'][:12]}  {_extent(row)}  {_facts(row)}{_marks(row)}"

    return _show(directory, namespace, reader, branches, "branches", describe, as_json=as_json)


def show_documents(directory: str, namespace: str | None, reader: Reader, *, as_json: bool) -> int:
    from kvstore.disk.offline.branches import documents

    def describe(row: dict[str, Any]) -> str:
        own = "" if row["own_blocks"] == row["blocks"] else f" ({row['own_blocks']:,} its own)"
        return f"{row['key'][:12]}  {_extent(row)}{own}  {_facts(row)}{_marks(row)}"

    return _show(directory, namespace, reader, documents, "documents", describe, as_json=as_json)


def show_pins(directory: str, namespace: str | None, reader: Reader, *, as_json: bool) -> int:
    from kvstore.disk.offline.unpin import pinned

    def describe(row: dict[str, Any]) -> str:
        return (
            f"{row['key'][:12]}  {_extent(row)}  {format_bytes(row['bytes'])}  "
            f"{format_age_until(row['pinned_until'])}"
        )

    return _show(directory, namespace, reader, pinned, "pins", describe, as_json=as_json)


def _extent(row: Mapping[str, Any]) -> str:
    return f"{format_count(row['tokens'], 'token')}  {format_count(row['blocks'], 'block')}"


def _facts(row: Mapping[str, Any]) -> str:
    age = format_age(max(time.time() - row["touched"], 0.0))
    return f"{format_bytes(row['bytes'])}  {format_count(row['hits'], 'hit')}  {age} ago"


def _marks(row: Mapping[str, Any]) -> str:
    bad, pinned = row.get("bad_blocks", 0), row["pinned_blocks"]
    return (f"  {bad:,} bad" if bad else "") + ("  pinned" if pinned else "")


def _show(
    directory: str,
    namespace: str | None,
    reader: Reader,
    rows_of: Any,
    name: str,
    describe: Any,
    *,
    as_json: bool,
) -> int:
    from kvstore.disk.offline.browse import Browser
    from kvstore.disk.offline.selection import matching_namespaces
    from kvstore.disk.slices import reading

    path = str(expand_home(directory).absolute())
    with reading(directory) as env:
        if env is None:
            rows: Iterable[dict[str, Any]] = ()
        else:
            wanted = matching_namespaces(env, namespace)
            known = Browser(env).namespaces()
            rows = (_row(each, known, reader) for each in rows_of(env, wanted))
        if as_json:
            _write_json(path, name, rows)
        elif not _write_lines(rows, describe):
            say(f"{path} has no {name}")
    return 0


def _row(found: Any, known: Mapping[bytes, Mapping[str, Any]], reader: Reader) -> dict[str, Any]:
    """A record of ``kvstore.disk.offline.branches`` as JSON has it, with texts."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    description = known.get(values["namespace"], {})
    row: dict[str, Any] = {
        _NAMES.get(name, name): value.hex() if isinstance(value, bytes) else value
        for name, value in values.items()
    }
    row["model"] = description.get("model")
    row["text"] = reader.read(description, row["token_ids"])
    if "own_token_ids" in row:
        row["own_text"] = reader.read(description, row["own_token_ids"])
    return row


def _write_json(path: str, name: str, rows: Iterable[dict[str, Any]]) -> None:
    """One object, a row at a time: a large cache has more of them than memory should hold."""
    write = sys.stdout.write
    write(f'{{\n"path": {json_text(path)},\n"{name}": [')
    separator = "\n"
    for row in rows:
        write(separator + json_text(row, indent=None))
        separator = ",\n"
    write("\n]\n}\n")


def _write_lines(rows: Iterable[dict[str, Any]], describe: Any) -> bool:
    """Whether there were any."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_WIDTH
    group = None
    write = sys.stdout.write
    for row in rows:
        if group != (group := (row["namespace"], row["salt"])):
            salt = f", salt {row['salt'][:12]}" if row["salt"] else ""
            write(f"{escape(str(row['model'] or '?'))} ({row['namespace'][:12]}{salt})\n")
        line = f"  {describe(row)}"
        text = row.get("own_text", row["text"])
        if text is None:
            tokens = row.get("own_token_ids", row["token_ids"])[:8]
            shown = f"tokens {' '.join(map(str, tokens))} …" if tokens else ""
        else:
            shown = f'"{shorten(text, max(width - len(line) - 4, _LEAST_TEXT))}"'
        write(f"{line}  {shown}".rstrip() + "\n")
    return group is not None


def show_block(directory: str, prefix: str, reader: Reader, *, as_json: bool) -> int:
    from kvstore.disk.offline.look import block

    found, description = block(directory, prefix)
    found["text"] = reader.read(description, found["token_ids"])
    found["tier"] = "disk"
    if as_json:
        click.echo(json_text(found))
    else:
        click.echo("\n".join(_describe_block(found)))
    return 0


def _describe_block(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"key         {found['key']}"
    yield f"model       {escape(str(found['model'] or '?'))} ({found['namespace'][:12]})"
    if found["salt"]:
        yield f"salt        {found['salt']}"
    tokens = format_count(found["tokens"], "token")
    yield f"position    block {found['depth']:,} of its prompt, {tokens}"
    yield f"continues   {found['parent'] or 'nothing'}"
    more = found["num_children"] - len(found["children"])
    below = [key[:12] for key in found["children"]] + ([f"and {more:,} more"] if more else [])
    yield f"below it    {', '.join(below) or 'nothing'}"
    packed = "" if found["codec"] == "raw" else f", {format_bytes(found['payload_bytes'])} decoded"
    yield f"stored      {format_bytes(found['nbytes'])} ({escape(found['codec'])}){packed}"
    soundness = {
        True: "right",
        False: "WRONG: run kvstore verify --fix",
        None: "its bytes are gone",
    }
    yield f"checksum    {soundness[found['is_intact']]}"
    yield f"written     {format_age(max(time.time() - found['created'], 0.0))} ago"
    age = format_age(max(time.time() - found["touched"], 0.0))
    yield f"used        {format_count(found['hits'], 'time')} again on record, the last {age} ago"
    if found["num_pins"]:
        pins = format_count(found["num_pins"], "pin")
        yield f"pinned      by {pins}, of it or of what continues it"
    yield f"token ids   {' '.join(map(str, found['token_ids']))}"
    if found["text"] is not None:
        yield f'text        "{escape(found["text"])}"'
