"""``kvstore evict``, and ``compact``, which makes what went be gone for good."""

import json
import time

import pytest
from command_case import end_of, on_terminal
from disk_case import problems_on_disk

from kvstore.disk import DiskStore

KEYS = {
    "blocks", "bytes", "pinned_blocks", "num_documents", "documents", "namespaces", "dry_run",
}  # fmt: skip


def num_blocks(run, cache) -> int:
    return json.loads(run("inspect", cache, "--json").stdout)["blocks"]


def test_dry_run_shows_what_would_go_and_changes_nothing(run, cache, blocks):
    result = run("evict", cache, "--to-size", "0", "--dry-run", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found.keys() == KEYS
    assert (found["blocks"], found["num_documents"], found["dry_run"]) == (10, 3, True)
    (namespace,) = found["namespaces"]
    assert (namespace["model"], namespace["blocks"]) == ("test/tiny", 10)
    ends = {blocks.chain(5, start=1)[4].key.hex(), blocks.chain(4, start=3)[3].key.hex()}
    assert ends < {document["key"] for document in found["documents"]}
    text = run("evict", cache, "--to-size", "0", "--dry-run").stdout
    assert "would evict  10 blocks of 3 documents, " in text
    assert all(f"  {key[:16]}  " in text for key in ends)
    assert num_blocks(run, cache) == 10


def test_each_condition_chooses_and_all_must_hold(run, cache, blocks):
    document = blocks.chain(4, start=3)[0].key.hex()[:12]
    assert run(
        "evict", cache, "--namespace", "test/tiny", "--older-than", "1h", "--yes"
    ).stdout == ("evicted  0 blocks of 0 documents, 0 B\n")
    result = run("evict", cache, "--document", document, "--older-than", "0s", "--yes", "--json")
    assert json.loads(result.stdout)["blocks"] == 4
    size = json.loads(run("inspect", cache, "--json").stdout)["used_bytes"]
    assert run("evict", cache, "--to-size", size - 1, "--yes").returncode == 0
    assert num_blocks(run, cache) == 5
    assert run("evict", cache, "--namespace", "test/tiny", "--yes").returncode == 0
    assert num_blocks(run, cache) == 0
    assert problems_on_disk(cache) == []


def test_off_a_terminal_it_needs_yes(run, cache):
    result = run("evict", cache, "--to-size", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--yes" in result.stderr
    assert num_blocks(run, cache) == 10


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 0), ("n", 1, 10), ("\x04", 1, 10)])
def test_on_a_terminal_it_asks(run, cache, answer, status, left):
    process = on_terminal("evict", cache, "--to-size", "0")
    process.expect(r"Evict 10 blocks of 3 documents, 3\d\.\d KiB\? \[y/N\]")
    process.send(answer if answer == "\x04" else answer + "\r")
    text = end_of(process)
    assert process.exitstatus == status
    assert ("nothing was changed" in text) == (status == 1)
    assert num_blocks(run, cache) == left


def test_it_works_beside_an_open_store(run, kvstore, cache, blocks):
    with DiskStore.open(cache) as store:
        result = kvstore("evict", cache, "--to-size", "0", "--yes")
        assert (result.returncode, store.stats().blocks) == (0, 0)
        assert "kvstore compact" in result.stderr
        store.put_group(blocks.writes(blocks.chain(2, start=7)))
    assert num_blocks(run, cache) == 2
    assert problems_on_disk(cache) == []


def test_scrub_leaves_no_byte_of_what_went(run, cache, blocks):
    payload = blocks.payload(blocks.chain(4, start=3)[2])
    document = blocks.chain(4, start=3)[0].key.hex()
    assert payload in (cache / "data.mdb").read_bytes()
    (cache / "data.mdb.damaged-1").touch()
    result = run("evict", cache, "--document", document, "--scrub", "--yes")
    assert result.returncode == 0
    assert payload not in (cache / "data.mdb").read_bytes()
    assert str(cache / "data.mdb.damaged-1") in result.stderr
    assert num_blocks(run, cache) == 6
    assert problems_on_disk(cache) == []


def test_scrub_evicts_nothing_when_it_could_not_scrub(run, kvstore, cache):
    with DiskStore.open(cache):
        result = kvstore("evict", cache, "--to-size", "0", "--scrub", "--yes")
    assert (result.returncode, result.stdout) == (1, "")
    assert "(engine); end it first" in result.stderr
    assert num_blocks(run, cache) == 10


def test_pinned_blocks_are_spared_and_counted(run, cache, blocks):
    with DiskStore.open(cache) as store:
        assert store.pin([ref.key for ref in blocks.chain(4, start=3)]) == []
    result = run("evict", cache, "--to-size", "0", "--yes")
    assert "4 pinned blocks" in result.stdout
    assert num_blocks(run, cache) == 4
    assert run("evict", cache, "--to-size", "0", "--with-pinned", "--yes").returncode == 0
    assert num_blocks(run, cache) == 0


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--older-than", "soon", "7d"),
        ("--older-than", "-1d", "7d"),
        ("--to-size", "big", "512MiB"),
        ("--namespace", "llama", "test/tiny"),
        ("--document", "my file", "hex digits"),
        ("--document", "0000", "no block"),
    ],
)
def test_a_condition_without_meaning_is_named(run, cache, option, value, remedy):
    result = run("evict", cache, option, value, "--yes")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert remedy in line
    assert num_blocks(run, cache) == 10


def test_nothing_chosen_is_wrong_usage(run, cache):
    result = run("evict", cache, "--yes")
    assert result.returncode == 2
    assert "--older-than" in result.stderr


def test_ages_are_measured_from_the_last_use(run, cache, blocks):
    with DiskStore.open(cache, clock=lambda: time.time() - 8 * 86400) as store:
        store.put_group(blocks.writes(blocks.chain(2, start=9)))
    result = run("evict", cache, "--older-than", "1w", "--dry-run")
    assert "would evict  2 blocks of 1 document, " in result.stdout
    assert "used 8 days ago" in result.stdout


def test_compact_says_how_much_it_gave_back(run, cache):
    run("evict", cache, "--to-size", "0", "--yes")
    sizes = json.loads(run("compact", cache, "--json").stdout)
    assert sizes["bytes_after"] == (cache / "data.mdb").stat().st_size < sizes["bytes_before"]
    text = run("compact", cache).stdout
    assert text.startswith("before      ")
    assert "given back" in text
    assert problems_on_disk(cache) == []
