import os

import msgpack
import pytest

from kvstore.errors import ConfigError
from kvstore.reports.event_file import EventFile, read_events
from kvstore.reports.events import AllBlocksCleared, BlockRemoved, BlockStored, RequestMatched

NAMESPACE = b"n" * 32
STORED = BlockStored(
    ts=1.5,
    namespace=NAMESPACE,
    salt=b"s" * 16,
    block_hashes=[b"a" * 32, b"b" * 32],
    parent_block_hash=None,
    token_ids=[1, 2**32 - 1, 3, 4],
    block_size=2,
    medium="device",
)
REMOVED = BlockRemoved(ts=2.0, namespace=NAMESPACE, block_hashes=[b"a" * 32], medium="disk")
CLEARED = AllBlocksCleared(ts=3.0, namespace=NAMESPACE, medium="host")
MATCHED = RequestMatched(
    ts=4.0,
    namespace=NAMESPACE,
    block_hashes=[b"a" * 32],
    num_tokens=7,
    block_size=2,
    found_blocks={"disk": 1},
)
EVENTS = [STORED, REMOVED, CLEARED, MATCHED]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.msgpack"


def write(path, *events):
    file = EventFile(path)
    file(events)
    file.close()


def test_events_come_back_as_they_were(path):
    write(path, *EVENTS)
    assert list(read_events(path)) == EVENTS


def test_any_msgpack_reader_understands_the_file(path):
    write(path, STORED)
    with path.open("rb") as file:
        (event,) = msgpack.Unpacker(file)
    assert event["type"] == "BlockStored"
    assert event["token_ids"] == [1, 2**32 - 1, 3, 4]
    assert event["medium"] == "device"
    assert event["lora_id"] is None


def test_a_file_is_continued(path):
    write(path, STORED, REMOVED)
    write(path, CLEARED)
    assert list(read_events(path)) == [STORED, REMOVED, CLEARED]


@pytest.mark.parametrize("kept", [1, 3, 60])
def test_half_an_event_at_the_end_is_passed_over_and_cut_off(path, kept):
    write(path, STORED)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert list(read_events(path)) == [STORED]
    write(path, MATCHED)
    assert list(read_events(path)) == [STORED, MATCHED]


def test_zeros_after_a_power_cut_are_passed_over_and_cut_off(path):
    write(path, STORED)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert list(read_events(path)) == [STORED]
    write(path, CLEARED)
    assert list(read_events(path)) == [STORED, CLEARED]


def test_a_file_that_holds_something_else_is_left_alone(path):
    path.write_bytes(b"\xdf\xff\xff\xff\xffhow to bake bread")
    with pytest.raises(ConfigError, match="not a file of events"):
        EventFile(path)
    with pytest.raises(ConfigError, match="not a file of events"):
        list(read_events(path))
    assert path.read_bytes().endswith(b"bread")


def test_two_engines_do_not_write_one_file(path):
    first = EventFile(path)
    with pytest.raises(ConfigError, match="name another file"):
        EventFile(path)
    first.close()
    EventFile(path).close()


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        EventFile(tmp_path / "nowhere" / "events")


def test_a_full_volume_leaves_whole_events(path, monkeypatch):
    write(path, STORED)
    file, real = EventFile(path), os.write

    def fill_up(descriptor, data):
        monkeypatch.setattr(os, "write", no_room)
        return real(descriptor, data[:10])

    def no_room(descriptor, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(OSError, match="No space"):
        file([MATCHED])
    monkeypatch.undo()
    file([REMOVED])
    file.close()
    assert list(read_events(path)) == [STORED, REMOVED]


def test_only_the_owner_may_read_prompts(path):
    write(path, STORED)
    assert path.stat().st_mode & 0o077 == 0


def test_kinds_and_fields_of_later_versions_are_passed_over(path):
    later = {"type": "BlockMoved", "ts": 1.0}
    grown = {
        "type": "AllBlocksCleared",
        "ts": 3.0,
        "namespace": NAMESPACE,
        "medium": "host",
        "x": 1,
    }
    path.write_bytes(msgpack.packb(later) + msgpack.packb(grown))
    assert list(read_events(path)) == [CLEARED]
