"""What the cache remembers of blocks that have left it."""

import lmdb
import pytest

from kvstore.disk import departures
from kvstore.disk.departures import Departure

PAGES = 4 * departures._PAGES_A_CHUNK  # a ring of four chunks
RING = 4 * departures._CHUNK_ENTRIES


def key(number: int) -> bytes:
    return number.to_bytes(7, "big") + bytes(25)


@pytest.fixture
def meta(tmp_path):
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        db = env.open_db(b"meta")
        with env.begin(write=True, buffers=True) as txn:
            yield txn, db


def leave(meta, start: int, stop: int, why: Departure = Departure.EVICTED) -> None:
    departures.note(*meta, [(key(i), why) for i in range(start, stop)], cache_pages=PAGES)


def test_the_latest_are_known_whatever_the_groups_they_left_in(meta):
    departures.begin(*meta)
    at = 0
    for size in (1, 239, 1, 500, 7, 1300):
        leave(meta, at, at + size)
        at += size
    found = departures.find(*meta, [key(i) for i in range(at)])
    assert set(map(key, range(at - RING + departures._CHUNK_ENTRIES, at))) <= found.keys()
    assert len(found) <= RING
    assert key(at) not in departures.find(*meta, [key(at)])


def test_all_are_known_until_the_ring_is_full(meta):
    departures.begin(*meta)
    assert departures.knows_all(*meta)
    leave(meta, 0, RING)
    assert departures.knows_all(*meta)
    leave(meta, RING, RING + 1)
    assert not departures.knows_all(*meta)


def test_a_cache_from_before_the_ring_never_knows_all(meta):
    assert not departures.knows_all(*meta)
    leave(meta, 0, 3)
    assert departures.find(*meta, [key(1)]) == {key(1): Departure.EVICTED}
    assert not departures.knows_all(*meta)


def test_the_latest_reason_counts_also_after_the_ring_went_round(meta):
    leave(meta, 0, RING + 10)
    leave(meta, RING + 5, RING + 6, Departure.CORRUPT)
    assert departures.find(*meta, [key(RING + 5)]) == {key(RING + 5): Departure.CORRUPT}


def test_a_damaged_chunk_loses_its_entries_only(meta):
    txn, db = meta
    leave(meta, 0, 300)
    txn.put(departures._chunk_key(0), b"nonsense", db=db)
    leave(meta, 300, 310)
    found = departures.find(*meta, list(map(key, range(310))))
    assert found.keys() == set(map(key, range(240, 310)))
