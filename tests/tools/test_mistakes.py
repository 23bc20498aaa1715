"""Whatever a user gets wrong is one line that says so, for every command; nothing is changed."""

import contextlib
import io
import json
import os
import resource
import signal
import subprocess

import lmdb
import pytest
from command_case import KVSTORE, Result, run_here
from disk_case import damage_payload, problems_on_disk

from kvstore.disk import DiskStore, environment
from kvstore.disk import store as disk_store
from kvstore.disk.attach import Attachment
from tools.commands import cli
from tools.commands import run as command_run

ON_A_CACHE = {
    "inspect": ["inspect", "{cache}"],
    "inspect json": ["inspect", "{cache}", "--json"],
    "why": ["why", "{cache}", "--prompt-file", "{text}"],
    "verify": ["verify", "{cache}"],
    "verify fix": ["verify", "{cache}", "--fix"],
    "unpin dry": ["unpin", "{cache}", "--all", "--dry-run"],
    "unpin": ["unpin", "{cache}", "--all", "--yes"],
    "evict dry": ["evict", "{cache}", "--to-size", "0", "--dry-run"],
    "evict": ["evict", "{cache}", "--to-size", "0", "--yes"],
    "compact": ["compact", "{cache}"],
    "export": ["export", "{cache}", "{other}"],
    "import": ["import", "{cache}", "{export}"],
}
CHANGING = {"verify fix", "evict", "compact", "import"}
NOT_ON_A_CACHE = {"ask", "serve", "plan", "bench"}


def missing(directory):
    directory.rename(directory.with_name("elsewhere"))


def a_file(directory):
    missing(directory)
    directory.write_text("mine")


def not_a_cache(directory):
    (directory / "data.mdb").unlink()
    (directory / "thesis.txt").write_text("mine")


def of_another_program(directory):
    missing(directory)
    with lmdb.open(str(directory)) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")


def of_a_newer_program(directory):
    with lmdb.open(str(directory), max_dbs=6) as env, env.begin(write=True) as txn:
        txn.put(b"schema", b"99", db=env.open_db(b"meta", txn, create=False))


def truncated(directory):
    os.truncate(directory / "data.mdb", 20_000)


def a_named_pipe(directory):
    missing(directory)
    os.mkfifo(directory)


def a_named_pipe_inside(directory):
    (directory / "data.mdb").unlink()
    os.mkfifo(directory / "data.mdb")


def open_to_anyone(directory):
    directory.chmod(0o777)


MISTAKES = {
    missing: ("no such directory", 2),
    a_file: ("a file", 2),
    a_named_pipe: ("a file", 2),
    a_named_pipe_inside: ("no regular file", 2),
    not_a_cache: ("thesis.txt", 2),
    of_another_program: ("another LMDB", 2),
    of_a_newer_program: ("schema 99", 1),
    truncated: ("", 1),
    open_to_anyone: ("chmod 0700", 2),
}


def command_line(name, cache, tmp_path) -> list[str]:
    places = {
        "cache": cache,
        "export": tmp_path / "all.kv",
        "other": tmp_path / "other.kv",
        "text": tmp_path / "text",
    }
    (tmp_path / "text").write_text("some text")
    return [part.format(**places) for part in ON_A_CACHE[name]]


def expect_one_line(result: Result, status: int, *parts: str) -> None:
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvstore")
    assert all(part in line for part in parts), line
    for bare in ("PosixPath", "b'", "None", "<", "errno", "Errno"):
        assert bare not in line


def test_every_command_is_among_them():
    assert {line[0] for line in ON_A_CACHE.values()} | NOT_ON_A_CACHE == set(cli.summaries)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("name", ON_A_CACHE)
def test_a_directory_that_is_no_cache_to_use(cache, tmp_path, name, mistake):
    assert run_here("export", cache, tmp_path / "all.kv").returncode == 0
    part, status = MISTAKES[mistake]
    arguments = command_line(name, cache, tmp_path)
    mistake(cache)
    if name == "import" and mistake is missing:
        return  # it makes one
    result = run_here(*arguments)
    if mistake is truncated and name in ("verify", "verify fix"):
        assert result.returncode == 1
        assert "the cache: structure: " in result.stdout
        return
    expect_one_line(result, status, str(cache), part)
    assert not (tmp_path / "other.kv").exists()


def nothing(directory):
    directory.mkdir()


def what_an_interrupted_creation_leaves(directory):
    lmdb.open(str(directory)).close()


@pytest.mark.parametrize("make", [nothing, what_an_interrupted_creation_leaves])
@pytest.mark.parametrize("name", [name for name in ON_A_CACHE if name not in ("why", "import")])
def test_where_no_cache_is_nothing_is_found_and_nothing_is_written(tmp_path, name, make):
    empty = tmp_path / "empty"
    make(empty)
    before = {path: path.stat().st_mtime_ns for path in [empty, *empty.iterdir()]}
    arguments = command_line(name, empty, tmp_path)
    result = run_here(*arguments, *([] if "--json" in arguments else ["--json"]))
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout).get("blocks", 0) == 0
    assert {path: path.stat().st_mtime_ns for path in [empty, *empty.iterdir()]} == before


@pytest.mark.parametrize("name", ON_A_CACHE)
def test_a_directory_that_belongs_to_somebody_else(cache, tmp_path, monkeypatch, name):
    run_here("export", cache, tmp_path / "all.kv")
    arguments = command_line(name, cache, tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    expect_one_line(run_here(*arguments), 2, str(cache), f"user {owner}")


@pytest.mark.parametrize("name", ON_A_CACHE)
def test_a_directory_that_is_being_compacted(cache, tmp_path, monkeypatch, name):
    monkeypatch.setattr(environment, "_SHARE_WAIT_S", 0.01)
    run_here("export", cache, tmp_path / "all.kv")
    arguments = command_line(name, cache, tmp_path)
    holder = Attachment(cache, "compact")
    try:
        assert holder.try_exclusive()
        holder.claim_slot()
        result = run_here(*arguments)
    finally:
        holder.detach()
    expect_one_line(result, 1, str(cache), f"pid {os.getpid()} (compact)")
    assert problems_on_disk(cache) == []


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_a_directory_whose_writer_is_stopped(cache, blocks, tmp_path, monkeypatch, name):
    run_here("export", cache, tmp_path / "all.kv")
    run_here("evict", cache, "--document", blocks.chain(4, start=3)[0].key.hex(), "--yes")
    arguments = command_line(name, cache, tmp_path)
    damage_payload(cache, blocks.payload(blocks.chain(5, start=1)[4]))
    monkeypatch.setattr(disk_store, "COMMAND_WAIT_S", 0.05)
    monkeypatch.setattr(disk_store, "_SHORT_WAIT_S", 0.05)
    holder = Attachment(cache, "engine")
    try:
        assert holder.share(1)
        assert holder.try_writer_lock()
        holder.claim_slot()
        result = run_here(*arguments)
    finally:
        holder.detach()
    holder_named = f"pid {os.getpid()} (engine)"
    if name == "verify fix":  # what it found is worth knowing
        assert result.returncode == 1
        assert f"not fixed   it is being written by {holder_named}" in result.stdout
    else:
        expect_one_line(result, 1, str(cache), holder_named)


@pytest.mark.parametrize("name", ON_A_CACHE)
def test_an_output_that_is_full(cache, tmp_path, name):
    run_here("export", cache, tmp_path / "all.kv")
    arguments = command_line(name, cache, tmp_path)
    err = io.StringIO()
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        with contextlib.redirect_stderr(err):
            status = command_run(arguments)
        expect_one_line(Result(status, "", err.getvalue()), 1, "No space left on device")


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@pytest.mark.parametrize("name", ["compact", "export", "import"])
def test_a_volume_that_is_full(cache, blocks, tmp_path, name):
    with DiskStore.open(cache) as store:
        store.put_group(blocks.writes(blocks.chain(60, start=4)))
    run_here("export", cache, tmp_path / "all.kv")
    arguments = command_line(name, cache, tmp_path)
    if name == "import":
        arguments[1] = str(tmp_path / "new")
    result = subprocess.run(
        [KVSTORE, *arguments], preexec_fn=small_files, capture_output=True, text=True, check=False
    )
    assert "File too large" in result.stderr or "volume is full" in result.stderr
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert not (tmp_path / "other.kv").exists()
    assert not list(cache.glob("*.tmp-*"))
    assert problems_on_disk(cache) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ask", "{tmp}/none", "-q", "?"], "No such file"),
        (["plan", "{tmp}/none"], "none"),
        (["bench", "none"], "no benchmark"),
        (["serve", "--cache-dir", "{tmp}/text", "--port", "0"], "a file"),
        (["why", "{tmp}/empty", "--prompt-file", "{tmp}/none"], "{tmp}/none"),
        (["import", "{tmp}/new", "{tmp}/none"], "No such file"),
        (["export", "{tmp}/none", "-"], "no such directory"),
        (["inspect", "~nobody-here/cache"], "no such home directory"),
        (["inspect", "{tmp}/empty", "--tree", "--tokenizer", "~nobody-here/t"], "home directory"),
        (["ask", "{tmp}/text", "-q", "?", "--model", "~nobody-here/m"], "home directory"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_path_that_is_not_there(tmp_path, arguments, part):
    (tmp_path / "text").write_text("text")
    (tmp_path / "empty").mkdir()
    result = run_here(*(argument.format(tmp=tmp_path) for argument in arguments))
    expect_one_line(result, 2, part.format(tmp=tmp_path))
