"""Processes that are killed at any moment, and processes that share a cache all the time."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from disk_case import Blocks, FakeClock, fork, in_fork, problems_on_disk, small

from kvstore.block import BlockRef, PutOutcome
from kvstore.disk import DiskStore
from kvstore.errors import BlockMissingError, CapacityError, CorruptBlockError, TierBrokenError

CAPACITY = 6 << 20
CHAIN = 4


def write_for_ever(directory: Path, first: int, report: int) -> int:
    """Put chains, touch and remove, in a cache so small that it evicts; report each commit."""
    blocks = Blocks(payload_bytes=30_000)
    clock = FakeClock()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small(), clock=clock) as store:
        store.wait_ready()
        start = first
        while True:
            start += 1
            clock.now += 61
            chain = blocks.chain(CHAIN, start=start)
            if set(store.put_group(blocks.writes(chain))) == {PutOutcome.STORED}:
                os.write(report, start.to_bytes(4, "little"))
            older = blocks.chain(CHAIN, start=max(start - 3, first))
            store.touch([ref.key for ref in reversed(older)])
            if start % 7 == 0:
                store.remove([older[1].key])
            if start % 5 == 0:
                store.pin([ref.key for ref in chain], ttl_s=1000.0)
            if start % 10 == 0:
                store.unpin(blocks.chain(CHAIN, start=start - 5)[-1].key)


def kill_and_check(directory: Path, count: int) -> None:
    """Kill a writer ``count`` times at random moments; after each, everything visible is right and
    what was reported last is there."""
    draw = random.Random(4)
    blocks = Blocks(payload_bytes=30_000)
    for number in range(count):
        first = number * 1_000_000
        ours, its = os.pipe()
        child = fork(lambda first=first, its=its: write_for_ever(directory, first, its))
        os.close(its)
        last = int.from_bytes(os.read(ours, 4), "little")  # it is at work
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(ours, 4096):
            last = int.from_bytes(more[-4:], "little")
        os.close(ours)

        assert problems_on_disk(directory) == [], number
        with DiskStore.open(directory, config=small()) as store:
            store.wait_ready()
            assert store.stats().state == "ok"
            chain = blocks.chain(CHAIN, start=last)
            assert len(store.probe(chain)) == CHAIN, number
            for start in range(last, max(last - 60, first), -1):
                for ref in blocks.chain(CHAIN, start=start):
                    check_if_there(store, blocks, ref)
        assert not list(directory.glob("*.damaged-*"))


def check_if_there(store: DiskStore, blocks: Blocks, ref: BlockRef) -> bool:
    try:
        found = blocks.read(store, ref)
    except BlockMissingError:
        return False
    assert found == blocks.payload(ref)
    return True


def test_killed_writer_loses_nothing_it_had_reported(directory: Path) -> None:
    kill_and_check(directory, 20)


@pytest.mark.soak
def test_soak_killed_writer(directory: Path) -> None:
    kill_and_check(directory, 500)


def share(directory: Path, seed: int, seconds: float) -> int:
    """Read and write documents that other processes also read and write; whether reads hit.

    Takes longer where a machine is so slow that it would do next to nothing in that time.
    """
    draw = random.Random(seed)
    blocks = Blocks(payload_bytes=30_000)
    num_hits = num_rounds = 0
    deadline = time.monotonic() + seconds
    with DiskStore.open(
        directory, capacity_bytes=CAPACITY, config=small(touch_interval_s=0)
    ) as store:
        while time.monotonic() < deadline or num_rounds < 100:
            num_rounds += 1
            chain = blocks.chain(CHAIN, start=draw.randrange(80))
            found = store.probe(chain)
            num_hits += sum(check_if_there(store, blocks, ref) for ref in chain[: len(found)])
            if found:
                store.touch([ref.key for ref in reversed(chain[: len(found)])])
            outcomes = store.put_group(blocks.writes(chain))
            assert PutOutcome.ORPHAN not in outcomes
            if draw.random() < 0.05:
                store.remove([draw.choice(chain).key])
            if draw.random() < 0.05:
                # Others read what was freed, or half of the cache is pinned.
                with contextlib.suppress(TierBrokenError, CapacityError):
                    store.pin([ref.key for ref in chain], ttl_s=draw.random())
            if draw.random() < 0.05:
                with contextlib.suppress(TierBrokenError):
                    store.unpin(chain[-1].key)
        stats = store.stats()
        assert stats.corrupt == {}
        assert stats.state == "ok"
    return 1 if num_hits else 0


def four_share(directory: Path, seconds: float) -> None:
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()):
        pass
    children = [fork(lambda seed=seed: share(directory, seed, seconds)) for seed in range(4)]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert ends == [1, 1, 1, 1]
    assert problems_on_disk(directory) == []
    assert (directory / "data.mdb").stat().st_size <= CAPACITY


def test_four_processes_read_and_write_one_cache(directory: Path) -> None:
    four_share(directory, 8.0)


@pytest.mark.soak
def test_soak_four_processes(directory: Path) -> None:
    four_share(directory, 300.0)


def test_threads_read_while_one_writes_and_the_capacity_changes(directory: Path) -> None:
    """A remap waits for readers: liblmdb would unmap the pages they copy from."""
    blocks = Blocks(payload_bytes=30_000)
    failures: list[BaseException] = []
    done = threading.Event()
    with DiskStore.open(directory, capacity_bytes=CAPACITY, config=small()) as store:

        def read() -> None:
            draw = random.Random(threading.get_ident())
            try:
                while not done.is_set():
                    chain = blocks.chain(CHAIN, start=draw.randrange(60))
                    for ref in chain[: len(store.probe(chain))]:
                        check_if_there(store, blocks, ref)
                    store.stats()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for start in range(240):
            store.put_group(blocks.writes(blocks.chain(CHAIN, start=start % 60)))
            if start % 12 == 0:
                capacity = CAPACITY + (start % 5) * (1 << 20)
                with DiskStore.open(directory, capacity_bytes=capacity, config=small()):
                    pass
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert problems_on_disk(directory) == []


def test_process_that_dies_while_the_tier_is_full_leaves_a_sound_cache(directory: Path) -> None:
    blocks = Blocks(payload_bytes=30_000)

    def fill_and_die() -> int:
        store = DiskStore.open(directory, capacity_bytes=CAPACITY, config=small())
        for start in range(100):
            store.put_group(blocks.writes(blocks.chain(CHAIN, start=start)))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_fork(fill_and_die) == -signal.SIGKILL
    assert problems_on_disk(directory) == []
    with DiskStore.open(directory, config=small()) as store:
        with pytest.raises((BlockMissingError, CorruptBlockError)):
            blocks.read(store, blocks.chain(CHAIN, start=0)[0])
        assert len(store.probe(blocks.chain(CHAIN, start=99))) == CHAIN
