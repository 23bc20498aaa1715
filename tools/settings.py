"""Dataclass fields as command-line options, so that a setting has one name and one default.

A field becomes an option of the same name, ``max_num_seqs`` as ``--max-num-seqs``. An option that
was not given is left out, so that the dataclass' own default counts; help shows that default.
"""

import contextlib
import dataclasses
import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from kvstore.errors import ConfigError, KVStoreError

_PAIR = "NAME=VALUE"


def options_for(
    config: type,
    *,
    skip: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> list[click.Option]:
    """An option for every field of the dataclass ``config`` that is not in ``skip``.

    ``defaults`` are shown in place of the fields' own. Field types may be bool, int, float, str,
    literals, sequences of int or str, mappings, and unions: those with None, and of a size's int
    and str. Help is what the dataclass' docstring says of the field.
    """
    hints, help_texts = get_type_hints(config), _field_texts(config.__doc__ or "")
    return [
        _option(
            field.name,
            hints[field.name],
            (defaults or {}).get(field.name, field.default),
            help_texts.get(field.name, ""),
        )
        for field in dataclasses.fields(config)
        if field.name not in skip
    ]


def given_values(parameters: Mapping[str, Any], config: type) -> dict[str, Any]:
    """The fields of ``config`` that were given on the command line."""
    names = {field.name for field in dataclasses.fields(config)}
    given = {
        name: value
        for name, value in parameters.items()
        if name in names and value is not None and value != ()
    }
    for name, hint in get_type_hints(config).items():
        if name in given and any(get_origin(member) is Mapping for member in get_args(hint)):
            given[name] = parse_assignments(given[name], "--" + name.replace("_", "-"))
    return given


@contextlib.contextmanager
def option_names(*configs: type) -> Iterator[None]:
    """Errors that name a field of these dataclasses name the option instead."""
    try:
        yield
    except KVStoreError as error:
        error.args = (_with_options(str(error), configs), *error.args[1:])
        raise


def _with_options(message: str, configs: Sequence[type]) -> str:
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    # A word such as "model" or "seed" is a setting only where the message begins with it.
    long = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    message = re.sub(rf"(?<![\w./-])({long})(?![\w/])", lambda found: _flag(found[1]), message)
    first, colon, rest = message.partition(":")
    return _flag(first) + colon + rest if first in names else message


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_assignments(assignments: Sequence[str], option: str) -> dict[str, Any]:
    """``["codec=raw", "min_hits=3"]`` as a dictionary; values are JSON or plain text."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise ConfigError(f"{option}: expected NAME=VALUE, got {assignment or 'nothing'}")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def _field_texts(docstring: str) -> dict[str, str]:
    """From a docstring's table: a name, at least two spaces, text; more text is indented deeper."""
    texts: dict[str, str] = {}
    name = ""
    for line in docstring.splitlines():
        if entry := re.fullmatch(r" {4}(\w+) {2,}(\S.*)", line):
            name, texts[entry[1]] = entry[1], entry[2]
        elif name and re.match(r" {6,}\S", line):
            texts[name] += " " + line.strip()
        else:
            name = ""
    return {name: text.replace("``", "") for name, text in texts.items()}


def _option(name: str, hint: Any, default: Any, help_text: str) -> click.Option:
    flag = _flag(name)
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    members = tuple(member for member in members if member is not types.NoneType)
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "" if default is None else f"[default: {default}]"
    keywords: dict[str, Any] = {"default": None, "help": f"{help_text}  {shown}".strip()}
    if members == (bool,):
        return click.Option([f"{flag}/--no-{flag[2:]}"], **keywords)
    if any(get_origin(member) is Mapping for member in members):
        return click.Option([flag], multiple=True, **keywords | {"default": (), "metavar": _PAIR})
    sequences = [member for member in members if get_origin(member) is Sequence]
    if sequences:
        (item,) = get_args(sequences[0])
        return click.Option([flag], type=item, multiple=True, **keywords | {"default": ()})
    if get_origin(hint) is Literal:
        return click.Option([flag], type=click.Choice(get_args(hint)), **keywords)
    if int in members and str in members:  # a size: "1024" is one, too
        return click.Option([flag], type=str, **keywords, metavar="SIZE")
    if str in members:
        return click.Option([flag], type=str, **keywords)
    return click.Option([flag], type=members[0], **keywords)
