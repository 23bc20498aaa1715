"""Random operations on a store with tiny tiers, compared with what a cache must never do.

The model is a rule, not a second cache: whatever is served must be the bytes that belong to the
tokens, and every invariant of ``store.check()`` must hold after each step.
"""

import asyncio
import contextlib
import math
import os
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.block import BlockLayout, TierName
from kvstore.config import StoreConfig
from kvstore.errors import (
    BlockMissingError,
    CapacityError,
    ConfigError,
    CorruptBlockError,
    OutOfBlocksError,
    StoreClosedError,
    TierBrokenError,
)
from kvstore.hashing import namespace_id
from kvstore.lease import Lease, Pin
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, FakeEngine, FaultyDisk, MemoryDisk
from kvstore.tiers.host import HostCopier, HostPool

LAYOUT = BlockLayout(num_layers=1, block_size=2, num_kv_heads=1, head_dim=4, dtype="float16")
# Prompts begin with a part of one of a few documents, so that they share prefixes of every length.
DOCUMENTS = [[document] * 2 + [5, document, 6, 7, 8, document] * 2 for document in range(3)]
PROMPTS = st.builds(
    lambda document, length, tail: [*DOCUMENTS[document][:length], *tail],
    st.integers(0, 2),
    st.sampled_from([14, 12, 9, 4]),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)
MORE = st.lists(st.integers(0, 1), max_size=6)
SALTS = st.sampled_from(["", "", "tenant"])
NUM_STEPS = int(os.environ.get("KVSTORE_STATEFUL_STEPS", "2400"))
_STEPS_A_RUN = 40


class FaultyCopier(HostCopier):
    """Copies to and from host memory fail once it is broken."""

    is_broken = False

    async def copy_out(self, *arguments):
        self.check()
        await super().copy_out(*arguments)

    async def copy_in(self, *arguments):
        self.check()
        await super().copy_in(*arguments)

    def check(self):
        if self.is_broken:
            raise TierBrokenError("the memory is gone", tier="host")


@dataclass(eq=False)
class Entry:
    """A request's lease, None when there was no room for it, and its tokens so far, of which the
    first ``num_computed`` are in its blocks."""

    lease: Lease | None
    tokens: list[int]
    num_computed: int = 0


class StoreMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(
        device=st.integers(8, 12),
        host=st.sampled_from([0, 2, 9]),
        has_disk=st.booleans(),
        capacity=st.sampled_from([6, 1000]),
        write_policy=st.sampled_from(["write_behind", "write_through", "write_back", "min_hits"]),
        policy=st.sampled_from(["lru", "slru", "s3-fifo"]),
        min_partial=st.sampled_from([1, 2]),
    )
    def open(self, device, host, has_disk, capacity, write_policy, policy, min_partial):
        self.sizes = device, host
        self.config = StoreConfig(
            write_policy=write_policy, policy=policy, min_partial_tokens=min_partial
        )
        self.clock = FakeClock()
        self.memory = MemoryDisk(capacity, clock=self.clock) if has_disk else None
        self.held: list[Entry] = []
        self.pins: list[Pin] = []
        self.disk_pins: list[tuple[Pin, list[bytes], float]] = []  # with their blocks and their end
        self.outliving: list[Pin] = []  # their store is closed; the blocks stay pinned
        self.open_store()

    def open_store(self):
        device, host = self.sizes
        self.disk = FaultyDisk(self.memory) if self.memory is not None else None
        pool = HostPool(device, LAYOUT.block_bytes)
        self.copier = FaultyCopier(pool)
        self.store = BlockStore(
            LAYOUT,
            namespace_id({}),
            pool,
            copier=self.copier,
            host_blocks=host,
            disk=self.disk,
            config=self.config,
            clock=self.clock,
        )
        self.engine = FakeEngine(self.store)

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.release_disk()
        for entry in list(self.held):
            self.give_back(entry)
        assert self.store.run_until_idle(10.0)
        assert self.store.check() == []
        used = self.store.device.capacity - self.store.device.num_free
        assert used == sum(
            self.store.index.device[slot] >= 0 for slot in self.store.index.used_slots()
        )
        self.store.close(10.0)

    @rule(target=leases, tokens=PROMPTS, salt=SALTS, is_patient=st.booleans())
    def acquire(self, tokens, salt, is_patient):
        """Reserve without waiting for the transfers it needs, or even for what disk has."""
        return self.start(tokens, salt, is_patient=is_patient)

    def start(self, tokens, salt, *, is_patient=True):
        lookup = self.store.lookup(self.encode(tokens), salt)
        if not is_patient:
            self.store.stop_probing(lookup)
        if not lookup.is_ready and self.disk is not None and not self.disk.is_held:
            self.store.run_until_idle(10.0)
        entry = Entry(None, list(tokens))
        if lookup.is_ready:
            with contextlib.suppress(OutOfBlocksError):
                entry.lease = self.store.reserve(lookup, len(tokens))
                self.held.append(entry)
        return entry

    @rule(tokens=PROMPTS, salt=SALTS)
    def serve(self, tokens, salt):
        """A whole request, as far as transfers allow."""
        entry = self.start(tokens, salt)
        if self.disk is None or not self.disk.is_held:
            self.store.run_until_idle(10.0)
        self.grow(entry, [])
        self.give_back(entry)

    @rule(entry=leases, more=MORE, commits=st.booleans())
    def compute(self, entry, more, commits):
        """The sequence computes what is missing, and grows. Without a commit its full blocks stay
        without keys, as when caching is off."""
        self.grow(entry, more, commits=commits)

    def grow(self, entry, more, *, commits=True):
        lease, tokens = entry.lease, entry.tokens
        if not self.is_readable(entry):
            return
        self.engine.check_cached(lease, tokens)
        self.engine.check_content(lease, tokens[: entry.num_computed])
        try:
            self.store.extend(lease, len(tokens) + len(more))
        except OutOfBlocksError:
            more = []
        tokens += more
        start = max(entry.num_computed, lease.num_cached_tokens(LAYOUT.block_size))
        self.engine.compute(lease, tokens, start, commits=commits)
        entry.num_computed = len(tokens)

    def is_readable(self, entry):
        return entry in self.held and entry.lease.is_ready and not entry.lease.failed_keys

    @rule(
        target=leases,
        choice=st.integers(0, 100),
        fewer=st.sampled_from([0, 0, 1, 3]),
        commits=st.booleans(),
        more=st.tuples(MORE, MORE),
    )
    def fork(self, choice, fewer, commits, more):
        """A sequence goes on from what another has computed, or from a part of it; both go on."""
        readable = [entry for entry in self.held if self.is_readable(entry)]
        # Neither a precondition nor no result: when transfers end is not the machine's to decide,
        # and what it draws must not depend on it.
        if not readable:
            return Entry(None, [])
        entry = readable[choice % len(readable)]
        self.grow(entry, [], commits=commits)
        num_tokens = max(0, entry.num_computed - fewer)
        fork = Entry(None, entry.tokens[:num_tokens], num_tokens)
        before = self.store.device.num_free, list(self.store.index.refcount)
        try:
            fork.lease = self.store.fork(entry.lease, num_tokens)
        except OutOfBlocksError:
            assert before == (self.store.device.num_free, list(self.store.index.refcount))
            return fork
        self.held.append(fork)
        for each, tokens in zip((fork, entry), more, strict=True):
            self.grow(each, tokens, commits=commits)
        return fork

    @rule(entry=consumes(leases))
    def release(self, entry):
        """Finish, abort, or give up a failed or unfinished promotion: all end in a release."""
        self.give_back(entry)

    def give_back(self, entry):
        if self.is_readable(entry):
            self.engine.check_content(entry.lease, entry.tokens[: entry.num_computed])
        if entry in self.held:
            self.held.remove(entry)
            self.store.release(entry.lease)

    @rule(entry=leases)
    def give_up(self, entry):
        """Wait no longer for the blocks on their way: reserve again, without them."""
        if entry in self.held and not entry.lease.is_ready:
            lookup = entry.lease.lookup
            self.store.give_up(entry.lease)
            self.give_back(entry)
            with contextlib.suppress(OutOfBlocksError):
                entry.lease = self.store.reserve(lookup, len(entry.tokens))
                self.held.append(entry)

    @rule(entry=leases, priority=st.integers(-1, 1), ttl=st.sampled_from([None, 1.0]))
    def prefer(self, entry, priority, ttl):
        if entry in self.held:
            self.store.prefer(entry.lease, priority, ttl)

    @rule(tokens=PROMPTS, salt=SALTS, by_key=st.booleans())
    def prefetch(self, tokens, salt, by_key):
        if by_key:
            keys = self.store.lookup(self.encode(tokens), salt, peek=True).keys
            self.store.prefetch(keys, salt)
        else:
            self.store.prefetch_tokens(self.encode(tokens), salt)

    @rule(tokens=PROMPTS)
    def pin(self, tokens):
        with contextlib.suppress(CapacityError):
            self.pins.append(self.store.pin(self.store.lookup(self.encode(tokens), peek=True)))

    @rule(tokens=PROMPTS, ttl=st.sampled_from([None, 50.0]))
    def pin_on_disk(self, tokens, ttl):
        lookup = self.store.lookup(self.encode(tokens), peek=True)
        if self.disk is None or not self.disk.is_held:
            self.store.run_until_idle(10.0)
        self.store.stop_probing(lookup)
        with contextlib.suppress(BlockMissingError, ConfigError):
            pin = self.store.pin(lookup, persist=True, ttl_s=ttl)
            self.disk_pins.append((pin, lookup.keys, self.clock() + (ttl or math.inf)))

    @rule(choice=st.integers(0, 100))
    def unpin(self, choice):
        if self.pins:
            self.pins.pop(choice % len(self.pins)).release()

    @rule(choice=st.integers(0, 100))
    def unpin_on_disk(self, choice):
        if self.disk_pins:
            pin, keys, _ = self.disk_pins[choice % len(self.disk_pins)]
            if pin in self.outliving:
                with contextlib.suppress(StoreClosedError):
                    pin.release()
                return
            self.disk_pins = [each for each in self.disk_pins if each[1][-1:] != keys[-1:]]
            pin.release()

    @rule(tokens=PROMPTS)
    def unpin_whoever_pinned(self, tokens):
        lookup = self.store.lookup(self.encode(tokens), peek=True)
        self.disk_pins = [each for each in self.disk_pins if each[1][-1:] != lookup.keys[-1:]]
        self.store.unpin(lookup, lambda had_one: None)

    @rule(salt=SALTS)
    def clear_disk(self, salt):
        self.store.clear_disk(salt, lambda kept: None)

    @rule(tokens=PROMPTS, salt=SALTS, follows=st.sampled_from([0, 1, 2]))
    def forget(self, tokens, salt, follows):
        """A sequence, and what continues it with the next few of the prompt's tokens."""
        size, encoded = LAYOUT.block_size, self.encode(tokens)
        num_blocks = max(0, len(tokens) - follows) // size
        lookup = self.store.lookup(encoded, salt, num_reusable=num_blocks * size, peek=True)
        beginning = encoded[4 * num_blocks * size :][: 4 * follows]
        self.store.forget(lookup, beginning, lambda outcome: None)

    @invariant()
    def no_pinned_block_is_lost_on_disk(self):
        if not hasattr(self, "store") or self.memory is None:
            return
        for pin, keys, until in self.disk_pins:
            if pin.is_settled and pin.error is None and until > self.clock():
                assert self.memory.pinned() >= set(keys)

    @rule()
    def poll(self):
        self.store.poll()

    @rule(busy=st.booleans())
    def settle(self, busy):
        if self.disk is None or not self.disk.is_held:
            self.store.poll(model_is_busy=busy)
            self.store.run_until_idle(10.0)

    @rule(seconds=st.sampled_from([0.5, 3.0, 100.0]))
    def advance(self, seconds):
        self.clock.advance(seconds)

    @rule(tier=st.sampled_from([None, TierName.DEVICE, TierName.HOST]), salt=st.none() | SALTS)
    def reset(self, tier, salt):
        self.store.reset(tier, salt)

    @rule()
    def measure(self):
        self.store.measure()

    @precondition(lambda self: self.disk is not None)
    @rule()
    def hold_disk(self):
        self.disk.is_held = True

    @precondition(lambda self: self.disk is not None)
    @rule()
    def release_disk(self):
        if self.disk is not None:
            self.disk.is_held = self.memory.is_checking = False

    @precondition(lambda self: self.disk is not None)
    @rule()
    def check_disk(self):
        """Its file is in doubt: it takes nothing for now."""
        self.memory.is_checking = True

    @precondition(lambda self: self.disk is not None)
    @rule(fails=st.booleans())
    def fail_reads(self, fails):
        error = CorruptBlockError("flipped", reason="checksum") if fails else None
        self.disk.fail_reads = lambda ref: error if ref.depth % 2 else None

    @precondition(lambda self: self.disk is not None)
    @rule(chance=st.integers(0, 30))
    def break_disk(self, chance):
        self.disk.is_broken = self.disk.is_broken or chance == 17

    @precondition(lambda self: self.store.host is not None)
    @rule(chance=st.integers(0, 30))
    def break_host(self, chance):
        self.copier.is_broken = self.copier.is_broken or chance == 17

    @precondition(lambda self: self.memory is not None)
    @rule(choice=st.integers(0, 100))
    def peer_evicts_from_disk(self, choice):
        """Another process removes a leaf: in a transaction, so between two others of the loop."""

        async def evict():
            spared = {ref.parent for ref, _ in self.memory.blocks.values()} | self.memory.pinned()
            leaves = sorted(key for key in self.memory.blocks if key not in spared)
            if leaves:
                del self.memory.blocks[leaves[choice % len(leaves)]]

        asyncio.run_coroutine_threadsafe(evict(), self.store._transfer._loop).result()

    @rule()
    def reopen(self):
        """Close, and open another store on the same disk: what it finds there must be right."""
        self.release_disk()
        for entry in list(self.held):
            self.give_back(entry)
        self.pins.clear()
        self.store.close(10.0)
        assert all(pin.is_settled for pin, _, _ in self.disk_pins)
        self.outliving = [pin for pin, _, _ in self.disk_pins]
        self.open_store()

    @invariant()
    def every_invariant_holds(self):
        if hasattr(self, "store"):
            assert self.store.check() == []

    @staticmethod
    def encode(tokens):
        return b"".join(token.to_bytes(4, "little") for token in tokens)


StoreMachine.TestCase.settings = settings(
    max_examples=max(1, NUM_STEPS // _STEPS_A_RUN),
    stateful_step_count=_STEPS_A_RUN,
    suppress_health_check=list(HealthCheck),
)
TestStoreMachine = StoreMachine.TestCase
