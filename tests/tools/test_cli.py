"""The manners that every command shares, in a pipe and on a terminal."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from tools.cli import cli

KVSTORE = Path(sys.executable).with_name("kvstore")
HEAVY = {"torch", "triton", "transformers"}


def test_help_names_every_command(kvstore):
    result = kvstore("--help")
    assert result.returncode == 0
    for name in cli.summaries:
        assert f"\n  {name} " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", sorted(cli.summaries))
def test_help_of_a_command_starts_with_two_examples(kvstore, name):
    result = kvstore(name, "-h")
    assert result.returncode == 0
    usage, heading, *rest = [line for line in result.stdout.splitlines() if line]
    assert usage.startswith(f"Usage: kvstore {name} ")
    assert heading == "Examples:"
    assert all(line.startswith(f"  kvstore {name} ") for line in rest[:2])


def test_version_is_that_of_the_distribution(kvstore):
    from importlib.metadata import version

    assert kvstore("--version").stdout == f"kvstore {version('tiered-kvstore')}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["ask", "--help"], ["inspect", "."], ["verify", "."]], ids=str
)
def test_nothing_heavy_is_imported_before_a_model_is_needed(arguments, tmp_path):
    code = "import sys; from tools.cli import run; run(sys.argv[1:]); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(result.stdout.splitlines()[-1].split())
    assert "tools.cli" in modules
    assert not HEAVY & modules


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["--no-such-option"],
        ["ask"],
        ["ask", "f"],
        ["inspect"],
        ["verify", "-x"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_2(kvstore, arguments):
    result = kvstore(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "--help" in line


def test_no_command_at_all_shows_help_and_is_2(kvstore):
    result = kvstore()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "."]], ids=" ".join)
def test_a_closed_pipe_is_no_failure(arguments, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        result = subprocess.run(
            [KVSTORE, *arguments],
            cwd=tmp_path,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, "")


def test_ctrl_c_is_130_without_a_traceback(tmp_path):
    document = tmp_path / "document"
    os.mkfifo(document)
    process = subprocess.Popen(
        [KVSTORE, "ask", document, "-q", "?"],
        stderr=subprocess.PIPE,
        text=True,
        # A shell without job control starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with document.open("w"):  # returns when the command is reading the document
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "kvstore: interrupted\n")


def test_help_fits_a_narrow_terminal():
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = pexpect.spawn(
        str(KVSTORE),
        ["verify", "--help"],
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 60),
        env=environment,
    )
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0
    assert max(len(line) for line in process.before.replace("\r", "").splitlines()) <= 60
    assert "\x1b" not in process.before
