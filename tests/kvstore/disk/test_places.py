"""A path or a size that cannot be meant is refused in one line, before anything is created."""

import os
import stat
from pathlib import Path

import lmdb
import pytest
from disk_case import Blocks

from kvstore.config import DiskConfig
from kvstore.disk import DiskStore, places
from kvstore.errors import ConfigError


def names_under(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def refused(path: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        DiskStore.open(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_cache_is_for_its_owner_only(directory: Path, blocks: Blocks) -> None:
    mask = os.umask(0)
    try:
        with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
            store.put_group(blocks.writes(blocks.chain(1)))
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            modes = {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}
            assert modes == {0o600}
    finally:
        os.umask(mask)


def test_missing_parents_are_created(tmp_path: Path) -> None:
    with DiskStore.open(tmp_path / "a" / "b" / "c", capacity_bytes=8 << 20):
        assert (tmp_path / "a" / "b" / "c" / "data.mdb").exists()


def test_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "this is a file" in refused(tmp_path / "file")


def test_world_writable_directory_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    assert "chmod 0700" in refused(directory)
    assert names_under(directory) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to chown")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, -1)
    assert "12345" in refused(directory)
    assert names_under(directory) == set()


def test_foreign_database_is_refused_untouched(tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path / "db"), max_dbs=1)
    with env.begin(write=True) as txn:
        for number in range(500):
            txn.put(b"%05d" % number, b"value" * 20)
    env.close()
    before = (tmp_path / "db" / "data.mdb").read_bytes()
    assert "another LMDB" in refused(tmp_path / "db")
    assert (tmp_path / "db" / "data.mdb").read_bytes() == before
    assert names_under(tmp_path / "db") == {"data.mdb", "lock.mdb"}


def test_foreign_damaged_file_is_not_set_aside(tmp_path: Path) -> None:
    directory = tmp_path / "db"
    directory.mkdir()
    (directory / "data.mdb").write_bytes(b"something else" * 1000)
    assert "another LMDB" in refused(directory)
    assert names_under(directory) == {"data.mdb"}


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert "thesis.tex" in refused(tmp_path)
    assert names_under(tmp_path) == {"thesis.tex"}


def test_network_file_system_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "file_system", lambda path: "nfs4")
    assert "network file system (nfs4)" in refused(directory)
    assert not directory.exists()


def test_file_system_of_a_path_is_known_even_before_it_exists(tmp_path: Path) -> None:
    assert places.file_system(tmp_path / "not" / "there") == places.file_system(tmp_path)
    assert places.file_system(Path("/proc")) == "proc"


@pytest.mark.parametrize("size", [0, 4096, (1 << 20) - 1, 1 << 50, True, 1e9, "8MiB"])
def test_nonsensical_size_is_refused(directory: Path, size: object) -> None:
    assert "disk_cache_size" in refused(directory, capacity_bytes=size)
    assert not directory.exists()


def test_smallest_size_works(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=1 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(200)))
        assert store.stats().blocks > 20
    assert (directory / "data.mdb").stat().st_size <= 1 << 20


def test_read_only_needs_a_cache(directory: Path) -> None:
    message = refused(directory, config=DiskConfig(disk_mode="ro"))
    assert "no such cache" in message
    assert not directory.exists()


def test_read_only_from_a_directory_that_cannot_be_written(directory: Path, blocks: Blocks) -> None:
    refs = blocks.chain(3)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    for file in (*directory.iterdir(), directory):
        file.chmod(0o500 if file.is_dir() else 0o400)
    with DiskStore.open(directory, config=DiskConfig(disk_mode="ro")) as store:
        assert blocks.read(store, refs[2]) == blocks.payload(refs[2])
    directory.chmod(0o700)


def test_cache_is_found_through_a_relative_path(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with DiskStore.open("cache", capacity_bytes=8 << 20):
        assert (directory / "data.mdb").exists()


@pytest.mark.parametrize(
    "banned", ["torch", "triton", "transformers", "platformdirs", "asyncio", "engine"]
)
def test_disk_library_is_imported_without(banned: str) -> None:
    import subprocess
    import sys

    code = f"import sys; sys.modules[{banned!r}] = None; import kvstore.disk, kvstore.disk.offline"
    subprocess.run([sys.executable, "-c", code], check=True)
