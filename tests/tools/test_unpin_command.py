"""``kvstore unpin``, and the pins that ``kvstore inspect --pins`` lists."""

import json
import re
import time

import pytest
from command_case import end_of, on_terminal
from disk_case import problems_on_disk

from kvstore.disk import DiskStore

PIN_KEYS = {
    "key", "namespace", "model", "salt", "blocks", "tokens", "bytes", "pinned_until", "touched",
    "token_ids", "own_token_ids", "text", "own_text",
}  # fmt: skip


@pytest.fixture
def pins(cache, blocks) -> list[str]:
    """Keys of two pinned documents: of three blocks for five days, and of four for ever."""
    trunk = blocks.chain(5, start=1)
    short = [*trunk[:2], *blocks.below(trunk[1], 1, start=2)]
    long = blocks.chain(4, start=3)
    with DiskStore.open(cache) as store:
        assert store.pin([ref.key for ref in short], ttl_s=5 * 86400) == []
        assert store.pin([ref.key for ref in long]) == []
        assert store.pin([trunk[0].key], ttl_s=1e-9) == []  # it has ended
    return [short[-1].key.hex(), long[-1].key.hex()]


def listed(run, cache, *options) -> list[dict]:
    return json.loads(run("inspect", cache, "--pins", "--json", *options).stdout)["pins"]


def test_without_pins_it_says_so(run, cache, blocks):
    with DiskStore.open(cache):
        pass
    result = run("inspect", cache, "--pins")
    assert (result.stdout, result.stderr) == ("", f"kvstore: {cache} has no pins\n")


def test_pins_are_listed_with_what_they_protect_and_how_long(run, cache, pins):
    rows = listed(run, cache)
    assert [row["key"] for row in rows] == pins
    assert [(row["blocks"], row["model"]) for row in rows] == [(3, "test/tiny"), (4, "test/tiny")]
    assert 0 < rows[0]["pinned_until"] - time.time() <= 5 * 86400
    assert rows[1]["pinned_until"] is None
    for row in rows:
        assert row.keys() == PIN_KEYS
    assert rows[0]["own_token_ids"] == rows[0]["token_ids"][-len(rows[0]["own_token_ids"]) :]
    assert rows[1]["own_token_ids"] == rows[1]["token_ids"]
    _, days, for_ever = run("inspect", cache, "--pins").stdout.splitlines()
    assert re.match(rf"  {pins[0][:12]}  \d+ tokens  3 blocks  .*  for 5 days more  ", days)
    assert "  until it is released  " in for_ever
    assert "--pins" in run("inspect", cache).stdout
    block = json.loads(run("inspect", cache, "--block", pins[1], "--json").stdout)
    assert (block["has_pin"], block["pinned_until"]) == (True, None)


def test_a_pin_is_released_by_any_block_of_its_document(run, cache, blocks, pins):
    first = blocks.chain(4, start=3)[0].key.hex()
    found = json.loads(run("unpin", cache, "--document", first[:16], "--yes", "--json").stdout)
    assert found.keys() == {"pins", "released", "dry_run"}
    assert (found["pins"], found["dry_run"]) == (1, False)
    (row,) = found["released"]
    assert row.keys() == {"key", "namespace", "blocks", "bytes", "pinned_until"}
    assert (row["key"], row["blocks"]) == (pins[1], 4)
    assert [each["key"] for each in listed(run, cache)] == pins[:1]
    assert problems_on_disk(cache) == []


@pytest.mark.parametrize("meant", [["--all"], ["--namespace", "test/tiny"]])
def test_all_pins_are_released_and_the_blocks_stay_until_they_are_evicted(run, cache, pins, meant):
    result = run("unpin", cache, *meant, "--yes")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "released  2 pins")
    found = json.loads(run("inspect", cache, "--json").stdout)
    assert (found["blocks"], found["pinned_blocks"]) == (10, 0)
    assert (
        json.loads(run("evict", cache, "--to-size", "0", "--yes", "--json").stdout)["blocks"] == 10
    )


def test_a_dry_run_shows_what_would_go(run, cache, pins):
    result = run("unpin", cache, "--document", pins[0], "--dry-run")
    assert result.stdout.splitlines()[0] == "would release  1 pin"
    assert f"{pins[0][:16]}  3 blocks, " in result.stdout
    assert len(listed(run, cache)) == 2


def test_beside_an_open_store(run, kvstore, cache, pins):
    with DiskStore.open(cache) as store:
        assert kvstore("unpin", cache, "--all", "--yes").returncode == 0
        assert store.stats().pinned_blocks == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "inspect --pins"),
        (["--all", "--document", "ab"], "--all means all"),
        (["--all"], "add --yes"),
        (["--document", "0000", "--yes"], "no block"),
        (["--namespace", "llama", "--yes"], "test/tiny"),
    ],
)
def test_what_is_wrong_is_one_line_and_releases_nothing(run, cache, pins, options, part):
    result = run("unpin", cache, *options)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert part in line
    assert len(listed(run, cache)) == 2


def test_it_asks_on_a_terminal(run, cache, pins):
    process = on_terminal("unpin", cache, "--all")
    process.expect_exact("Release 2 pins? [y/N]: ")
    process.sendline("n")
    assert "nothing was changed" in end_of(process)
    assert process.exitstatus == 1
    assert len(listed(run, cache)) == 2
