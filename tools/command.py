"""What the help of every command looks like: usage, examples, words, options in sections."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from typing import Any

import click

_LEAST_WIDTH = 20  # of help, in columns


class Command(click.Command):
    """A click command whose help starts with examples.

    ``sections`` holds further options under headings of their own.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str] = (),
        params: Sequence[click.Parameter] = (),
        sections: Mapping[str, Sequence[click.Option]] | None = None,
        **keywords: Any,
    ) -> None:
        self.examples = examples
        self.sections = sections or {}
        further = [option for options in self.sections.values() for option in options]
        super().__init__(*arguments, params=[*params, *further], **keywords)

    def get_help(self, ctx: click.Context) -> str:
        columns = shutil.get_terminal_size().columns
        if columns < 80:  # click's own width is never below 50
            ctx.terminal_width = max(columns, _LEAST_WIDTH) - 1
        return super().get_help(ctx)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_usage(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                indent = " " * formatter.current_indent
                for example in self.examples:
                    lines = textwrap.wrap(
                        example,
                        max(formatter.width - 2, _LEAST_WIDTH),  # leaves room for the backslash
                        initial_indent=indent,
                        subsequent_indent=2 * indent,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                    is_whole = len(indent + example) <= formatter.width
                    formatter.write((indent + example if is_whole else " \\\n".join(lines)) + "\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        placed = {id(option) for options in self.sections.values() for option in options}
        main = [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and id(param) not in placed
        ]
        for heading, params in {"Options": main, **self.sections}.items():
            records = [record for param in params if (record := param.get_help_record(ctx))]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=min(30, formatter.width // 2))


class Group(Command, click.Group):
    """A command of commands, each imported when it is run: help names them without that.

    ``summaries`` maps the name of a command to what help says of it. The command ``x`` is ``x`` in
    ``tools/x_command.py``, or ``x_`` where Python keeps the word for itself.
    """

    def __init__(self, *arguments: Any, summaries: Mapping[str, str], **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(import_module(f"tools.{cmd_name}_command"), name)
        return command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))


JSON_OPTION = click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object.")
