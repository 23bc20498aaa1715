import asyncio
import threading

import lmdb
import pytest

from kvstore.disk import DiskStore
from kvstore.errors import TierBrokenError
from kvstore.testing import FaultyDisk, MemoryDisk, TierSuite
from kvstore.tiers.base import BlockRead
from kvstore.tiers.disk import LmdbTier


class TestLmdbTier(TierSuite):
    def make_tier(self, path):
        return LmdbTier(DiskStore.open(path / "cache", capacity_bytes=64 << 20))

    def raw_get(self, path, tier, key):
        return raw_payload(path / "cache", key)

    def raw_flip(self, path, tier, key):
        file = path / "cache" / "data.mdb"
        with file.open("r+b") as medium:
            at = medium.read().index(raw_payload(path / "cache", key))
            medium.seek(at + 5)
            byte = medium.read(1)[0]
            medium.seek(at + 5)
            medium.write(bytes([byte ^ 1]))


def raw_payload(directory, key):
    """Read by another process: liblmdb allows one environment of a file in each."""
    from multiprocessing import get_context

    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_read_payload, (str(directory), key))


def _read_payload(directory, key):
    env = lmdb.open(directory, max_dbs=16, readonly=True)
    with env.begin() as txn:
        return txn.get(key, db=env.open_db(b"payload", txn, create=False))


class DictionaryCase(TierSuite):
    """A tier in a dictionary that stands for the medium of one test."""

    @pytest.fixture(autouse=True)
    def medium(self):
        self.disk = MemoryDisk()

    def raw_get(self, path, tier, key):
        return self.disk.blocks.get(key, (None, None))[1]

    def raw_flip(self, path, tier, key):
        ref, held = self.disk.blocks[key]
        self.disk.blocks[key] = ref, held[:-1] + bytes([held[-1] ^ 1])


class TestMemoryDisk(DictionaryCase):
    def make_tier(self, path):
        return self.disk


class TestFaultyDisk(DictionaryCase):
    def make_tier(self, path):
        return FaultyDisk(self.disk)


class StubStore:
    """Reads that fail at once or wait until told to go on; ``flush`` fails."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.is_closed = False

    def read_many(self, reads):
        if reads[0][0] == "bad":
            raise MemoryError
        self.may_go_on.wait(10.0)
        return [None] * len(reads)

    def flush(self):
        raise TierBrokenError("it cannot be synced", tier="disk")

    def close(self):
        self.is_closed = True


def test_a_read_that_fails_ends_when_no_thread_fills_its_memory_any_more():
    """It used to end with the first part that failed, beside threads that went on writing."""

    async def read(tier, disk):
        reads = [BlockRead("bad", memoryview(b""))] * 16 + [BlockRead("good", memoryview(b""))] * 16
        reading = asyncio.ensure_future(tier.read(reads))
        await tier._run(tier._writer, disk.may_go_on.wait, 0.05)
        assert not reading.done()
        disk.may_go_on.set()
        with pytest.raises(MemoryError):
            await reading
        with pytest.raises(TierBrokenError):
            await tier.aclose()

    disk = StubStore()
    tier = LmdbTier(disk)
    asyncio.run(read(tier, disk))
    assert disk.is_closed  # flushed or not
