"""Kinds of arguments: directories, files, sizes and ages, and how a shell completes them."""

import math
import re
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvstore.config import parse_size
from kvstore.errors import ConfigError
from tools.sizes import format_count

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([smhdw])")


class Directory(click.ParamType):
    """A directory; whether it is one, and a cache, is for the store to say."""

    name = "directory"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="dir")]


class File(click.ParamType):
    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class Number(click.FloatRange):
    """A number in a range; ``nan`` is in every range that click knows."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"expected a number, got {value}", param, ctx)
        return number


class Size(click.ParamType):
    """Bytes from a text such as ``10GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value), "size")
        except ConfigError:
            self.fail(f"expected a size like 512MiB or 10GB, got {value}", param, ctx)


class Age(click.ParamType):
    """Seconds from a text such as ``7d``."""

    name = "age"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = _AGE.fullmatch(str(value).strip().lower())
        if match is None:
            self.fail(f"expected a time like 90m, 12h, 7d or 2w, got {value}", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


class Namespace(click.ParamType):
    """The beginning of a namespace's id, or a model's name; completed from the cache."""

    name = "namespace"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from kvstore.disk.offline.summary import summarize
        from kvstore.errors import KVStoreError

        # An option that still waits for its value keeps click from placing the arguments.
        words = [ctx.params.get("directory"), *ctx.args]
        directory = next((word for word in words if word and not word.startswith("-")), ".")
        try:
            found = summarize(directory)["namespaces"]
        except (KVStoreError, OSError):
            return []
        return [
            CompletionItem(text, help=format_count(each["blocks"], "block"))
            for each in found
            for text in (str(each["model"] or ""), each["id"][:12])
            if text and text.startswith(incomplete)
        ]


def directory_argument() -> click.Argument:
    return click.Argument(["directory"], metavar="DIR", type=Directory())


def yes_option() -> click.Option:
    return click.Option(["-y", "--yes"], is_flag=True, help="Do not ask.")


def namespace_option(what: str) -> click.Option:
    return click.Option(
        ["--namespace"],
        metavar="ID",
        type=Namespace(),
        help=f"{what} of this model: its name, or the beginning of its namespace's id.",
    )


def document_option(what: str) -> click.Option:
    return click.Option(["--document"], metavar="KEY", help=what)
