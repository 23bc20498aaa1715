"""Ctrl-C in the middle of a command: 130, one line, and a sound cache."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from command_case import KVSTORE, run_here
from disk_case import problems_on_disk

from kvstore.disk import DiskStore
from tools import compact_command, evict_command, verify_command


@pytest.fixture
def full_cache(cache, blocks):
    """More blocks than go in one slice, one transaction, or one pipe."""
    with DiskStore.open(cache) as store:
        for start in range(4, 8):
            store.put_group(blocks.writes(blocks.chain(40, start=start)))
    return cache


@contextlib.contextmanager
def started(*arguments, **pipes):
    with subprocess.Popen(
        [KVSTORE, *arguments],
        stderr=subprocess.PIPE,
        # A shell without job control starts its background jobs with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **pipes,
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # where the test failed; leaving waits for it, and closes its pipes


def interrupt(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr.read() == b"kvstore: interrupted\n"


def expect_sound(cache) -> None:
    assert problems_on_disk(cache) == []
    assert {path.name for path in cache.iterdir()} == {"data.mdb", "lock.mdb", "attached"}
    with DiskStore.open(cache) as store:
        assert store.stats().state == "ok"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (verify_command, ["verify", "{}"]),
        (compact_command, ["compact", "{}"]),
        (evict_command, ["evict", "{}", "--to-size", "0", "--yes"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_in_the_middle_of_a_pass(full_cache, monkeypatch, module, arguments):
    calls = []

    @contextlib.contextmanager
    def pressed_at_the_second_look(what):
        def look(done, total):
            calls.append(done)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)

        yield look

    monkeypatch.setattr("kvstore.disk.offline.compact._CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(module, "progress_bar", pressed_at_the_second_look)
    result = run_here(*(argument.format(full_cache) for argument in arguments))
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "kvstore: interrupted\n"
    assert len(calls) == 2
    expect_sound(full_cache)


def test_while_an_export_waits_for_its_reader(full_cache):
    with started("export", full_cache, "-", stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"K"  # and no more: then the pipe is full
        interrupt(process)
    expect_sound(full_cache)


def test_while_a_file_is_exported(full_cache, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (
        started("export", full_cache, tmp_path / "pipe") as process,
        (tmp_path / "pipe").open("rb") as reader,
    ):
        assert reader.read(1) == b"K"
        interrupt(process)
    expect_sound(full_cache)


def test_while_an_import_waits_for_its_writer(full_cache, tmp_path):
    assert run_here("export", full_cache, tmp_path / "all.kv").returncode == 0
    data = (tmp_path / "all.kv").read_bytes()
    target = tmp_path / "target"
    with started("import", target, "-", stdin=subprocess.PIPE) as process:
        # What the pipe does not hold has been read: the command is among the blocks.
        process.stdin.write(data[: len(data) // 2])
        process.stdin.flush()
        interrupt(process)
    expect_sound(target)


AT_IMPORT = """
import sys
from importlib.abc import MetaPathFinder
from signal import SIGINT, raise_signal
wanted, *sys.argv[1:] = sys.argv[1:]

class Presses(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == wanted:
            raise_signal(SIGINT)

sys.meta_path.insert(0, Presses())
from tools.cli import main
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tools.commands", ["--help"]),
        ("click", ["inspect", "."]),
        ("importlib.metadata", ["--version"]),
        ("tools.inspect_command", ["inspect", "."]),
        ("numpy._core._multiarray_umath", ["verify", "."]),
        ("lmdb", ["evict", ".", "--to-size", "0", "--yes"]),
        ("engine.config", ["ask", "f", "-q", "?"]),
        ("kvstore.planning", ["plan", "f"]),
        ("engine.model.offline", ["why", ".", "--prompt-file", "f"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_while_modules_are_imported_it_ends_at_once_and_silently(module, arguments, tmp_path):
    """It was a traceback of whichever import it met."""
    result = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, module, *arguments],
        cwd=tmp_path,
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


def test_a_background_job_that_ignores_it_goes_on():
    result = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, "click", "--version"],
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.startswith(b"kvstore ")


def test_while_a_document_is_read(tmp_path):
    os.mkfifo(tmp_path / "document")
    asking = ["ask", tmp_path / "document", "-q", "?", "--cache-dir", tmp_path / "cache"]
    # Opening returns when the command is reading the document.
    with started(*asking) as process, (tmp_path / "document").open("w"):
        interrupt(process)
