"""``kvstore inspect`` and ``kvstore verify`` against a directory whose contents are known."""

import json
from pathlib import Path

import lmdb
import pytest
from command_case import end_of, on_terminal

from kvstore.block import BlockWrite
from kvstore.disk import DiskStore
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id

IDENTITY = {
    "model": "tiny",
    "dtype": "float32",
    "block_size": 4,
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
NUM_BLOCKS, BLOCK_BYTES = 5, 512
INSPECT_KEYS = {
    "path", "schema_version", "file_bytes", "used_bytes", "capacity_bytes", "blocks", "tokens",
    "namespaces",
}  # fmt: skip
NAMESPACE_KEYS = {"id", *IDENTITY, "blocks", "tokens", "bytes"}
VERIFY_KEYS = {"blocks_checked", "bytes_checked", "corrupt", "orphans", "fixed", "ok"}


@pytest.fixture
def cache(tmp_path) -> Path:
    """One document of five blocks."""
    namespace = namespace_id(IDENTITY)
    refs = chain_refs(chain_seed(namespace), encode_tokens(range(4 * NUM_BLOCKS)), 16)
    store = DiskStore.open(tmp_path / "a cache", capacity_bytes=64 << 20)
    store.register_namespace(namespace, IDENTITY)
    store.put_group([BlockWrite(ref, namespace, b"", bytes([7]) * BLOCK_BYTES) for ref in refs])
    store.close()
    return tmp_path / "a cache"


def flip_a_payload_byte(cache: Path) -> str:
    """Damage one block behind the store's back; returns its key."""
    with lmdb.open(str(cache), max_dbs=8, map_size=64 << 20) as env:
        payloads = env.open_db(b"payload", create=False)
        with env.begin(write=True) as txn:
            key, value = next(iter(txn.cursor(db=payloads)))
            key, value = bytes(key), bytearray(value)
            value[BLOCK_BYTES // 2] ^= 1
            txn.put(key, bytes(value), db=payloads)
    return key.hex()


def test_inspect_prints_the_object_of_the_contract(run, cache):
    summary = json.loads(run("inspect", cache, "--json").stdout)
    assert summary.keys() >= INSPECT_KEYS
    assert summary["path"] == str(cache)
    assert (summary["blocks"], summary["tokens"]) == (NUM_BLOCKS, 4 * NUM_BLOCKS)
    assert summary["capacity_bytes"] == 64 << 20
    assert NUM_BLOCKS * BLOCK_BYTES < summary["used_bytes"] <= summary["file_bytes"]
    (namespace,) = summary["namespaces"]
    assert namespace.keys() >= NAMESPACE_KEYS
    assert {name: namespace[name] for name in IDENTITY} == IDENTITY
    assert (namespace["blocks"], namespace["tokens"]) == (NUM_BLOCKS, 4 * NUM_BLOCKS)


def test_inspect_tells_people_the_same(run, cache):
    result = run("inspect", cache)
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 (20 tokens)" in result.stdout
    assert "64.0 MiB at most" in result.stdout
    assert "float32, 4 tokens a block, 2 layers, 1 heads of 8" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_empty_directory_is_a_cache_without_blocks(run, command, tmp_path):
    (tmp_path / "empty").mkdir()
    result = run(command, tmp_path / "empty", "--json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert found["blocks" if command == "inspect" else "blocks_checked"] == 0
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("path", ["missing", "a file"])
def test_what_is_no_directory_is_one_line_and_2(run, command, path, tmp_path):
    (tmp_path / "a file").write_text("no cache")
    result = run(command, tmp_path / path)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert str(tmp_path / path) in line


def test_verify_of_a_sound_cache_is_0(run, cache):
    result = run("verify", cache, "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert report.keys() >= VERIFY_KEYS
    assert report | {"bytes_checked": None} == {
        "bad_blocks": 0,
        "obstacle": None,
        "blocks_checked": NUM_BLOCKS,
        "bytes_checked": None,
        "corrupt": [],
        "orphans": [],
        "fixed": 0,
        "ok": True,
    }
    assert report["bytes_checked"] >= NUM_BLOCKS * BLOCK_BYTES


def test_verify_finds_a_flipped_byte_and_changes_nothing(run, cache):
    key = flip_a_payload_byte(cache)
    for _ in range(2):
        result = run("verify", cache, "--json")
        assert result.returncode == 1
        assert [found["key"] for found in json.loads(result.stdout)["corrupt"]] == [key]


def test_verify_fix_drops_the_bad_block_and_is_still_1(run, cache):
    flip_a_payload_byte(cache)
    result = run("verify", cache, "--fix", "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["fixed"] == 1
    after = run("verify", cache, "--json")
    assert (after.returncode, json.loads(after.stdout)["ok"]) == (0, True)
    assert json.loads(run("inspect", cache, "--json").stdout)["blocks"] == NUM_BLOCKS - 1


def test_verify_tells_people_what_to_do(run, cache):
    key = flip_a_payload_byte(cache)
    result = run("verify", cache)
    assert result.returncode == 1
    assert f"  {key}: " in result.stdout
    assert "--fix" in result.stdout
    assert result.stderr == ""


def test_both_work_beside_an_open_store(kvstore, cache):
    store = DiskStore.open(cache)
    try:
        assert json.loads(kvstore("inspect", cache, "--json").stdout)["blocks"] == NUM_BLOCKS
        assert kvstore("verify", cache).returncode == 0
    finally:
        store.close()


def test_verify_shows_progress_on_a_terminal_only(cache):
    text = end_of(process := on_terminal("verify", cache))
    assert process.exitstatus == 0
    assert "verifying" in text
    assert f"checked     {NUM_BLOCKS} blocks" in text


def test_verify_fix_says_what_it_did_and_nothing_raw(kvstore, cache):
    """The store's log lines are for programs, and went to stderr as they are."""
    with lmdb.open(str(cache), max_dbs=8, map_size=64 << 20) as env:
        index = env.open_db(b"index", create=False)
        with env.begin(write=True) as txn:
            key, _ = next(iter(txn.cursor(db=index)))
            txn.put(key, b"damaged", db=index)
    result = kvstore("verify", cache, "--fix")
    assert result.returncode == 1
    assert "fixed       " in result.stdout
    assert result.stderr == ""


def test_what_fix_leaves_without_bytes_is_explained_and_is_no_finding(run, cache):
    refs = chain_refs(chain_seed(namespace_id(IDENTITY)), encode_tokens(range(4 * NUM_BLOCKS)), 16)
    with lmdb.open(str(cache), max_dbs=8, map_size=64 << 20) as env:
        payloads = env.open_db(b"payload", create=False)
        with env.begin(write=True) as txn:
            txn.put(refs[1].key, b"wrong", db=payloads)
    would = run("verify", cache, "--fix", "--dry-run")
    assert (would.returncode, "would fix   1: " in would.stdout) == (1, True)
    fixed = run("verify", cache, "--fix").stdout
    assert "fixed       1; what was dropped is computed anew" in fixed
    assert "waiting     1 block without bytes" in fixed
    after = run("verify", cache, "--json")
    assert (after.returncode, json.loads(after.stdout)["bad_blocks"]) == (0, 1)


def test_a_pinned_document_is_shown_and_evicted_only_when_told_to(run, cache):
    with DiskStore.open(cache) as store:
        refs = chain_refs(
            chain_seed(namespace_id(IDENTITY)), encode_tokens(range(4 * NUM_BLOCKS)), 16
        )
        assert store.pin([ref.key for ref in refs]) == []
    assert json.loads(run("inspect", cache, "--json").stdout)["pinned_blocks"] == NUM_BLOCKS
    assert f"pinned      {NUM_BLOCKS}" in run("inspect", cache).stdout
    kept = run("evict", cache, "--namespace", "tiny", "--yes")
    assert f"{NUM_BLOCKS} pinned blocks that were chosen stay" in kept.stdout
    gone = run("evict", cache, "--namespace", "tiny", "--with-pinned", "--yes", "--json")
    assert json.loads(gone.stdout)["blocks"] == NUM_BLOCKS
    assert json.loads(run("inspect", cache, "--json").stdout)["pinned_blocks"] == 0
