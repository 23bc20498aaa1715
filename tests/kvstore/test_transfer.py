"""The transfer loop: what waits for what, and at which pace."""

import asyncio
import threading

import pytest

from kvstore.block import BlockLayout, BlockRef, PutOutcome
from kvstore.config import StoreConfig
from kvstore.errors import StoreClosedError, TierBrokenError
from kvstore.testing import MemoryDisk
from kvstore.tiers.host import HostCopier, HostPool
from kvstore.transfer import PendingWrite, TransferLoop

LAYOUT = BlockLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
NUM_BLOCKS = 40


class RecordingDisk(MemoryDisk):
    """Notes how many blocks came with each write."""

    async def write(self, writes):
        sizes = self.__dict__.setdefault("sizes", [])
        sizes.append(len(writes))
        return await super().write(writes)


class GatedCopier(HostCopier):
    """Loads from host wait until ``gate`` is set."""

    def __init__(self, device):
        super().__init__(device)
        self.gate = threading.Event()

    async def copy_in(self, *arguments):
        while not self.gate.is_set():  # noqa: ASYNC110 - set from another thread
            await asyncio.sleep(0.001)
        await super().copy_in(*arguments)


@pytest.fixture
def make_loop():
    loops = []

    def make(
        block_bytes=LAYOUT.block_bytes,
        write_bytes_per_s=1 << 30,
        disk=None,
        device=None,
        staging=None,
    ):
        device = device or HostPool(NUM_BLOCKS, block_bytes)
        host = HostPool(NUM_BLOCKS, block_bytes)
        wake = threading.Event()
        loop = TransferLoop(
            device,
            GatedCopier(device),
            host=host.rows,
            disk=RecordingDisk() if disk is None else disk,
            staging=staging,
            block_bytes=block_bytes,
            write_bytes_per_s=write_bytes_per_s,
            on_completion=wake.set,
        )
        loop.wake = wake
        loops.append(loop)
        return loop

    yield make
    for loop in loops:
        loop._copier.gate.set()
        loop.close()


def settle(loop):
    while loop.num_pending:
        loop.wake.wait(1.0)
        loop.wake.clear()
        loop.poll()


def roots(count):
    refs = [BlockRef(bytes([i]) * 32, b"seed", bytes([i]) * 16, 0) for i in range(count)]
    return [PendingWrite(ref, b"n" * 32, b"", i) for i, ref in enumerate(refs)]


@pytest.mark.parametrize("bytes_per_s", [1, 1000, 200_000, 550_000, 1 << 30])
def test_the_throttle_is_exact_in_bytes_per_second(make_loop, bytes_per_s):
    throttle = make_loop(368_640, bytes_per_s)._throttle
    assert throttle.rate_limit >= 1
    assert throttle.rate_limit * 368_640 / throttle.period == pytest.approx(bytes_per_s)


def test_writes_wait_while_a_request_waits_for_its_promotion(make_loop):
    loop = make_loop()
    outcomes = []
    loop.promote([0, 1], [10, 11], outcomes.append)
    loop.write(roots(3), outcomes.append)
    loop.probe([write.ref for write in roots(1)], False, outcomes.append)
    while len(outcomes) < 1:  # the probe, which came last, goes first
        loop.wake.wait(1.0)
        loop.poll()
    assert loop._disk.blocks == {}
    loop._copier.gate.set()
    settle(loop)
    assert outcomes[1:] == [None, [PutOutcome.STORED] * 3]


def test_writes_go_in_slices_while_the_model_runs_and_together_otherwise(make_loop):
    loop = make_loop(block_bytes=300_000)
    loop.write(roots(8), lambda outcome: None)
    settle(loop)
    loop.is_model_busy = True
    loop.write(roots(16)[8:], lambda outcome: None)
    settle(loop)
    assert loop._disk.sizes == [8, 3, 3, 2]  # at most a megabyte each


def test_slices_take_a_quarter_of_the_time(make_loop, monkeypatch):
    class SlowDisk(RecordingDisk):
        async def write(self, writes):
            self.passed_s += 1.0
            return await super().write(writes)

    disk, pauses, sleep = SlowDisk(), [], asyncio.sleep
    disk.passed_s = 0.0
    loop = make_loop(block_bytes=300_000, disk=disk)
    real_time = loop._loop.time
    monkeypatch.setattr(loop._loop, "time", lambda: real_time() + disk.passed_s)

    async def note(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("kvstore.transfer.asyncio.sleep", note)
    loop.is_model_busy = True
    loop.write(roots(8), lambda outcome: None)
    settle(loop)
    assert disk.sizes == [3, 3, 2]
    assert len(pauses) == 2
    assert min(pauses) >= 3.0  # after a second of writing


def test_the_throttle_is_passed_once_for_each_block(make_loop):
    class Counting:
        num_passed = 0

        async def __aenter__(self):
            self.num_passed += 1

        async def __aexit__(self, *error):
            pass

    loop = make_loop()
    loop._throttle = throttle = Counting()
    loop.write(roots(5), lambda outcome: None)
    loop.is_model_busy = True
    loop.write(roots(9)[5:], lambda outcome: None)
    settle(loop)
    assert throttle.num_passed == 9


def test_a_job_that_fails_unexpectedly_is_a_broken_transfer_and_the_loop_goes_on(make_loop, caplog):
    loop, outcomes = make_loop(), []

    async def fail():
        raise ZeroDivisionError("boom")

    loop.run(fail(), outcomes.append)
    settle(loop)
    (error,) = outcomes
    assert isinstance(error, TierBrokenError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "a transfer failed" in caplog.text
    loop.write(roots(1), outcomes.append)
    settle(loop)
    assert outcomes[1] == [PutOutcome.STORED]


def test_a_closed_loop_takes_no_job(make_loop):
    loop = make_loop()
    loop.close()
    with pytest.raises(StoreClosedError):
        loop.write(roots(1), lambda outcome: None)


def test_closing_a_throttled_store_writes_what_is_dirty_at_once(make_engine):
    """A block every two minutes: closing used to wait for each of them."""
    disk = MemoryDisk()
    engine = make_engine(disk=disk, config=StoreConfig(write_bytes_per_s=1))
    engine.run([*range(40)])
    engine.store.close()
    assert len(disk.blocks) == 10


class FarPool(HostPool):
    """A device that the processor cannot address."""

    def payload(self, block_id):
        return None


def test_a_group_larger_than_the_staging_is_written_in_parts(make_loop):
    """It used to wait for room that there could never be."""
    device = FarPool(NUM_BLOCKS, LAYOUT.block_bytes)
    loop = make_loop(device=device, staging=HostPool(4, LAYOUT.block_bytes))
    outcomes = []
    loop.write(roots(7), outcomes.append)
    settle(loop)
    assert outcomes == [[PutOutcome.STORED] * 7]
    assert loop._disk.sizes == [2, 2, 2, 1]  # half of it at a time: the other half is for loads


def test_a_disk_that_cannot_be_closed_in_order_keeps_no_thread(make_engine, caplog):
    class Stuck(MemoryDisk):
        async def aclose(self):
            raise TierBrokenError("it cannot be synced", tier="disk")

    engine = make_engine(disk=Stuck())
    engine.store.close()
    assert engine.store.is_closed
    assert not engine.store._transfer._thread.is_alive()
    assert "it cannot be synced" in caplog.text
