"""What people see while they wait, and what they are asked; nothing where there is no terminal."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator

import click

from tools.text import escape

_REFRESH_S = 0.1


def say(message: str) -> None:
    """One line of talk, apart from the results."""
    print(f"kvstore: {escape(message)}", file=sys.stderr, flush=True)


class _StoreTalk(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


_store_talk = _StoreTalk(logging.WARNING)


def pass_on_warnings() -> None:
    """From now on what the store warns of while an engine uses it is talk, too."""
    logging.getLogger("kvstore").addHandler(_store_talk)  # once, however often this is called


def can_draw() -> bool:
    """Whether lines on stderr can be written over."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yields what takes how much is done, and of how much; the bar is gone at the end."""
    if not can_draw():
        yield lambda done, total: None
        return
    # rich takes 0.1 s to import
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        due_at = 0.0

        def advance(done: int, total: int | None) -> None:
            nonlocal due_at
            now = time.monotonic()
            if now >= due_at or done == total:
                due_at = now + _REFRESH_S
                bar.update(task, completed=done, total=total)

        yield advance


def is_confirmed(question: str, *, yes: bool) -> bool:
    """Ask on a terminal, unless it was answered beforehand with ``--yes``.

    Raises ``click.UsageError`` where nobody can be asked.
    """
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(f"{question} There is no terminal to ask: add --yes")
    try:
        answer = click.confirm(question, err=True)
    except click.Abort:  # Ctrl-D says no; Ctrl-C comes as one, too, and says the same
        click.echo(err=True)
        answer = False
    if not answer:
        say("nothing was changed")
    return answer
