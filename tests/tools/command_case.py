"""How tests run the command: in this process, in one of its own, or on a terminal."""

import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect

from tools import commands

KVSTORE = Path(sys.executable).with_name("kvstore")


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def run_here(*arguments: Any, stdin: bytes = b"", **environment: str) -> Result:
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        _environment(environment),
        _own_log(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _stdin(io.TextIOWrapper(io.BytesIO(stdin))),
    ):
        kept = os.dup(out.fileno())  # the command may give up its output
        with open(kept, encoding="utf-8", errors="replace") as written:
            status = commands.run([str(argument) for argument in arguments])
            out.flush()
            err.seek(0)
            written.seek(0)
            return Result(status, written.read(), err.read())


def run_in_process(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [KVSTORE, *map(str, arguments)],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in result.stderr
    return result


def on_terminal(*arguments: Any, columns: int = 80, **environment: str) -> pexpect.spawn:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")
    }
    return pexpect.spawn(
        str(KVSTORE),
        [str(argument) for argument in arguments],
        encoding="utf-8",
        timeout=60,
        dimensions=(24, columns),
        env=kept | {"TERM": "xterm-256color"} | environment,
    )


def end_of(process: pexpect.spawn) -> str:
    """What a command on a terminal still prints until it ends."""
    process.expect(pexpect.EOF)
    process.close()
    return process.before.replace("\r\n", "\n")


@contextlib.contextmanager
def _environment(changes: dict[str, str]):
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _own_log():
    """A process of its own would begin without the handlers that another command has added."""
    logger = logging.getLogger("kvstore")
    before = logger.handlers[:]
    try:
        yield
    finally:
        logger.handlers[:] = before


@contextlib.contextmanager
def _stdin(stream: io.TextIOWrapper):
    before, sys.stdin = sys.stdin, stream
    try:
        yield
    finally:
        sys.stdin = before
