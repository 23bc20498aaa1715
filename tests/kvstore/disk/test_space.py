"""A full volume, a full map, a floor: the tier goes on within the pages it has."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest
from disk_case import Blocks, Child, FakeClock, data_file, problems_on_disk, small

from kvstore.block import PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.disk.attach import NUM_SLOTS, SLOT_BYTES, Attachment
from kvstore.disk.space import FIRST_RETRY_S

STORED, PRESENT, ORPHAN, FULL = PutOutcome


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Every write beyond this offset fails with EFBIG, as on a volume that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def put_chains(store: DiskStore, blocks: Blocks, starts: range) -> list[PutOutcome]:
    return [
        outcome
        for start in starts
        for outcome in store.put_group(blocks.writes(blocks.chain(10, start=start)))
    ]


def present(store: DiskStore, blocks: Blocks, start: int) -> int:
    return len(store.probe(blocks.chain(10, start=start)))


def test_full_volume_recycles_pages_and_grows_again_later(
    directory: Path, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    now = FakeClock()
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=small(), monotonic=now) as store:
        with file_size_limit(4 << 20):
            outcomes = put_chains(store, blocks, range(60))
            assert outcomes.count(STORED) > 550
            assert present(store, blocks, 59) == 10
            assert present(store, blocks, 0) == 0
            stats = store.stats()
            assert stats.state == "ok"
            assert "full" in (stats.reason or "")
        assert data_file(directory).stat().st_size <= 4 << 20
        assert len([r for r in caplog.records if "stops growing" in r.message]) == 1
        put_chains(store, blocks, range(60, 70))
        assert data_file(directory).stat().st_size <= 4 << 20
        now.now += FIRST_RETRY_S
        put_chains(store, blocks, range(70, 100))
        assert data_file(directory).stat().st_size > 4 << 20
        assert store.stats().reason is None
    assert problems_on_disk(directory) == []


def test_retries_to_grow_are_doubled_up_to_ten_minutes(directory: Path, blocks: Blocks) -> None:
    now = FakeClock()
    pauses = []
    with DiskStore.open(directory, capacity_bytes=64 << 20, config=small(), monotonic=now) as store:
        space = store._changes.space
        with file_size_limit(2 << 20):
            last = None
            for start in range(250):
                put_chains(store, blocks, range(start, start + 1))
                if space._retry_at not in (None, last):
                    last = space._retry_at
                    pauses.append(last - now.now)
                now.now += 30
    assert pauses[:7] == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_commit_that_finds_no_space_is_full_not_an_error(
    store: DiskStore, blocks: Blocks, directory: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    put_chains(store, blocks, range(3))
    real = store._env._begin_write

    class Faulty:
        """A transaction whose commit fails as pwrite would."""

        def __init__(self, txn: Any) -> None:
            self._txn = txn

        def __enter__(self) -> Any:
            return self._txn

        def __exit__(self, *_: object) -> None:
            self._txn.abort()
            failure = lmdb.Error("mdb_txn_commit: no space")
            failure.code = error
            raise failure

    monkeypatch.setattr(store._env, "_begin_write", lambda *, write: Faulty(real(write=write)))
    assert put_chains(store, blocks, range(3, 4)) == [FULL] * 10
    assert store.stats().state == "ok"
    monkeypatch.undo()
    assert present(store, blocks, 2) == 10
    store.close()
    assert problems_on_disk(directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
@pytest.mark.parametrize("has_published", [False, True])
def test_full_volume_keeps_no_store_from_closing(
    directory: Path, blocks: Blocks, has_published: bool
) -> None:
    """What others read of a store has no room of its own until it is first written."""
    store = DiskStore.open(directory, capacity_bytes=8 << 20)
    store.put_group(blocks.writes(blocks.chain(2)))
    other = Attachment(directory, "other")
    other.share(0)
    other.claim_slot()
    other.publish(b"behind")
    with file_size_limit(SLOT_BYTES * NUM_SLOTS):
        if has_published:
            store.publish({"too": "late"})
        store.close()
    assert store.stats().state == "off"
    assert other.holders() == other.vanished() == []
    other.detach()


def test_small_volume_is_filled_and_never_wedges(tmp_path: Path, blocks: Blocks) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(volume)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        directory = volume / "cache"
        with DiskStore.open(directory, capacity_bytes=64 << 20, config=small()) as store:
            outcomes = put_chains(store, blocks, range(100))
            assert outcomes[-10:] == [STORED] * 10
            assert present(store, blocks, 99) == 10
            refs = blocks.chain(10, start=99)
            assert all(blocks.read(store, ref) == blocks.payload(ref) for ref in refs)
        assert problems_on_disk(directory) == []
    finally:
        subprocess.run(["umount", str(volume)], check=True)


def test_free_space_floor_is_kept(directory: Path, blocks: Blocks) -> None:
    now = FakeClock()
    config = DiskConfig(free_space_floor=0)
    with DiskStore.open(directory, capacity_bytes=64 << 20, config=config, monotonic=now) as store:
        put_chains(store, blocks, range(20))
    size = data_file(directory).stat().st_size
    config = DiskConfig(free_space_floor=1 << 60)  # more than any volume has
    with DiskStore.open(directory, config=config, monotonic=now) as store:
        outcomes = put_chains(store, blocks, range(20, 60))
        assert outcomes[-10:] == [STORED] * 10
        assert "floor" in (store.stats().reason or "")
    assert data_file(directory).stat().st_size == size
    assert problems_on_disk(directory) == []


def test_new_cache_on_a_volume_at_its_floor_stores_nothing_and_says_so(
    directory: Path, blocks: Blocks
) -> None:
    config = DiskConfig(free_space_floor=1 << 60)
    with DiskStore.open(directory, capacity_bytes=64 << 20, config=config) as store:
        assert put_chains(store, blocks, range(3)) == [FULL] * 30
        stats = store.stats()
        assert (stats.state, stats.evictions) == ("ok", 0)
        assert "floor" in (stats.reason or "")


def test_long_reader_makes_the_map_full_but_never_empties_the_cache(
    directory: Path, blocks: Blocks
) -> None:
    """While a reader is open no freed page is reused: at last puts find no room, and evicting more
    would not make any."""
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=small()) as store:
        put_chains(store, blocks, range(40))
        reader = """
        import lmdb
        env = lmdb.open(sys.argv[1], readonly=True, max_dbs=6)
        txn = env.begin()
        say("reading")
        sys.stdin.readline()
        """
        with Child(reader, directory) as child:
            child.hear()
            outcomes = put_chains(store, blocks, range(40, 100))
            assert FULL in outcomes
            limit = store._changes.space.limit_pages()
            assert store.stats().used_bytes > 0.6 * limit * 4096
            child.say()
            child.end()
        assert put_chains(store, blocks, range(200, 210)) == [STORED] * 100
    assert data_file(directory).stat().st_size <= 8 << 20
    assert problems_on_disk(directory) == []


def test_reader_that_was_killed_keeps_no_pages(directory: Path, blocks: Blocks) -> None:
    reader = """
    import lmdb
    env = lmdb.open(sys.argv[1], readonly=True, max_dbs=6)
    txn = env.begin()
    say("reading")
    sys.stdin.readline()
    """
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=small()) as store:
        put_chains(store, blocks, range(40))
        with Child(reader, directory) as child:
            child.hear()
            child.kill()
        assert set(put_chains(store, blocks, range(40, 140))) == {STORED}


def test_group_larger_than_the_setting_takes_several_transactions(
    directory: Path, blocks: Blocks
) -> None:
    config = small(group_commit_bytes=60_000)
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=config) as store:
        before = store._env._lmdb.info()["last_txnid"]
        assert store.put_group(blocks.writes(blocks.chain(10))) == [STORED] * 10
        assert store._env._lmdb.info()["last_txnid"] - before == 4


def test_steady_churn_of_mixed_sizes_never_finds_the_map_full(directory: Path) -> None:
    sizes = [Blocks(payload_bytes=size) for size in (500, 3_000, 20_000, 70_000, 250_000)]
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=small()) as store:
        outcomes = []
        for start in range(300):
            blocks = sizes[start % len(sizes)]
            outcomes += store.put_group(blocks.writes(blocks.chain(4, start=start)))
        assert set(outcomes) == {STORED}
        assert store.stats().evictions > 100
    assert data_file(directory).stat().st_size <= 16 << 20
    assert problems_on_disk(directory) == []


def test_many_small_blocks_fill_the_cache_to_its_watermark(directory: Path) -> None:
    blocks = Blocks(payload_bytes=1024)
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=small()) as store:
        for start in range(80):
            assert set(store.put_group(blocks.writes(blocks.chain(100, start=start)))) == {STORED}
        stats = store.stats()
        assert stats.evictions > 0
        assert stats.used_bytes > 0.3 * (8 << 20)  # LMDB's pages are two thirds full at best
    assert data_file(directory).stat().st_size <= 8 << 20
    assert problems_on_disk(directory) == []


def test_cache_too_small_to_evict_all_at_once_never_wedges(directory: Path) -> None:
    """Evicting takes pages: where what it frees lies scattered, more than the slack of a small map.
    It then stored nothing for ever."""
    blocks = Blocks(payload_bytes=1500)
    with DiskStore.open(directory, capacity_bytes=2 << 20, config=small()) as store:
        for start in range(40):
            refs = blocks.chain(40, start=start)
            assert set(store.put_group(blocks.writes(refs))) == {STORED}
        assert store.stats().evictions > 1000
    assert problems_on_disk(directory) == []
