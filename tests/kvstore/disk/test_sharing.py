"""One directory, several stores: in one process, in several, across a fork, before and after a
kill."""

import os
import shutil
import signal
from pathlib import Path

import lmdb
import pytest
from disk_case import Blocks, Child, data_file, in_fork, problems_on_disk, raw_records, small

from kvstore.block import PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.disk.attach import ATTACH_FILE, Attachment, Header
from kvstore.errors import ConfigError, StoreClosedError, TierBrokenError

STORED, PRESENT, ORPHAN, FULL = PutOutcome

PEER = """
from kvstore.disk import DiskStore
blocks = Blocks()
store = DiskStore.open(sys.argv[1])
say("ready")
for line in sys.stdin:
    exec(line)
    say("done")
store.close()
"""


def peer_puts(peer: Child, start: int, num_blocks: int) -> None:
    peer.say(f"store.put_group(blocks.writes(blocks.chain({num_blocks}, start={start})))")
    assert peer.hear() == "done"


def test_block_stored_by_another_process_is_hit_without_reopening(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(4, start=5)
    with Child(PEER, directory) as peer:
        peer.hear()
        assert store.probe(refs) == []
        peer_puts(peer, 5, 4)
        assert len(store.probe(refs)) == 4
        assert blocks.read(store, refs[3]) == blocks.payload(refs[3])
        assert store.put_group(blocks.writes(refs)) == [PRESENT] * 4
        peer.end()
    store.close()
    assert problems_on_disk(directory) == []


def test_larger_capacity_reaches_a_store_that_is_open(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=2 << 20, config=small()) as store:
        with Child(PEER, directory) as peer:
            peer.hear()
            with DiskStore.open(directory, capacity_bytes=16 << 20, config=small()):
                pass
            peer_puts(peer, 1, 400)
            assert peer.end() == 0
        assert store.stats().capacity_bytes == 16 << 20
        refs = blocks.chain(400, start=1)
        assert len(store.probe(refs)) == 400
        assert blocks.read(store, refs[399]) == blocks.payload(refs[399])
        assert store.put_group(blocks.writes(blocks.chain(300, start=2))) == [STORED] * 300


def test_map_grown_by_another_process_is_followed_when_reading(
    directory: Path, blocks: Blocks
) -> None:
    refs = blocks.chain(400, start=1)
    with DiskStore.open(directory, capacity_bytes=2 << 20, config=small()) as store:
        with Child(PEER, directory) as peer:
            peer.hear()
            peer.say("store.close(); store = DiskStore.open(sys.argv[1], capacity_bytes=16 << 20)")
            peer.hear()
            peer_puts(peer, 1, 400)
        assert blocks.read(store, refs[399]) == blocks.payload(refs[399])


def test_smaller_capacity_evicts_down_to_it(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=16 << 20, config=small()) as store:
        for start in range(60):
            store.put_group(blocks.writes(blocks.chain(10, start=start)))
        assert store.stats().blocks == 600
        with DiskStore.open(directory, capacity_bytes=4 << 20, config=small()):
            pass
        for start in range(100, 140):
            store.put_group(blocks.writes(blocks.chain(10, start=start)))
        stats = store.stats()
        assert stats.capacity_bytes == 4 << 20
        assert stats.used_bytes < 4 << 20
        assert len(store.probe(blocks.chain(10, start=139))) == 10
    assert problems_on_disk(directory) == []


def test_two_stores_of_one_process_share_one_environment(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(3)
    with DiskStore.open(directory) as other:
        other.put_group(blocks.writes(refs))
        assert len(store.probe(refs)) == 3
    assert blocks.read(store, refs[0]) == blocks.payload(refs[0])


def test_same_directory_by_another_path_is_the_same_environment(
    store: DiskStore, blocks: Blocks, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(directory)
    refs = blocks.chain(3)
    with DiskStore.open(tmp_path / "link") as other:
        other.put_group(blocks.writes(refs))
    assert len(store.probe(refs)) == 3


def test_other_durability_in_one_process_is_refused(store: DiskStore, directory: Path) -> None:
    with pytest.raises(ConfigError, match="durability"):
        DiskStore.open(directory, config=DiskConfig(durability="power"))


def test_forked_child_is_refused_and_does_not_disturb_the_parent(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(3)
    store.put_group(blocks.writes(refs))

    def use_it() -> int:
        with pytest.raises(StoreClosedError):
            store.probe(refs)
        with pytest.raises(StoreClosedError):
            store.put_group(blocks.writes(refs))
        store.close()
        return 0

    assert in_fork(use_it) == 0
    assert blocks.read(store, refs[0]) == blocks.payload(refs[0])
    assert store.put_group(blocks.writes(blocks.chain(3, start=9))) == [STORED] * 3
    other = Attachment(directory, "test")
    assert not other.try_exclusive()
    assert len(other.holders()) == 1
    other.detach()


def test_forked_child_cannot_open_what_its_parent_has_open(
    store: DiskStore, directory: Path, tmp_path: Path
) -> None:
    def open_it() -> int:
        with pytest.raises(TierBrokenError, match="spawn"):
            DiskStore.open(directory)
        with DiskStore.open(tmp_path / "other", capacity_bytes=8 << 20) as other:
            return int(other.stats().state == "ok")

    assert in_fork(open_it) == 1
    assert store.probe([]) == []


def test_forked_child_that_ends_like_any_program_does_not_disturb_the_parent(
    directory: Path,
) -> None:
    code = """
    from kvstore.disk import DiskStore
    import os
    blocks = Blocks()
    refs = blocks.chain(3)
    with DiskStore.open(sys.argv[1], capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
        store.probe(refs)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        assert len(store.probe(refs)) == 3
    say("fine")
    """
    with Child(code, directory) as child:
        assert child.hear() == "fine"


def test_directory_deleted_under_a_store_is_a_broken_tier(
    store: DiskStore, blocks: Blocks, directory: Path
) -> None:
    refs = blocks.chain(2)
    store.put_group(blocks.writes(refs))
    shutil.rmtree(directory)
    with pytest.raises(TierBrokenError, match="gone"):
        store.put_group(blocks.writes(blocks.chain(2)))
    assert store.probe(refs) == []
    stats = store.stats()
    assert stats.state == "off"
    assert "gone" in (stats.reason or "")


def test_file_replaced_under_a_store_is_followed(
    store: DiskStore, blocks: Blocks, directory: Path, tmp_path: Path
) -> None:
    store.put_group(blocks.writes(blocks.chain(2, start=1)))
    with DiskStore.open(tmp_path / "other", capacity_bytes=8 << 20) as other:
        other.put_group(blocks.writes(blocks.chain(3, start=2)))
    data_file(tmp_path / "other").rename(data_file(directory))
    assert len(store.probe(blocks.chain(3, start=2))) == 3
    assert store.probe(blocks.chain(2, start=1)) == []
    assert store.put_group(blocks.writes(blocks.chain(2, start=1))) == [STORED] * 2


def test_reader_that_comes_while_the_file_is_reopened_meets_a_miss(
    store: DiskStore, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = blocks.chain(2)
    store.put_group(blocks.writes(refs))
    env, found = store._env, []
    attach = env._attach

    def read_then_attach() -> None:
        found.append(store.probe(refs))
        attach()

    monkeypatch.setattr(env, "_attach", read_then_attach)
    env.recover()
    assert found == [[]]
    assert len(store.probe(refs)) == 2


def test_sync_that_fails_is_a_broken_tier(
    directory: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise lmdb.Error("input/output error")

    with DiskStore.open(directory, config=DiskConfig(durability="power")) as store:
        store.put_group(blocks.writes(blocks.chain(1)))
        monkeypatch.setattr(store._env, "sync", fail)
        with pytest.raises(TierBrokenError, match="input/output error"):
            store.flush()


def test_writer_stopped_inside_a_transaction_hangs_nobody(directory: Path, blocks: Blocks) -> None:
    stop = """
from kvstore.disk import DiskStore
import os, signal
store = DiskStore.open(sys.argv[1])
with store._env.write(1.0) as txn:
    txn.put(b"x", b"y", db=store._env.payload)
    say("inside")
    os.kill(os.getpid(), signal.SIGSTOP)
    txn.abort()
store.close()
"""
    with DiskStore.open(directory, capacity_bytes=8 << 20, lock_timeout_s=0.1) as store:
        refs = blocks.chain(2)
        store.put_group(blocks.writes(refs))
        with Child(stop, directory) as child:
            child.hear()
            # Before it stands still, what lets it go on would come too early.
            os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
            assert store.put_group(blocks.writes(blocks.chain(2))) == [FULL, FULL]
            stats = store.stats()
            assert stats.state == "read_only"
            assert "lock" in (stats.reason or "")
            assert stats.lock_wait_s >= 0.1
            assert len(store.probe(refs)) == 2
            assert blocks.read(store, refs[0]) == blocks.payload(refs[0])
            with DiskStore.open(directory, capacity_bytes=16 << 20, lock_timeout_s=0.1):
                pass  # neither opening nor closing waits for it
            child.kill(signal.SIGCONT)
            child.end()
        assert store.put_group(blocks.writes(blocks.chain(2))) == [STORED, STORED]
        assert store.stats().state == "ok"


def test_writer_killed_inside_a_transaction_leaves_the_lock_free(
    directory: Path, blocks: Blocks
) -> None:
    die = """
from kvstore.disk import DiskStore
import os, signal
store = DiskStore.open(sys.argv[1])
with store._env.write(1.0) as txn:
    txn.put(b"x", b"y", db=store._env.payload)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        with Child(die, directory) as child:
            assert child.end() == -signal.SIGKILL
        assert store.put_group(blocks.writes(blocks.chain(2))) == [STORED, STORED]
    assert problems_on_disk(directory) == []


def test_clash_of_pids_between_containers_names_the_remedy(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clash(*_: object, **__: object) -> None:
        raise lmdb.LockError("Resource temporarily unavailable")

    monkeypatch.setattr(lmdb, "open", clash)
    with pytest.raises(TierBrokenError, match="another container has our pid"):
        DiskStore.open(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to make pid namespaces")
def test_two_pid_namespaces_with_equal_pids(directory: Path) -> None:
    """Both children are pid 1 of their namespace: the second is refused, or both work."""
    code = """
from kvstore.disk import DiskStore
from kvstore.errors import TierBrokenError
import os
assert os.getpid() < 10
try:
    store = DiskStore.open(sys.argv[1])
except TierBrokenError as error:
    say("container" if "another container" in str(error) else error)
else:
    blocks = Blocks()
    say(store.put_group(blocks.writes(blocks.chain(2)))[0].value)
    sys.stdin.readline()
    store.close()
"""
    alone = ("unshare", "--pid", "--fork")
    with Child(code, directory, command=alone) as first:
        assert first.hear() == "stored"
        with Child(code, directory, command=alone) as second:
            assert second.hear() in ("container", "present")
        first.say()
        first.end()
    assert len(raw_records(directory)) == 2


# --- what the next start makes of the last end ------------------------------------------------


def put_and_die(directory: Path, start: int, *, is_inside: bool = False) -> None:
    with Child(PEER, directory) as peer:
        peer.hear()
        peer_puts(peer, start, 2)
        if is_inside:
            peer.say("store._env._gate.enter()")
            peer.hear()
        peer.kill()


def test_one_killed_process_is_no_reason_to_check(directory: Path, blocks: Blocks) -> None:
    put_and_die(directory, 1)
    with DiskStore.open(directory) as store:
        assert store.stats().state == "ok"
        assert len(store.probe(blocks.chain(2, start=1))) == 2


def test_clean_end_forgets_an_earlier_kill(directory: Path) -> None:
    for start in range(3):
        put_and_die(directory, start)
        with DiskStore.open(directory) as store:
            assert store.stats().state == "ok"


@pytest.mark.parametrize("why", ["killed twice", "killed inside", "other boot", "no history"])
def test_file_in_doubt_is_checked_first_and_then_served(
    directory: Path, blocks: Blocks, why: str
) -> None:
    put_and_die(directory, 1, is_inside=why == "killed inside")
    if why == "killed twice":
        put_and_die(directory, 2)
    elif why == "other boot":
        attachment = Attachment(directory, "test")
        attachment.write_header(Header(unsynced_boot="another"))
        attachment.detach()
    elif why == "no history":
        (directory / ATTACH_FILE).unlink()
    refs = blocks.chain(2, start=1)
    with DiskStore.open(directory) as store:
        stats = store.stats()
        if stats.state == "checking":  # unless the check was faster than this line
            assert "check" in (stats.reason or "")
        assert store._env.reason is None or "checking" in store._env.reason
        assert store.wait_ready(60)
        assert store.stats().state == "ok"
        assert len(store.probe(refs)) == 2
    assert not list(directory.glob("*.damaged-*"))


def test_store_being_checked_serves_nothing_and_refuses_nothing(
    directory: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from kvstore.disk import startup

    put_and_die(directory, 1, is_inside=True)
    go = threading.Event()
    check = startup.check_deep
    monkeypatch.setattr(startup, "check_deep", lambda file: go.wait(60) and check(file))
    with DiskStore.open(directory) as store:
        assert store.stats().state == "checking"
        assert store.probe(blocks.chain(2, start=1)) == []
        assert store.put_group(blocks.writes(blocks.chain(1))) == [FULL]
        with Child(PEER, directory) as peer:
            peer.hear()  # opening does not wait for us
            go.set()
            assert store.wait_ready(60)
            peer.say("store.wait_ready()")
            peer.hear()
            peer_puts(peer, 3, 1)
        assert len(store.probe(blocks.chain(1, start=3))) == 1


def test_damaged_file_is_set_aside_and_a_fresh_one_begins(directory: Path, blocks: Blocks) -> None:
    refs = blocks.chain(20, start=1)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
    with data_file(directory).open("r+b") as file:
        file.truncate(200_000)
    with DiskStore.open(directory) as store:
        assert store.wait_ready(60)
        assert store.probe(refs) == []
        assert store.put_group(blocks.writes(refs)) == [STORED] * 20
    (aside,) = directory.glob("data.mdb.damaged-*")
    assert aside.stat().st_size == 200_000
    assert problems_on_disk(directory) == []


def test_damaged_meta_page_is_set_aside_at_once(directory: Path, blocks: Blocks) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(blocks.chain(2)))
    with data_file(directory).open("r+b") as file:
        file.seek(16)
        file.write(b"????")
    with DiskStore.open(directory) as store:
        assert store.stats().state == "ok"
        assert store.stats().blocks == 0
    assert list(directory.glob("data.mdb.damaged-*"))


def test_damaged_file_is_kept_where_it_is_when_told_to_raise(directory: Path) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20):
        pass
    with data_file(directory).open("r+b") as file:
        file.seek(16)
        file.write(b"????")
    config = DiskConfig(on_corruption="raise")
    with pytest.raises(TierBrokenError, match="kvstore verify"):
        DiskStore.open(directory, config=config)
    assert data_file(directory).exists()


def test_damage_that_liblmdb_reports_turns_the_tier_off_and_is_healed_at_the_next_start(
    directory: Path, blocks: Blocks
) -> None:
    refs = blocks.chain(20)
    with DiskStore.open(directory, capacity_bytes=8 << 20) as store:
        store.put_group(blocks.writes(refs))
        store._env.report_damage(lmdb.CorruptedError("mdb_get"))
        assert store.stats().state == "off"
        assert store.probe(refs) == []
        with pytest.raises(TierBrokenError):
            store.put_group(blocks.writes(refs))
    with DiskStore.open(directory) as store:
        assert "CorruptedError" in (store._env.reason or "CorruptedError")
        assert store.wait_ready(60)
        assert len(store.probe(refs)) == 20


def test_newer_schema_is_refused_with_a_sentence(directory: Path) -> None:
    with DiskStore.open(directory, capacity_bytes=8 << 20):
        pass
    env = lmdb.open(str(directory), max_dbs=6)
    with env.begin(write=True) as txn:
        txn.put(b"schema", b"2", db=env.open_db(b"meta", txn, create=False))
    env.close()
    with pytest.raises(TierBrokenError, match="schema 2"):
        DiskStore.open(directory)
