"""``kvstore export`` and ``kvstore import``: files, pipes, and what is cut or damaged."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys

import pytest
from command_case import KVSTORE, end_of, on_terminal
from disk_case import damage_payload, problems_on_disk, raw_records


@pytest.fixture
def exported(run, cache, tmp_path):
    assert run("export", cache, tmp_path / "all.kv").returncode == 0
    return tmp_path / "all.kv"


def payloads(cache) -> dict:
    return {key: record["checksum"] for key, record in raw_records(cache).items()}


def test_a_round_trip_carries_everything_and_twice_changes_nothing(run, cache, exported, tmp_path):
    target = tmp_path / "target"
    first = run("import", target, exported, "--disk-cache-size", "32MiB", "--json")
    nothing = {"blocks": 0, "present": 0, "refused": 0, "evicted": 0, "obstacle": None}
    assert json.loads(first.stdout) == nothing | {"blocks": 10}
    assert payloads(target) == payloads(cache)
    before = (target / "data.mdb").read_bytes()
    again = run("import", target, exported, "--json")
    assert json.loads(again.stdout) == nothing | {"present": 10}
    assert payloads(target) == payloads(cache)
    assert len(before) == (target / "data.mdb").stat().st_size
    summaries = [json.loads(run("inspect", each, "--json").stdout) for each in (cache, target)]
    for row in [*summaries[0]["namespaces"], *summaries[1]["namespaces"]]:
        del row["oldest_use"], row["newest_use"]  # an import is a use
    assert summaries[0]["namespaces"] == summaries[1]["namespaces"]
    assert problems_on_disk(target) == []


def test_a_round_trip_through_a_pipe(cache, tmp_path):
    target = tmp_path / "target"
    with subprocess.Popen(
        [KVSTORE, "export", cache, "-", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as writer:
        reader = subprocess.run(
            [KVSTORE, "import", target, "-", "--json"],
            stdin=writer.stdout,
            capture_output=True,
            timeout=60,
            check=True,
        )
        _, talk = writer.communicate(timeout=60)
    assert writer.returncode == 0
    assert json.loads(talk)["blocks"] == json.loads(reader.stdout)["blocks"] == 10
    assert payloads(target) == payloads(cache)


def test_one_document_is_carried_with_what_it_continues(run, cache, blocks, tmp_path):
    branch = blocks.below(blocks.chain(5, start=1)[1], 1, start=2)[0]
    result = run("export", cache, tmp_path / "one.kv", "--document", branch.key.hex(), "--json")
    assert json.loads(result.stdout)["blocks"] == 3
    run("import", tmp_path / "target", tmp_path / "one.kv")
    trunk = blocks.chain(5, start=1)[:2]
    assert set(raw_records(tmp_path / "target")) == {ref.key for ref in [*trunk, branch]}


def test_only_the_owner_reads_an_export_and_a_failed_one_leaves_nothing(run, cache, exported):
    assert stat.S_IMODE(exported.stat().st_mode) == 0o600
    result = run("export", cache, exported.parent / "none" / "file.kv")
    assert (result.returncode, result.stdout) == (2, "")
    assert "No such file" in result.stderr
    result = run("export", cache, exported.parent / "x.kv", "--namespace", "llama")
    assert result.returncode == 2
    assert {path.name for path in exported.parent.iterdir()} == {"a cache", "all.kv"}


KILLED_AT_ITS_END = """
import os, signal, sys
from kvstore.disk.offline import carry
carry.write_end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
carry.export_documents(sys.argv[1], sys.argv[2])
"""


def test_what_a_killed_export_left_is_cleared_and_nothing_else(run, cache, exported):
    """A process that is gone holds no lock. What one at work writes stays, and what is foreign."""
    folder, data = exported.parent, exported.read_bytes()
    killed = subprocess.Popen([sys.executable, "-c", KILLED_AT_ITS_END, cache, exported])
    assert killed.wait(60) == -signal.SIGKILL
    left = folder / f"all.kv.tmp-{killed.pid}"
    assert left.read_bytes()[:6] == b"KVSTOR"
    kept = {"all.kv.tmp-2": data, "all.kv.tmp-3": b"", "all.kv.tmp-4": b"mine"}
    kept |= {"all.kv.tmp-mine": data, "other.kv.tmp-5": data}
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    with (folder / "all.kv.tmp-2").open("rb") as at_work:
        fcntl.flock(at_work, fcntl.LOCK_EX)
        assert run("export", cache, exported, "--yes").returncode == 0
    assert not left.exists()
    assert {name: (folder / name).read_bytes() for name in kept} == kept


def test_a_file_that_exists_is_replaced_only_with_yes(run, cache, exported):
    exported.write_text("mine")
    result = run("export", cache, exported)
    assert (result.returncode, exported.read_text()) == (2, "mine")
    assert "--yes" in result.stderr
    process = on_terminal("export", cache, exported)
    process.expect("exists. Replace it")
    process.send("n\r")
    end_of(process)
    assert (process.exitstatus, exported.read_text()) == (1, "mine")
    assert run("export", cache, exported, "--yes").returncode == 0
    assert exported.stat().st_size > 10_000


def test_binary_is_not_written_to_a_terminal(cache):
    process = on_terminal("export", cache, "-")
    assert "redirect stdout" in end_of(process)
    assert process.exitstatus == 2


def test_nothing_is_written_when_nothing_is_meant(kvstore, cache):
    for option, value in [("--namespace", "llama"), ("--document", "0000")]:
        result = kvstore("export", cache, "-", option, value)
        assert (result.returncode, result.stdout) == (2, "")
        assert value in result.stderr


def test_bad_blocks_are_left_out_and_said(run, cache, blocks, tmp_path):
    damage_payload(cache, blocks.payload(blocks.chain(4, start=3)[1]))
    result = run("export", cache, tmp_path / "file.kv")
    assert result.returncode == 1
    assert "exported    7 blocks" in result.stdout
    assert "left out: 3 blocks," in result.stderr
    assert run("import", tmp_path / "target", tmp_path / "file.kv").returncode == 0


def test_of_a_file_that_was_cut_nothing_is_stored(run, exported, tmp_path):
    os.truncate(exported, exported.stat().st_size // 2)
    result = run("import", tmp_path / "target", exported)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"kvstore: {exported}: not a valid export: it ends too early")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_of_a_damaged_stream_what_came_before_is_kept_and_counted(
    kvstore, run, exported, tmp_path, damage
):
    data = bytearray(exported.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    result = subprocess.run(
        [KVSTORE, "import", tmp_path / "target", "-"],
        input=bytes(data),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, b"")
    (line,) = result.stderr.decode().splitlines()
    assert "blocks before that, which were kept: 4" in line
    assert len(raw_records(tmp_path / "target")) == 4
    assert problems_on_disk(tmp_path / "target") == []


@pytest.mark.parametrize("content", [b"", b"some text", b"\x80\x04pickle"])
def test_what_is_no_export_is_named(run, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    result = run("import", tmp_path / "target", tmp_path / "file")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{tmp_path / 'file'}: not an export" in result.stderr
    assert not (tmp_path / "target").exists()


def test_a_missing_file_is_named(run, tmp_path):
    result = run("import", tmp_path / "target", tmp_path / "none.kv")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{tmp_path / 'none.kv'}: cannot be read: No such file" in result.stderr
    assert not (tmp_path / "target").exists()
