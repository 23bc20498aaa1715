"""The ``kvstore`` command: ``kvstore COMMAND …``. ``tools.cli`` starts it.

Every command keeps the same manners: results on stdout and talk on stderr; exit status 0 for fine,
1 for "found something" or "failed", 2 for wrong usage, 130 after Ctrl-C, and 0 when the reader of a
pipe has seen enough; one line and no traceback for whatever is the user's to put right.

Nothing here, nor in the modules of the commands, imports torch before a command needs it: help and
everything that only looks at a directory answer at once.
"""

import logging
import os
import sys
from collections.abc import Sequence

import click

from kvstore.errors import ConfigError, KVStoreError
from tools.cli import INTERRUPTED
from tools.command import Group
from tools.terminal import say
from tools.text import escape

FINE, FAILED, WRONG_USAGE = 0, 1, 2


def _print_version(context: click.Context, _option: click.Parameter, is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        click.echo(f"kvstore {version('tiered-kvstore')}")
        context.exit()


cli = Group(
    name="kvstore",
    help="Ask long documents many questions, and look after the KV cache that makes it quick.",
    examples=(
        'kvstore ask contract.txt -q "Who are the parties?" -q "When does it end?"',
        "kvstore inspect ~/.cache/kvstore/cache",
    ),
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_print_version,
            help="Print the version and exit.",
        )
    ],
    summaries={
        "ask": "Answer questions about a document.",
        "serve": "Serve a model over HTTP with OpenAI's interface.",
        "inspect": "Show what is in a cache directory.",
        "why": "Explain why a prompt is not found in a cache.",
        "verify": "Check every block in a cache directory.",
        "unpin": "Release pins, so that blocks may be evicted.",
        "evict": "Drop blocks by age, model, document or size.",
        "compact": "Give unused pages back to the volume.",
        "export": "Write blocks to a file or a pipe.",
        "import": "Put the blocks of an export into a cache.",
        "plan": "Tell what caches of many sizes would save of a trace.",
        "bench": "Run a benchmark of this checkout.",
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Prints every error that is the user's."""
    # What the store logs is for programs; commands that tend it say what happened in words of
    # their own, and those that run an engine on it pass its warnings on.
    logging.getLogger("kvstore").addHandler(logging.NullHandler())
    try:
        status = _dispatch(list(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return FINE
    except OSError as error:
        _drop_output()
        name = f"{error.filename}: " if error.filename else ""
        say(f"{name}{error.strerror or error}")
        return FAILED
    except (KeyboardInterrupt, click.Abort):
        _drop_output()
        say("interrupted")
        return INTERRUPTED
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "kvstore"
        print(
            f"{command}: {escape(error.format_message())} (see {command} --help)", file=sys.stderr
        )
        return WRONG_USAGE
    except ConfigError as error:
        say(str(error))
        return WRONG_USAGE
    except (KVStoreError, click.ClickException) as error:
        say(str(error))
        return FAILED
    return status


def _drop_output() -> None:
    """The interpreter flushes stdout once more at its end; that must not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _dispatch(arguments: list[str]) -> int:
    if instruction := os.environ.get("_KVSTORE_COMPLETE"):
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "kvstore", "_KVSTORE_COMPLETE", instruction)
    try:
        with cli.make_context("kvstore", arguments) as context:
            status: int | None = cli.invoke(context)
            return status or FINE
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return WRONG_USAGE
    except click.exceptions.Exit as done:
        return done.exit_code
