"""What the command may do to a cache beside a running engine, or without one."""

from pathlib import Path

import lmdb
import pytest
from disk_case import (
    IDENTITY,
    NAMESPACE,
    Blocks,
    damage_payload,
    data_file,
    problems_on_disk,
)

from kvstore.block import PutOutcome
from kvstore.disk import DiskStore
from kvstore.disk.offline import summarize, verify
from kvstore.errors import ConfigError


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
        {"id": NAMESPACE.hex(), **IDENTITY, "blocks": 3, "tokens": 48, "bytes": used}
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
