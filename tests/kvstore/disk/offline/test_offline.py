"""What the command may do to a cache beside a running engine, or without one."""

import errno
import os
import random
import stat
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lmdb
import msgpack
import pytest
import xxhash
from disk_case import (
    IDENTITY,
    NAMESPACE,
    Blocks,
    FakeClock,
    damage_payload,
    data_file,
    problems_on_disk,
    raw_records,
)

from kvstore.block import PutOutcome
from kvstore.disk import DiskStore, schema, slices
from kvstore.disk.offline.carry import export_documents, import_documents
from kvstore.disk.offline.compact import compact
from kvstore.disk.offline.evict import evict
from kvstore.disk.offline.summary import list_blocks, summarize
from kvstore.disk.offline.verify import verify
from kvstore.errors import (
    CapacityError,
    ConfigError,
    CorruptBlockError,
    TierBrokenError,
    TierFullError,
)
from kvstore.hashing import chain_seed, encode_tokens


def test_summary_tells_what_is_cached(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes(blocks.chain(3)))
        used = store.stats().used_bytes
    found = summarize(directory)
    assert (found["blocks"], found["tokens"]) == (3, 48)
    assert found["schema_version"] == 1
    assert found["capacity_bytes"] == 8 << 20
    assert 3 * 20_000 < found["used_bytes"] == used <= found["file_bytes"]
    assert found["namespaces"] == [
        {
            "id": NAMESPACE.hex(),
            **IDENTITY,
            "blocks": 3,
            "tokens": 48,
            "bytes": used,
            "pinned_blocks": 0,
        }
    ]


def test_summary_works_beside_an_open_store_and_sees_the_last_commit(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    store.put_group(blocks.writes(blocks.chain(3)))
    assert summarize(directory)["blocks"] == 3
    store.put_group(blocks.writes(blocks.chain(2)))
    assert summarize(directory)["blocks"] == 5


def test_empty_directory_is_a_cache_without_blocks(tmp_path: Path) -> None:
    found = summarize(tmp_path)
    assert (found["blocks"], found["tokens"], found["namespaces"]) == (0, 0, [])
    assert verify(tmp_path)["ok"]
    assert list(tmp_path.iterdir()) == []


def test_half_created_environment_is_a_cache_without_blocks(directory: Path) -> None:
    directory.mkdir()
    lmdb.open(str(directory)).close()
    assert summarize(directory)["blocks"] == 0
    assert verify(directory)["ok"]
    data_file(directory).write_bytes(b"")
    assert summarize(directory)["blocks"] == 0


def test_missing_path_and_foreign_database_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        summarize(tmp_path / "nothing")
    env = lmdb.open(str(tmp_path / "foreign"))
    with env.begin(write=True) as txn:
        txn.put(b"some", b"thing")
    env.close()
    with pytest.raises(ConfigError, match="another LMDB"):
        summarize(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="a file"):
        summarize(tmp_path / "foreign" / "data.mdb")


def test_sound_cache_verifies(directory: Path, blocks: Blocks) -> None:
    seen = []
    with DiskStore.open(directory, capacity_bytes=64 << 20) as store:
        for _ in range(100):
            store.put_group(blocks.writes(blocks.chain(8)))
        store.remove([blocks.chain(1)[0].key])
    result = verify(directory, progress=lambda done, total: seen.append((done, total)))
    assert result == {
        "blocks_checked": 800,
        "bytes_checked": 800 * 20_000,
        "corrupt": [],
        "orphans": [],
        "bad_blocks": 0,
        "obstacle": None,
        "fixed": 0,
        "ok": True,
    }
    assert seen[-1] == (800, 800)


def test_verify_beside_a_writer_finds_nothing(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    store.put_group(blocks.writes(blocks.chain(50)))
    result = verify(directory, progress=lambda *_: store.put_group(blocks.writes(blocks.chain(3))))
    assert result["ok"]


def test_verify_finds_a_flipped_bit_and_fix_makes_it_a_miss(
    directory: Path, blocks: Blocks
) -> None:
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    damage_payload(directory, blocks.payload(refs[1]))
    damage_payload(directory, blocks.payload(refs[3]))
    found = verify(directory)
    assert sorted(found["corrupt"], key=str) == sorted(
        [{"key": refs[i].key.hex(), "reason": "payload"} for i in (1, 3)], key=str
    )
    assert (found["fixed"], found["ok"]) == (0, False)
    assert verify(directory, fix=True)["fixed"] == 2
    assert verify(directory)["ok"]
    with DiskStore.open(directory) as store:
        assert store.put_group(blocks.writes(refs))[1:] == [
            PutOutcome.STORED,
            PutOutcome.PRESENT,
            PutOutcome.STORED,
        ]
    assert problems_on_disk(directory) == []


@pytest.mark.parametrize("table", ["index", "payload", "children", "recency"])
def test_verify_finds_a_missing_entry_and_fix_restores_order(
    directory: Path, blocks: Blocks, table: str
) -> None:
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    env = lmdb.open(str(directory), max_dbs=6)
    with env.begin(write=True) as txn:
        db = env.open_db(table.encode(), txn, create=False, dupsort=table == "children")
        cursor = txn.cursor(db=db)
        assert cursor.first() if table == "recency" else cursor.set_key(refs[1].key)
        cursor.delete()
    env.close()
    found = verify(directory, fix=True)
    assert not found["ok"]
    assert bool(found["orphans"]) == (table == "index")
    assert found["fixed"] == len(found["corrupt"]) + len(found["orphans"])
    assert verify(directory)["ok"]
    assert problems_on_disk(directory) == []


def test_what_looks_wrong_once_is_not_reported(
    directory: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may be written while it is read; another transaction shows it whole."""
    refs = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    damage_payload(directory, blocks.payload(refs[2]))
    seen, real = set(), schema.checksum

    def torn_at_first(data: object) -> bytes:
        digest = real(data)
        is_first = digest not in seen
        seen.add(digest)
        return b"torn" if is_first else digest

    monkeypatch.setattr(schema, "checksum", torn_at_first)
    assert verify(directory)["corrupt"] == [{"key": refs[2].key.hex(), "reason": "payload"}]


def test_verify_finds_wrong_counters(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(2)))
    env = lmdb.open(str(directory), max_dbs=6)
    with env.begin(write=True) as txn:
        txn.put(b"head", b"nonsense", db=env.open_db(b"meta", txn, create=False))
    env.close()
    assert verify(directory)["corrupt"] == [{"key": None, "reason": "counters"}]
    verify(directory, fix=True)
    assert problems_on_disk(directory) == []


def test_verify_reports_a_damaged_structure_and_fix_sets_the_file_aside(
    directory: Path, blocks: Blocks
) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(20)))
    with data_file(directory).open("r+b") as file:
        file.truncate(100_000)
    found = verify(directory)
    assert not found["ok"]
    assert found["corrupt"][0]["reason"].startswith("structure")
    assert verify(directory, fix=True)["fixed"] == 1
    assert [path.name for path in directory.glob("data.mdb.damaged-*")]
    assert verify(directory)["ok"]


# --- listing and removing ------------------------------------------------------------------------


def test_list_names_every_block_with_its_parent(directory: Path, blocks: Blocks) -> None:
    refs = blocks.chain(3)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    rows = {row["key"]: row for row in list_blocks(directory, with_tokens=True)}
    assert {row["parent"] for row in rows.values()} == {ref.parent.hex() for ref in refs}
    row = rows[refs[2].key.hex()]
    assert (row["depth"], row["nbytes"], row["tokens"], row["is_bad"]) == (2, 20_000, 16, False)
    assert encode_tokens(row["token_ids"]) == refs[2].tokens


def test_list_spans_slices_and_keeps_no_transaction_open(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_RECORDS", 7)
    blocks = Blocks(payload_bytes=100)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(50)))
        seen = 0
        for _ in list_blocks(directory):
            seen += 1
            store.remove([blocks.chain(1, start=seen)[0].key])
            assert store._env._gate._inside == []
        assert seen == 50


def test_list_of_a_namespace_takes_its_id_or_its_model(directory: Path, blocks: Blocks) -> None:
    other = Blocks(namespace=b"o" * 32)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes(blocks.chain(3)))
        store.put_group(other.writes(other.chain(2)))
    assert len(list(list_blocks(directory, namespace="test/tiny"))) == 3
    assert len(list(list_blocks(directory, namespace=(b"o" * 32).hex()[:8]))) == 2
    with pytest.raises(ConfigError, match="test/tiny"):
        list(list_blocks(directory, namespace="llama"))


def test_evict_by_namespace_spares_the_other(directory: Path, blocks: Blocks) -> None:
    other = Blocks(namespace=b"o" * 32)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes(blocks.chain(3)))
        store.put_group(other.writes(other.chain(2)))
    before = summarize(directory)
    found = evict(directory, namespace="test/tiny", dry_run=True)
    assert (found["blocks"], found["num_documents"]) == (3, 1)
    assert summarize(directory) == before
    assert evict(directory, namespace="test/tiny") == found
    after = summarize(directory)
    assert (after["blocks"], after["used_bytes"]) == (2, before["used_bytes"] - found["bytes"])
    assert problems_on_disk(directory) == []


def test_evict_by_age_spares_what_leads_to_something_younger(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    clock.now = time.time() - 1000
    trunk, old = blocks.chain(3), blocks.chain(2, start=1)
    with DiskStore.open(directory, capacity_bytes=8 << 20, clock=clock) as store:
        store.put_group(blocks.writes(trunk + old))
        clock.now += 990
        store.put_group(blocks.writes(blocks.below(trunk[1], 1, start=5)))
    assert evict(directory, unused_for_s=500)["blocks"] == 3
    with DiskStore.open(directory) as store:
        assert len(store.probe(trunk)) == 2
    assert problems_on_disk(directory) == []


def test_evict_of_a_document_spares_what_it_shares(directory: Path, blocks: Blocks) -> None:
    trunk = blocks.chain(2)
    one, two = blocks.below(trunk[1], 3, start=1), blocks.below(trunk[1], 3, start=2)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(trunk + one + two))
        assert evict(directory, document=one[1].key.hex()[:13])["blocks"] == 3
        assert len(store.probe(trunk + two)) == 5
        assert store.probe(one) == []
        assert evict(directory, document=two[2].key.hex(), dry_run=True)["blocks"] == 5
        assert evict(directory, document=two[2].key.hex())["blocks"] == 5
        assert store.stats().blocks == 0
    for prefix, problem in [("00ff", "no block"), ("", "hex digits"), ("my file", "hex digits")]:
        with pytest.raises(ConfigError, match=problem):
            evict(directory, document=prefix)


def least_recently_used(directory: Path, num_bytes: int) -> set[bytes]:
    """What the engine would evict, one leaf after the other, until so many bytes are gone."""
    left, gone = raw_records(directory), set()
    while num_bytes > 0 and left:
        inner = {record["parent"] for record in left.values()}
        key = min(set(left) - inner, key=lambda key: left[key]["order"])
        num_bytes -= left[key]["nbytes"] + left.pop(key)["length"]
        gone.add(key)
    return gone


@pytest.mark.parametrize("part", [0.0, 0.35, 0.99, 1.0])
def test_evict_to_a_size_takes_the_least_recently_used_as_the_engine_would(
    directory: Path, blocks: Blocks, part: float
) -> None:
    trunk = blocks.chain(4)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(trunk))
        for start in range(5):
            store.put_group(blocks.writes(blocks.below(trunk[start % 4], 6, start)))
    used = summarize(directory)["used_bytes"]
    target = int(used * part)
    before, gone = set(raw_records(directory)), least_recently_used(directory, used - target)
    found = evict(directory, to_bytes=target, dry_run=True)
    assert evict(directory, to_bytes=target) == found
    assert before - set(raw_records(directory)) == gone
    assert found["blocks"] == len(gone)
    assert summarize(directory)["used_bytes"] == used - found["bytes"] <= target
    assert problems_on_disk(directory) == []


def test_evict_spares_what_was_used_or_continued_since_it_was_chosen(
    directory: Path, blocks: Blocks, clock: FakeClock
) -> None:
    refs = [blocks.chain(2, start=start) for start in range(3)]
    with DiskStore.open(directory, capacity_bytes=8 << 20, clock=clock) as store:
        for chain in refs:
            store.put_group(blocks.writes(chain))
    records = raw_records(directory)
    seen = {ref.key: records[ref.key]["order"] for chain in refs for ref in chain[::-1]}
    clock.now += 1000
    with DiskStore.open(directory, clock=clock) as store:
        store.touch([ref.key for ref in refs[1][::-1]])
        store.put_group(blocks.writes(blocks.below(refs[2][1], 1, start=9)))
        assert store.evict(seen) == {ref.key for ref in refs[0]}
    assert problems_on_disk(directory) == []


def test_evict_of_nothing_in_particular_is_refused(directory: Path) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20):
        pass
    with pytest.raises(ConfigError, match="nothing was chosen"):
        evict(directory)


# --- compacting ----------------------------------------------------------------------------------


def test_compact_gives_freed_pages_back_and_their_bytes_are_gone(
    directory: Path, blocks: Blocks
) -> None:
    kept, gone = blocks.chain(5), blocks.chain(40)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(kept))
        store.put_group(blocks.writes(gone))
        store.remove([ref.key for ref in gone])
    assert blocks.payload(gone[0]) in data_file(directory).read_bytes()
    sizes = compact(directory)
    assert sizes["bytes_after"] == data_file(directory).stat().st_size < sizes["bytes_before"] / 4
    assert blocks.payload(gone[0]) not in data_file(directory).read_bytes()
    assert stat.S_IMODE(data_file(directory).stat().st_mode) == 0o600
    with DiskStore.open(directory) as store:
        assert store.stats().state == "ok"
        assert all(blocks.read(store, ref) == blocks.payload(ref) for ref in kept)
        assert store.put_group(blocks.writes(gone))[-1] is PutOutcome.STORED
    assert problems_on_disk(directory) == []


def test_compact_refuses_while_somebody_is_attached_and_names_them(
    directory: Path, blocks: Blocks
) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(2)))
        with pytest.raises(TierBrokenError, match=f"pid {os.getpid()}"):
            compact(directory)
        assert len(store.probe(blocks.chain(1))) == 0
    assert compact(directory)["bytes_after"] > 0


def test_compact_without_room_for_the_copy_changes_nothing(
    directory: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(20)))
    before = data_file(directory).read_bytes()
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 0, 0, 0, 0, 255))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(TierFullError) as caught:
            compact(directory)
    assert caught.value.needed_bytes > 20 * 20_000
    assert data_file(directory).read_bytes() == before
    assert problems_on_disk(directory) == []


def test_compact_clears_up_after_one_that_was_killed(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(2)))
    (directory / "data.mdb.tmp-123").write_bytes(b"half a copy")
    compact(directory)
    assert {path.name for path in directory.iterdir()} == {"data.mdb", "lock.mdb", "attached"}


# --- export and import ---------------------------------------------------------------------------


@pytest.fixture
def exported(directory: Path, blocks: Blocks, tmp_path: Path) -> Path:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes(blocks.chain(6, start=1)))
        store.put_group(blocks.writes(blocks.chain(2, start=2, salt="s"), salt=b"s" * 16))
    file = tmp_path / "documents.kv"
    assert export_documents(directory, file) == {"blocks": 8, "bytes": 160_000, "left_out": 0}
    return file


def test_export_carries_blocks_into_another_cache(
    exported: Path, blocks: Blocks, tmp_path: Path, directory: Path
) -> None:
    assert stat.S_IMODE(exported.stat().st_mode) == 0o600
    target = tmp_path / "target"
    counts = import_documents(target, exported, capacity_bytes=8 << 20)
    assert counts == {
        "blocks": 8,
        "present": 0,
        "refused": 0,
        "evicted": 0,
        "obstacle": None,
    }
    assert summarize(target)["namespaces"] == summarize(directory)["namespaces"]
    with DiskStore.open(target) as store:
        refs = blocks.chain(6, start=1)
        assert all(blocks.read(store, ref) == blocks.payload(ref) for ref in refs)
        assert import_documents(target, exported)["present"] == 8
    assert problems_on_disk(target) == []


def test_export_of_a_document_takes_what_it_continues(
    directory: Path, exported: Path, blocks: Blocks, tmp_path: Path
) -> None:
    file = tmp_path / "one.kv"
    middle = blocks.chain(6, start=1)[3]
    assert export_documents(directory, file, document=middle.key.hex()[:10])["blocks"] == 6


def test_export_leaves_out_a_bad_block_and_what_is_below_it(
    directory: Path, exported: Path, blocks: Blocks, tmp_path: Path
) -> None:
    damage_payload(directory, blocks.payload(blocks.chain(6, start=1)[2]))
    assert export_documents(directory, tmp_path / "again.kv")["blocks"] == 4


def test_name_that_a_cache_has_for_a_namespace_survives_an_import(
    exported: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with DiskStore.open(target, capacity_bytes=8 << 20) as store:
        store.register_namespace(NAMESPACE, {**IDENTITY, "model": "mine"})
    import_documents(target, exported)
    assert summarize(target)["namespaces"][0]["model"] == "mine"


def test_any_flipped_bit_in_an_export_refuses_the_whole_file(
    exported: Path, tmp_path: Path
) -> None:
    data = exported.read_bytes()
    draw = random.Random(5)
    offsets = [*range(0, 400, 7), *(draw.randrange(len(data)) for _ in range(60))]
    for offset in offsets:
        flipped = bytes([data[offset] ^ (1 << draw.randrange(8))])
        exported.write_bytes(data[:offset] + flipped + data[offset + 1 :])
        with pytest.raises((ConfigError, CorruptBlockError)):
            import_documents(tmp_path / "target", exported)
    assert not (tmp_path / "target").exists()


def test_truncated_export_is_refused(exported: Path, tmp_path: Path) -> None:
    data = exported.read_bytes()
    for size in (0, 10, 20, 100, len(data) // 2, len(data) - 1):
        exported.write_bytes(data[:size])
        with pytest.raises((ConfigError, CorruptBlockError), match="export: "):
            import_documents(tmp_path / "target", exported)
    assert not (tmp_path / "target").exists()


def test_length_beyond_the_file_is_refused_before_anything_is_allocated(
    exported: Path, tmp_path: Path
) -> None:
    data = bytearray(exported.read_bytes())
    data[24:32] = (1 << 29).to_bytes(8, "little")  # of the first payload
    exported.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(CorruptBlockError, match="ends too early"):
        import_documents(tmp_path / "target", exported)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def frame(header: dict, payload: bytes = b"") -> bytes:
    packed = msgpack.packb(header)
    digest = xxhash.xxh3_128_digest(packed + payload)
    return struct.pack("<IQ16s", len(packed), len(payload), digest) + packed + payload


def test_an_export_that_finds_no_room_names_its_file_and_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    DiskStore.open(directory, capacity_bytes=8 << 20).close()
    monkeypatch.setattr("kvstore.disk.offline.carry.write_end", fail)
    with pytest.raises(CapacityError, match=r"full\.kv: cannot be written: No space left"):
        export_documents(directory, tmp_path / "full.kv")
    assert not list(tmp_path.glob("full.kv*"))


def test_an_interrupted_export_writes_nothing_more_into_its_pipe(
    exported: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file flushes its buffer when it is closed: behind a full pipe, it waited for ever."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)

    def interrupt(*_: object) -> None:
        os.close(reader)  # whatever is written from here on is an error
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.disk.offline.carry.write_block", interrupt)
    with pytest.raises(KeyboardInterrupt):  # the namespace's name is in the buffer
        export_documents(directory, tmp_path / "pipe")


BLOCK_HEADER = {
    "kind": "block",
    "parent": chain_seed(b"n" * 32),
    "tokens": b"t" * 64,
    "depth": 0,
    "namespace": b"n" * 32,
    "salt": b"",
    "num_tokens": 16,
    "payload_bytes": 5,
    "codec": "raw",
    "checksum": xxhash.xxh3_128_digest(b"bytes"),
}


@pytest.mark.parametrize(
    "change",
    [
        {"parent": b"short"},
        {"parent": b"p" * 32},
        {"tokens": "text"},
        {"depth": -1},
        {"depth": 1},
        {"depth": True},
        {"namespace": b""},
        {"salt": b"x" * 1000},
        {"num_tokens": 1 << 40},
        {"payload_bytes": 6},
        {"payload_bytes": 1 << 60},
        {"codec": "../zip"},
        {"checksum": b"0" * 16},
        {"kind": "pickle"},
    ],
)
def test_forged_block_is_refused(tmp_path: Path, change: dict) -> None:
    start = struct.pack("<16sI", b"KVSTORE EXPORT\0\0", 1)
    end = frame({"kind": "end", "blocks": 1, "bytes": 5})
    file = tmp_path / "forged.kv"
    file.write_bytes(start + frame(BLOCK_HEADER, b"bytes") + end)
    target = tmp_path / "target"
    assert import_documents(target, file, capacity_bytes=8 << 20)["blocks"] == 1
    file.write_bytes(start + frame(BLOCK_HEADER | change, b"bytes") + end)
    with pytest.raises(CorruptBlockError, match="not a valid export"):
        import_documents(tmp_path / "other", file)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "identity",
    [{"model": b"bytes"}, {b"model": "m"}, {"x": msgpack.ExtType(5, b"")}, {"x": float("nan")}],
    ids=str,
)
def test_a_namespace_that_no_command_could_print_is_refused(tmp_path: Path, identity: dict) -> None:
    start = struct.pack("<16sI", b"KVSTORE EXPORT\0\0", 1)
    end = frame({"kind": "end", "blocks": 0, "bytes": 0})
    file = tmp_path / "forged.kv"
    file.write_bytes(
        start + frame({"kind": "namespace", "id": b"n" * 32, "identity": identity}) + end
    )
    with pytest.raises(CorruptBlockError, match=r"not a valid export: .* no JSON"):
        import_documents(tmp_path / "target", file)
    assert not (tmp_path / "target").exists()


# --- size and company ----------------------------------------------------------------------------


def peak_bytes(what: Callable[[], object]) -> int:
    tracemalloc.start()
    what()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_RECORDS", 20)
    monkeypatch.setattr("kvstore.disk.offline.evict._SLICE", 20)
    monkeypatch.setattr("kvstore.disk.offline.evict._MAX_LISTED", 2)
    monkeypatch.setattr("kvstore.disk.offline.carry._GROUP_BYTES", 20_000)
    peaks: dict[str, list[int]] = {}
    for num_documents in (20, 200):
        directory, blocks = tmp_path / str(num_documents), Blocks(payload_bytes=1000)
        file, target = tmp_path / f"{num_documents}.kv", tmp_path / f"{num_documents} imported"
        with DiskStore.open(directory, capacity_bytes=32 << 20) as store:
            for _ in range(num_documents):
                store.put_group(blocks.writes(blocks.chain(5)))
        operations = {
            "verify": partial(verify, directory),
            "export": partial(export_documents, directory, file),
            "import": partial(import_documents, target, file, capacity_bytes=32 << 20),
            "choose": partial(evict, directory, unused_for_s=0, dry_run=True),
            "evict": partial(evict, directory, to_bytes=0),
        }
        for name, operation in operations.items():
            peaks.setdefault(name, []).append(peak_bytes(operation))
    for name, (small, large) in peaks.items():
        assert large < 1.5 * small, (name, small, large)


@pytest.mark.parametrize("name", ["verify", "export", "evict", "list"])
def test_a_writer_beside_it_never_finds_the_map_full(
    directory: Path,
    blocks: Blocks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A reader that stays open keeps freed pages from being used, and a small map is full soon."""
    monkeypatch.setattr(
        "kvstore.disk.offline.verify._NUM_THREADS", 1
    )  # so that it is its turn, or ours
    monkeypatch.setattr("kvstore.disk.offline.verify._BATCH", 3)
    store = DiskStore.open(directory, capacity_bytes=4 << 20)
    outcomes = []

    def write(*_: object) -> None:
        for _ in range(3):
            outcomes.extend(store.put_group(blocks.writes(blocks.chain(5))))

    def list_and_write() -> None:
        for _ in list_blocks(directory):
            write()

    with store:
        while store.stats().evictions == 0:  # until it is full
            write()
        operations: dict[str, Callable[[], object]] = {
            "verify": partial(verify, directory, progress=write),
            "export": partial(export_documents, directory, tmp_path / "file.kv", progress=write),
            "evict": partial(evict, directory, unused_for_s=0, dry_run=True, progress=write),
            "list": list_and_write,
        }
        del outcomes[:]
        operations[name]()
        assert len(outcomes) >= 15
        assert set(outcomes) == {PutOutcome.STORED}
    assert problems_on_disk(directory) == []
