"""Who holds a directory, and how one knows that a holder vanished."""

from pathlib import Path

import pytest
from disk_case import Child

from kvstore.disk.attach import ATTACH_FILE, INSIDE, Attachment, Header, boot_id
from kvstore.disk.writer_lock import WriterLock

HOLD = """
from kvstore.disk.attach import Attachment
held = Attachment(Path(sys.argv[1]), "engine")
held.share(1)
held.claim_slot()
say("ready")
for line in sys.stdin:
    exec(line)
    say("done")
"""


@pytest.fixture
def held(tmp_path: Path) -> Attachment:
    attachment = Attachment(tmp_path, "test")
    assert attachment.share(0)
    attachment.claim_slot()
    return attachment


def test_holders_see_each_other_until_one_leaves(held: Attachment, tmp_path: Path) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        (other,) = held.holders()
        assert (other.pid, other.role) == (child.process.pid, "engine")
        child.say("held.detach()")
        child.hear()
        assert held.holders() == held.vanished() == []


def test_directory_is_had_alone_only_when_nobody_else_holds_it(
    held: Attachment, tmp_path: Path
) -> None:
    other = Attachment(tmp_path, "other")
    assert not other.try_exclusive()
    held.detach()
    assert other.try_exclusive()
    third = Attachment(tmp_path, "third")
    assert not third.share(0)


def test_killed_holder_has_vanished(held: Attachment, tmp_path: Path) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        child.kill()
    (gone,) = held.vanished()
    assert (gone.pid, gone.was_inside) == (child.process.pid, False)
    assert held.holders() == []
    held.forget_vanished()
    assert held.vanished() == []


def test_marks_of_a_killed_holder_tell_that_it_died_inside(
    held: Attachment, tmp_path: Path
) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        child.say(f"held.marks[7] = {INSIDE}")
        child.hear()
        child.kill()
    assert [gone.was_inside for gone in held.vanished()] == [True]


def test_slot_of_a_vanished_holder_is_not_taken_over(held: Attachment, tmp_path: Path) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        child.kill()
    third = Attachment(tmp_path, "third")
    third.claim_slot()
    assert len(held.vanished()) == len(held.holders()) == 1


def test_writer_lock_is_had_by_one_and_ends_with_its_process(
    held: Attachment, tmp_path: Path
) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        child.say("assert held.try_writer_lock()")
        child.hear()
        assert not held.try_writer_lock()
        child.kill()
    assert held.try_writer_lock()
    held.release_writer_lock()


def test_writer_lock_on_a_directory_that_was_let_go_of_is_given_back(
    held: Attachment, tmp_path: Path
) -> None:
    """A reader reopens a file that was replaced, beside the writer."""
    lock = WriterLock()
    lock.acquire(held, 0.0)
    held.detach()
    lock.release()
    other = Attachment(tmp_path, "test")
    lock.acquire(other, 0.0)
    lock.release()
    other.detach()


def test_locks_outlive_other_descriptors_of_the_file(held: Attachment, tmp_path: Path) -> None:
    (tmp_path / ATTACH_FILE).read_bytes()
    other = Attachment(tmp_path, "other")
    assert not other.try_exclusive()
    assert len(other.holders()) == 1


def test_header_is_unknown_until_it_is_written(held: Attachment) -> None:
    assert held.read_header() is None
    header = Header(unsynced_boot=boot_id(), num_vanished=255, suspicion="CorruptedError")
    held.write_header(header)
    assert held.read_header() == header


def test_file_of_nonsense_is_read_as_holders_who_vanished(tmp_path: Path) -> None:
    (tmp_path / ATTACH_FILE).write_bytes(b"\xff{]" * 300)
    attachment = Attachment(tmp_path, "test")
    assert attachment.try_exclusive()
    attachment.forget_vanished()
    attachment.claim_slot()
    assert attachment.vanished() == []


def test_holder_of_another_pid_namespace_is_named_as_such(held: Attachment, tmp_path: Path) -> None:
    with Child(HOLD, tmp_path) as child:
        child.hear()
        file = tmp_path / ATTACH_FILE
        file.write_bytes(file.read_bytes().replace(b"pid:[", b"pid:(", 2))
        assert "of another container (engine)" in held.describe_holders()
