"""The manners that every command shares."""

import os
import shlex
import subprocess
import sys

import click
import pytest
from command_case import KVSTORE
from disk_case import problems_on_disk

from tools.commands import cli

HEAVY = {"torch", "triton", "transformers", "rich"}


def test_help_names_every_command(kvstore):
    result = kvstore("--help")
    assert result.returncode == 0
    for name in cli.summaries:
        assert f"\n  {name} " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", sorted(cli.summaries))
def test_help_of_a_command_starts_with_two_examples(run, name):
    result = run(name, "-h", COLUMNS="120")
    assert result.returncode == 0
    usage, heading, *rest = [line for line in result.stdout.splitlines() if line]
    assert usage.startswith(f"Usage: kvstore {name} ")
    assert heading == "Examples:"
    assert all(line.startswith(f"  kvstore {name} ") for line in rest[:2])
    assert "--json" in result.stdout or name in ("serve", "bench")


@pytest.mark.parametrize("name", ["", *sorted(cli.summaries)])
def test_help_fits_a_narrow_terminal(run, name):
    lines = run(*filter(None, [name]), "-h", COLUMNS="40").stdout.splitlines()
    names_of_options = [line for line in lines if line.startswith("  --")]
    assert max(map(len, set(lines) - set(names_of_options))) <= 40


def test_an_option_of_several_commands_is_of_the_same_kind_in_each():
    """``--device`` was a device or a size, ``--document`` a key or a flag."""
    kinds: dict[str, set[str]] = {}
    for name in cli.summaries:
        for option in cli.get_command(None, name).params:
            for flag in option.opts if isinstance(option, click.Option) else ():
                kinds.setdefault(flag, set()).add(kind_of(option))
    assert {flag: found for flag, found in kinds.items() if len(found) > 1} == {}
    assert kinds["--device-cache"] == {"size"}


def kind_of(option: click.Option) -> str:
    if option.is_flag:
        return "flag"
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return "number"
    return "size" if (option.metavar or "").startswith("SIZE") else "text"


def test_version_is_that_of_the_distribution(run):
    from importlib.metadata import version

    assert run("--version").stdout == f"kvstore {version('tiered-kvstore')}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["ask", "--help"], ["inspect", "."], ["evict", ".", "--to-size", "0", "-y"]],
    ids=lambda arguments: arguments[0],
)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments, tmp_path):
    code = "import sys; from tools.commands import run; run(sys.argv[1:]); print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(result.stdout.splitlines()[-1].split())
    assert "tools.commands" in modules
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
        ["export", "d"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_2(run, arguments):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "--help" in line


def test_no_command_at_all_shows_help_and_is_2(run):
    result = run()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


@pytest.mark.parametrize("columns", ["1", "0", "-5", "many"])
def test_help_comes_out_whatever_the_terminal_says_of_itself(run, columns):
    assert run("inspect", "-h", COLUMNS=columns).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status"), [(["inspect", "{}", "--tree"], 0), (["import", "{}", "-"], 2)]
)
def test_closed_standard_streams_are_empty_ones(cache, arguments, status):
    """They were a traceback; and a file that was opened next would have become stdout."""
    line = shlex.join([str(KVSTORE), *(each.format(cache) for each in arguments)])
    result = subprocess.run(f"{line} <&- >&-", shell=True, stderr=subprocess.PIPE, check=False)
    assert result.returncode == status
    assert b"Traceback" not in result.stderr
    assert problems_on_disk(cache) == []


@pytest.mark.parametrize("command", ["inspect", "verify", "compact"])
def test_a_path_that_is_no_text_is_one_like_any_other(cache, kvstore, command):
    odd = cache.with_name(os.fsdecode(b"a \xff\x1b[31m cache"))
    cache.rename(odd)
    result = kvstore(command, odd)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["inspect", "{}"], ["export", "{}", "-"]], ids=lambda each: each[0]
)
def test_a_closed_pipe_is_no_failure(arguments, cache):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        result = subprocess.run(
            [KVSTORE, *(argument.format(cache) for argument in arguments)],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, "")
