"""The tree in rows, and one block in full, against caches whose contents are known."""

import json
import os

import pytest

from kvstore.block import BlockWrite, PutOutcome
from kvstore.disk import DiskStore
from kvstore.disk.attach import MAX_PUBLISHED_BYTES, Attachment
from kvstore.disk.offline.branches import HEAD_TOKENS, branches, documents
from kvstore.disk.offline.look import Engines, block, survey
from kvstore.disk.slices import reading
from kvstore.errors import ConfigError
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id, salt_digest

IDENTITY = {"model": "m", "dtype": "float32", "block_size": 4, "tokenizer": None}
NAMESPACE = namespace_id(IDENTITY)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with DiskStore.open(tmp_path / "cache", capacity_bytes=2 << 20, clock=clock) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        yield store


def put(store, text: str, salt: str = "", payload_bytes: int = 100) -> list[bytes]:
    """Store a text, a token a character and four a block; the blocks' keys."""
    refs = chain_refs(chain_seed(NAMESPACE, salt), encode_tokens(list(map(ord, text))), 16)
    writes = [BlockWrite(ref, NAMESPACE, salt_digest(salt), bytes(payload_bytes)) for ref in refs]
    assert PutOutcome.FULL not in store.put_group(writes)
    return [ref.key for ref in refs]


def text(token_ids) -> str:
    return "".join(map(chr, token_ids))


def rows_of(view, tmp_path) -> list:
    with reading(tmp_path / "cache") as env:
        return list(view(env))


def test_a_run_without_a_fork_is_one_row_and_those_below_follow_it(store, tmp_path):
    keys = put(store, "one long text" + "!" * 19)  # 8 blocks
    put(store, "one long and an end.")  # forks after 2
    put(store, "one long and another")  # and after 3
    found = rows_of(branches, tmp_path)
    assert {(row.level, row.depth, text(row.token_ids)) for row in found} == {
        (0, 0, "one long"),
        (1, 2, " text" + "!" * 19),
        (1, 2, " and"),
        (2, 3, " an end."),
        (2, 3, " another"),
    }
    trunk = found[0]
    assert (trunk.num_blocks, trunk.num_tokens, trunk.num_children) == (2, 8, 2)
    assert (trunk.key, trunk.last_key) == (keys[0], keys[1])
    tail = next(row for row in found if row.token_ids[1] == ord("t"))
    assert (tail.num_blocks, tail.num_children, tail.last_key) == (6, 0, keys[-1])
    assert sum(row.num_bytes for row in found) == store.stats().used_bytes


def test_rows_of_a_chain_longer_than_a_slice_are_whole(store, tmp_path):
    long = "x" * 4 * 2500
    put(store, long)
    (row,) = rows_of(branches, tmp_path)
    assert (row.num_blocks, len(row.token_ids)) == (2500, HEAD_TOKENS)
    (document,) = rows_of(documents, tmp_path)
    assert (document.num_blocks, document.own_blocks, document.num_tokens) == (2500, 2500, 10_000)


def test_each_document_is_one_row_with_what_is_its_own(store, tmp_path):
    put(store, "shared beginning and one")
    put(store, "shared beginning and two of them")
    put(store, "shared beginning", salt="tenant")
    found = {(row.salt, text(row.own_token_ids)): row for row in rows_of(documents, tmp_path)}
    salt = salt_digest("tenant")
    assert found.keys() == {(b"", " one"), (b"", " two of them"), (salt, "shared beginning")}
    row = found[b"", " two of them"]
    assert (row.num_blocks, row.own_blocks, row.num_tokens) == (8, 3, 32)
    assert text(row.token_ids) == "shared beginning and two of them"


def test_uses_are_counted_where_they_are_recorded(store, clock, tmp_path):
    keys = put(store, "a text of blocks")
    for now in (1030.0, 1100.0, 1130.0, 1200.0):  # every second one comes too soon to be recorded
        clock.now = now
        store.touch(keys[1::-1])
    (row,) = rows_of(branches, tmp_path)
    assert (row.hits, row.touched) == (2, 1200.0)
    (namespace,) = survey(tmp_path / "cache")["namespaces"]
    assert (namespace["hits"], namespace["codecs"]) == (4, {"raw": 4})
    assert (namespace["oldest_use"], namespace["newest_use"]) == (1000.0, 1200.0)
    found, _ = block(tmp_path / "cache", keys[1].hex()[:12])
    assert (found["hits"], found["touched"], found["created"]) == (2, 1200.0, 1000.0)
    put(store, "a text of blocks")
    store.remove(keys[2:])
    assert store.stats().used_bytes == sum(row.num_bytes for row in rows_of(branches, tmp_path))


def test_a_survey_says_how_much_it_has_seen(store, tmp_path):
    for number in range(1500):
        put(store, f"{number:04}")
    assert survey(tmp_path / "cache")["surveyed_blocks"] == 1500
    found = survey(tmp_path / "cache", limit_s=0.0)
    assert found["surveyed_blocks"] == 1000
    assert found["blocks"] == 1500
    assert found["pages"]["live"] > 100
    assert found["pages"]["free"] >= 0


def test_one_block_in_full(store, tmp_path):
    keys = put(store, "a text of blocks")
    put(store, "a text or another")
    found, description = block(tmp_path / "cache", keys[1].hex().upper())
    assert (found["key"], found["parent"]) == (keys[1].hex(), keys[0].hex())
    assert keys[2].hex() in found["children"]
    assert found["num_children"] == len(found["children"]) == 2
    assert (text(found["token_ids"]), found["is_intact"]) == ("xt o", True)
    assert description["model"] == found["model"] == "m"
    with pytest.raises(ConfigError, match="no block has a key that begins so"):
        block(tmp_path / "cache", "00000000000000")
    keys += [put(store, f"{number:04}")[0] for number in range(17)]
    first = [key.hex()[0] for key in keys]
    with pytest.raises(ConfigError, match="several blocks"):
        block(tmp_path / "cache", max(first, key=first.count))


def test_a_writer_beside_a_reader_that_has_stopped_never_meets_a_full_map(store, tmp_path):
    """An open transaction would keep what is evicted meanwhile from being used again."""
    for number in range(60):
        put(store, f"{number:04}" * 4, payload_bytes=8_000)
    for view in (branches, documents):
        with reading(tmp_path / "cache") as env:
            rows = view(env)
            next(rows)
            for number in range(200):
                put(store, f"{view.__name__[0]}{number:03}" * 4, payload_bytes=8_000)
            assert list(rows)


# ---- what engines say of themselves ------------------------------------------------------------


def test_engines_are_read_while_they_are_here(store, tmp_path):
    directory = tmp_path / "cache"
    with Engines(directory) as engines:
        assert engines.read() == []
        store.publish({"dirty_blocks": 3})
        with DiskStore.open(directory) as other:  # of the same process
            other.publish({"dirty_blocks": 4})
            found = engines.read()
            assert [each["dirty_blocks"] for each in found] == [3, 4]
            assert {(each["pid"], each["role"]) for each in found} == {(os.getpid(), "engine")}
        store.publish({"dirty_blocks": 5})
        assert [each["dirty_blocks"] for each in engines.read()] == [5]
        store.publish({"much": "x" * MAX_PUBLISHED_BYTES})  # is left out
        assert [each["dirty_blocks"] for each in engines.read()] == [5]
        store.close()
        assert engines.read() == []


def test_what_one_that_was_killed_has_published_is_not_read(tmp_path):
    (tmp_path / "cache").mkdir()
    killed = Attachment(tmp_path / "cache", "engine")
    killed.claim_slot()
    killed.publish(json.dumps([{"dirty_blocks": 1}]).encode())
    with Engines(tmp_path / "cache") as engines:
        assert len(engines.read()) == 1
        killed.abandon()  # its locks go, its text stays
        assert engines.read() == []
    successor = Attachment(tmp_path / "cache", "engine")
    successor.forget_vanished()
    successor.claim_slot()
    with Engines(tmp_path / "cache") as engines:
        assert engines.read() == []
    successor.detach()


def test_a_publication_that_is_half_written_is_not_read(tmp_path):
    holder = Attachment(tmp_path, "engine")
    holder.claim_slot()
    holder.publish(b'[{"n": 1}]')
    at = holder._published_at(holder._slot)
    os.pwrite(holder._fd, b"2", at + 8 + 7)
    with Engines(tmp_path) as engines:
        assert engines.read() == []
    holder.detach()
