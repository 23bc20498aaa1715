"""Any sequence of puts, removals, uses and restarts leaves what a dictionary would hold."""

import math
import shutil
import tempfile
from pathlib import Path

from disk_case import Blocks, FakeClock, problems_on_disk, small
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.block import BlockRef, PutOutcome, Removal
from kvstore.disk import DiskStore


class DiskMachine(RuleBasedStateMachine):
    """A tree of 40 blocks, in a cache with room for all of them.

    good     blocks that are there
    records  those and the bad ones, whose record is kept for what is below them
    """

    @initialize()
    def begin(self) -> None:
        self.blocks = Blocks(payload_bytes=100)
        trunk = self.blocks.chain(10, start=1)
        self.tree = trunk + [
            ref
            for start, at in enumerate((0, 2, 2, 5, 8, 9), 2)
            for ref in self.blocks.below(trunk[at], 5, start)
        ]
        self.directory = Path(tempfile.mkdtemp())
        self.clock = FakeClock()
        self.good: set[bytes] = set()
        self.pins: dict[bytes, float] = {}
        self.records: set[bytes] = set()
        self.open()

    def open(self) -> None:
        self.store = DiskStore.open(
            self.directory / "cache", capacity_bytes=8 << 20, config=small(), clock=self.clock
        )

    def expected_put(self, ref: BlockRef) -> PutOutcome:
        if ref.key in self.good:
            return PutOutcome.PRESENT
        if ref.depth > 0 and ref.parent not in self.records:
            return PutOutcome.ORPHAN
        self.good.add(ref.key)
        self.records.add(ref.key)
        return PutOutcome.STORED

    def drop(self, ref: BlockRef) -> None:
        self.good.discard(ref.key)
        self.drop_needless(ref.key)

    def drop_needless(self, key: bytes) -> None:
        """A bad block's record goes with its last child or pin; then its parent's may, too."""
        known = {other.key: other for other in self.tree}
        while key in self.records and key not in self.good:
            if any(known[other].parent == key for other in self.records) or key in self.pins:
                return
            self.records.discard(key)
            key = known[key].parent

    def pinned(self) -> set[bytes]:
        known = {other.key: other for other in self.tree}
        found: set[bytes] = set()
        for key in self.pins:
            while key in known:
                found.add(key)
                key = known[key].parent
        return found

    def unpin_model(self, key: bytes) -> None:
        del self.pins[key]
        self.drop_needless(key)

    @rule(start=st.integers(0, 39), count=st.integers(1, 12))
    def put(self, start: int, count: int) -> None:
        group = sorted(self.tree[start : start + count], key=lambda ref: ref.depth)
        expected = [self.expected_put(ref) for ref in group]
        assert self.store.put_group(self.blocks.writes(group)) == expected

    @rule(chosen=st.sets(st.integers(0, 39), max_size=6))
    def remove(self, chosen: set[int]) -> None:
        refs = [self.tree[i] for i in sorted(chosen)]
        pinned = self.pinned()
        good = [ref.key in pinned for ref in refs if ref.key in self.good]
        expected = Removal(good.count(False), good.count(True))
        assert self.store.remove([ref.key for ref in refs]) == expected
        refs = [ref for ref in refs if ref.key not in pinned]
        for ref in sorted(refs, key=lambda ref: ref.depth, reverse=True):
            self.drop(ref)

    @rule(start=st.integers(0, 39), count=st.integers(1, 12))
    def touch(self, start: int, count: int) -> None:
        self.clock.now += 61
        self.expire()
        self.store.touch([ref.key for ref in reversed(self.tree[start : start + count])])

    @rule(index=st.integers(0, 39))
    def clear(self, index: int) -> None:
        ancestor = self.tree[index].key
        below = {ancestor}
        for ref in sorted(self.tree, key=lambda ref: ref.depth):
            if ref.parent in below:
                below.add(ref.key)
        refs = [ref for ref in self.tree if ref.key in below and ref.key != ancestor]
        pinned = self.pinned()
        # What is below a missing record has none itself.
        good = [ref.key in pinned for ref in refs if ref.key in self.good]
        assert self.store.clear(ancestor) == Removal(good.count(False), good.count(True))
        refs = [ref for ref in refs if ref.key not in pinned]
        for ref in sorted(refs, key=lambda ref: ref.depth, reverse=True):
            self.drop(ref)

    @rule(index=st.integers(0, 39), ttl_s=st.sampled_from([None, 100.0, 1000.0]))
    def pin(self, index: int, ttl_s: float | None) -> None:
        chain = [self.tree[index]]
        while chain[-1].depth:
            chain.append(next(ref for ref in self.tree if ref.key == chain[-1].parent))
        keys = [ref.key for ref in reversed(chain)]
        missing = [key for key in keys if key not in self.good]
        assert self.store.pin(keys, ttl_s=ttl_s) == missing
        if not missing:
            until = self.clock() + (math.inf if ttl_s is None else ttl_s)
            self.pins[keys[-1]] = max(until, self.pins.get(keys[-1], 0.0))

    @rule(index=st.integers(0, 39))
    def unpin(self, index: int) -> None:
        key = self.tree[index].key
        assert self.store.unpin(key) == (key in self.pins)
        if key in self.pins:
            self.unpin_model(key)

    @rule(seconds=st.sampled_from([10.0, 500.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.expire()

    def expire(self) -> None:
        """The first change of any kind releases pins that have ended."""
        for key in [key for key, until in self.pins.items() if until <= self.clock()]:
            self.unpin_model(key)
        self.store.unpin(b"no such key")

    @rule()
    def restart(self) -> None:
        self.store.close()
        assert problems_on_disk(self.directory / "cache") == []
        self.open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        stats = self.store.stats()
        assert stats.blocks == len(self.good)
        assert stats.bad_blocks == len(self.records - self.good)
        assert stats.pinned_blocks == len(self.pinned())
        for ref in self.tree:
            assert len(self.store.probe([ref])) == (ref.key in self.good)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            assert problems_on_disk(self.directory / "cache") == []
            shutil.rmtree(self.directory)


DiskMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestDiskMachine = DiskMachine.TestCase
