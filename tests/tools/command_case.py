"""How tests run the command: in this process, in one of its own, or on a terminal."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect

from tools import cli

KVSTORE = Path(sys.executable).with_name("kvstore")


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


def run_here(*arguments: Any, stdin: bytes = b"", **environment: str) -> Result:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        _environment(environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _stdin(io.TextIOWrapper(io.BytesIO(stdin))),
    ):
        status = cli.run([str(argument) for argument in arguments])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(errors="replace"))
    return Result(status, *texts)


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
def _stdin(stream: io.TextIOWrapper):
    before, sys.stdin = sys.stdin, stream
    try:
        yield
    finally:
        sys.stdin = before
