"""The disk tier as a library: opaque payloads under keys of the caller."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from disk_case import Child, damage_payload, problems_on_disk

from kvstore.block import PutOutcome
from kvstore.disk import open_disk
from kvstore.disk.offline.carry import export_documents, import_documents
from kvstore.disk.offline.summary import summarize
from kvstore.errors import ConfigError

STORED, PRESENT, _, FULL = PutOutcome


def test_payload_comes_back_under_its_key(directory: Path) -> None:
    with open_disk(directory, capacity="8MiB") as cache:
        assert cache.get(b"a") is None
        assert cache.put(b"a", b"x" * 5000) is STORED
        assert cache.put(b"b" * 300, b"") is STORED
        assert cache.put(b"a", b"other") is PRESENT
        assert cache.get(b"a") == b"x" * 5000
        assert cache.get(b"b" * 300) == b""
        assert cache.probe([b"a", b"c", b"b" * 300]) == [True, False, True]
    with open_disk(directory) as cache:
        assert cache.get(b"a") == b"x" * 5000
    assert problems_on_disk(directory) == []


def test_removed_key_may_hold_something_else(directory: Path) -> None:
    with open_disk(directory, capacity="8MiB") as cache:
        cache.put(b"a", b"old")
        assert cache.remove([b"a", b"b"]) == 1
        assert cache.put(b"a", b"new") is STORED
        assert cache.get(b"a") == b"new"


def test_equal_keys_of_two_namespaces_are_two_entries(directory: Path) -> None:
    with (
        open_disk(directory, namespace="one", capacity="8MiB") as one,
        open_disk(directory, namespace={"model": "m", "isa": "amx"}) as two,
    ):
        one.put(b"k", b"1")
        two.put(b"k", b"2")
        assert (one.get(b"k"), two.get(b"k")) == (b"1", b"2")
    rows = summarize(directory)["namespaces"]
    assert sorted(row["blocks"] for row in rows) == [1, 1]
    assert {row["model"] for row in rows} == {None, "m"}


def test_get_into_fills_the_callers_buffer(directory: Path) -> None:
    with open_disk(directory, capacity="8MiB") as cache:
        cache.put(b"a", b"abc")
        buffer = bytearray(3)
        assert cache.get_into(b"a", memoryview(buffer))
        assert buffer == b"abc"
        assert not cache.get_into(b"a", memoryview(bytearray(4)))
        assert not cache.get_into(b"z", memoryview(buffer))


def test_damaged_payload_is_a_miss_and_is_dropped(directory: Path) -> None:
    payload = bytes(range(256)) * 40
    with open_disk(directory, capacity="8MiB") as cache:
        cache.put(b"a", payload)
    damage_payload(directory, payload)
    with open_disk(directory) as cache:
        assert cache.get(b"a") is None
        assert cache.put(b"a", payload) is STORED
        assert cache.stats().corrupt == {"payload": 1}
    assert problems_on_disk(directory) == []


def test_opaque_keys_are_not_counted_as_tokens(directory: Path) -> None:
    with open_disk(directory, capacity="8MiB") as cache:
        cache.put(b"12345678", b"x")
        assert (cache.stats().blocks, cache.stats().tokens) == (1, 0)


def test_least_recently_touched_goes_first(directory: Path) -> None:
    with open_disk(directory, capacity="4MiB") as cache:
        for number in range(300):
            cache.put(number.to_bytes(4, "big"), bytes([number % 256]) * 50_000)
        present = cache.probe([number.to_bytes(4, "big") for number in range(300)])
        assert present == sorted(present)
        assert present[-1]


def test_any_thread_may_write(directory: Path) -> None:
    with open_disk(directory, capacity="16MiB") as cache:

        def write(name: int) -> None:
            for number in range(40):
                cache.put(b"%d-%d" % (name, number), b"%d" % number * 1000)

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.stats().blocks == 160
        assert cache.get(b"3-39") == b"39" * 1000
    assert problems_on_disk(directory) == []


def test_another_process_sees_what_was_put(directory: Path) -> None:
    with open_disk(directory, capacity="8MiB") as cache:
        cache.put(b"a", b"from the parent")
        code = """
        from kvstore.disk import open_disk
        with open_disk(sys.argv[1]) as cache:
            say(cache.get(b"a").decode())
            cache.put(b"b", b"from the child")
        """
        with Child(code, directory) as child:
            assert child.hear() == "from the parent"
            child.end()
        assert cache.get(b"b") == b"from the child"


def test_a_namespace_of_any_values_is_readable_as_json(directory: Path) -> None:
    namespace = {
        "model": b"\x01x",
        "dtype": float("inf"),
        "block_size": 2**63,
        "layout": [{"of": (b"\xff", None, True)}],
        "a\x1bb": {"é": -1.5},
    }
    with open_disk(directory, namespace=namespace, capacity="8MiB") as cache:
        cache.put(b"a", b"payload")
        (described,) = cache._store.namespaces().values()
    assert described == {
        "model": "0x0178",
        "dtype": "inf",
        "block_size": 2**63,
        "layout": [{"of": ["0xff", None, True]}],
        "a\x1bb": {"é": -1.5},
        "kind": "opaque",
    }
    with open_disk(directory, namespace=namespace) as cache:
        assert cache.get(b"a") == b"payload"
    (row,) = json.loads(json.dumps(summarize(directory), allow_nan=False))["namespaces"]
    assert (row["model"], row["dtype"], row["block_size"]) == ("0x0178", "inf", 2**63)
    with (directory.parent / "all.kv").open("w+b") as file:
        export_documents(directory, file, namespace="0x0178")
        file.seek(0)
        assert import_documents(directory.parent / "target", file)["blocks"] == 1


@pytest.mark.parametrize(
    "namespace", [{"a": {1, 2}}, {"a": 2**65}, {"a": "\udcff"}, {1: 2, "a": 3}, {"a": object()}]
)
def test_a_namespace_without_an_identity_is_refused(directory: Path, namespace: Any) -> None:
    with pytest.raises(ConfigError, match="namespace: expected a name, or a mapping"):
        open_disk(directory, namespace=namespace)
    assert not directory.exists()


def test_nonsense_capacity_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        open_disk(directory, capacity="plenty")
    assert not directory.exists()
