"""Random operations on a store with tiny tiers, compared with what a cache must never do.

The model is a rule, not a second cache: whatever is served, and after each step whatever any tier
holds, must be the bytes that belong to the tokens, and every invariant of ``store.check()`` holds.
Meanwhile other processes change the same disk, and copies of a device like CUDA land late.
"""

import asyncio
import contextlib
import math
import os
import random
from dataclasses import dataclass, replace

import pytest
import torch
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

from kvstore.block import BlockLayout, BlockWrite, TierName
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
from kvstore.hashing import chain_refs, chain_seed, namespace_id, salt_digest
from kvstore.index import NONE, VALID
from kvstore.lease import Lease, Pin
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, FakeEngine, FaultyDisk, MemoryDisk
from kvstore.testing.cuda import FakeCudaRuntime
from kvstore.tiers.device import CudaCopier, CudaPool
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
NAMESPACE = namespace_id({})
NUM_STEPS = int(os.environ.get("KVSTORE_STATEFUL_STEPS", "2400"))
_STEPS_A_RUN = 40


@pytest.fixture(autouse=True)
def parts_of_few_blocks(monkeypatch):
    """What goes in parts by its size does so here, with blocks of 32 bytes; nothing sleeps."""
    for name in ("tiers.runs.BATCH_BYTES", "tiers.ring.BATCH_BYTES", "transfer._SLICE_BYTES"):
        monkeypatch.setattr(f"kvstore.{name}", 3 * LAYOUT.block_bytes)
    monkeypatch.setattr("kvstore.promotion._FIRST_PART_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr("kvstore.tiers.lane._PAUSE_S", 0)


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
    salt: str
    num_computed: int = 0


class StoreMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(
        device=st.integers(8, 12),
        host=st.sampled_from([0, 1, 2, 9]),
        cuda=st.none() | st.integers(0, 100),
        has_disk=st.sampled_from([True, True, True, False]),
        capacity=st.sampled_from([6, 1000]),
        config=st.builds(
            StoreConfig,
            write_policy=st.sampled_from(
                ["write_behind", "write_through", "write_back", "min_hits"]
            ),
            load_policy=st.sampled_from(["auto", "auto", "always", "never"]),
            policy=st.sampled_from(["lru", "slru", "s3-fifo"]),
            min_partial_tokens=st.sampled_from([1, 2]),
            min_hits=st.sampled_from([1, 2]),
            reuse_unit_blocks=st.sampled_from([1, 1, 1, 2]),
            staging_bytes=st.sampled_from([1, 5 * LAYOUT.block_bytes]),
            group_commit_bytes=st.sampled_from([1, 3 * LAYOUT.block_bytes, 16 << 20]),
            write_bytes_per_s=st.sampled_from([float(1 << 30), math.inf]),
        ),
    )
    def open(self, device, host, cuda, has_disk, capacity, config):
        """``cuda``: the order in which its streams get to run, None for memory of the host."""
        self.sizes, self.cuda, self.config = (device, host), cuda, config
        self.clock = FakeClock()
        self.memory = MemoryDisk(capacity, clock=self.clock) if has_disk else None
        self.held: list[Entry] = []
        self.pins: list[Pin] = []
        self.disk_pins: list[tuple[Pin, list[bytes], float]] = []  # with their blocks and their end
        self.outliving: list[Pin] = []  # their store is closed; the blocks stay pinned
        self.content: dict[bytes, bytes] = {}  # what a block must hold, by its key
        self.open_store()

    def open_store(self):
        device, host = self.sizes
        self.disk = FaultyDisk(self.memory) if self.memory is not None else None
        self.runtime = None
        if self.cuda is None:
            pool, on_device = HostPool(device, LAYOUT.block_bytes), {}
            self.copier = FaultyCopier(pool)
        else:
            self.runtime = FakeCudaRuntime(self.cuda)
            pool = CudaPool(device, LAYOUT, torch.device("cpu"))
            self.copier = CudaCopier(pool, runtime=self.runtime)
            rows = pool.tensor.view(device, -1).view(torch.uint8).numpy()
            on_device = {"rows": rows, "submit": self.runtime.submit}
        self.store = BlockStore(
            LAYOUT,
            NAMESPACE,
            pool,
            copier=self.copier,
            host_blocks=host,
            disk=self.disk,
            config=self.config,
            clock=self.clock,
        )
        self.engine = FakeEngine(self.store, **on_device)

    @property
    def is_held(self):
        """Whether something that was begun may not end before it is released."""
        streams = self.runtime.streams if self.runtime else ()
        return bool(self.disk and self.disk.held) or any(stream.is_held for stream in streams)

    def let_go(self):
        if self.disk is not None:
            self.disk.held, self.memory.is_checking = frozenset(), False
            self.disk.meanwhile = lambda refs: None
        for stream in self.runtime.streams if self.runtime else ():
            stream.is_held = False

    def run_until_idle(self):
        if not self.is_held:
            assert self.store.run_until_idle(60.0)

    def await_answer(self, lookup):
        """Disk has said what it holds of a prefix, unless that is held up. Other work goes on."""
        if self.disk is None or "probe" in self.disk.held:
            return
        self.store.poll()
        while not lookup.is_ready:
            self.store._transfer.wait(10.0)
            self.store.poll()

    def note(self, tokens, salt):
        """Write down what the blocks of these tokens must hold; returns them."""
        refs = chain_refs(chain_seed(NAMESPACE, salt), self.encode(tokens), 4 * LAYOUT.block_size)
        for ref in refs:
            if ref.key not in self.content:
                end = (ref.depth + 1) * LAYOUT.block_size
                payload = self.engine.payload(salt_digest(salt), tokens[:end])
                self.content[ref.key] = payload
        return refs

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.let_go()
        for entry in list(self.held):
            self.give_back(entry)
        self.run_until_idle()
        assert self.store.check() == []
        used = self.store.device.capacity - self.store.device.num_free
        assert used == sum(
            self.store.index.device[slot] >= 0 for slot in self.store.index.used_slots()
        )
        self.close()

    def close(self):
        assert self.store.flush(60.0)
        self.store.close(60.0)
        if self.runtime is not None:
            self.runtime.run()
            assert self.runtime.locked == {}
            assert self.runtime.failures == []
        self.all_bytes_are_right()

    @rule(
        target=leases,
        tokens=PROMPTS,
        salt=SALTS,
        is_patient=st.booleans(),
        chunk=st.sampled_from([None, 1, 3]),
    )
    def acquire(self, tokens, salt, is_patient, chunk):
        """Reserve without waiting for the transfers it needs, or even for what disk has."""
        return self.start(tokens, salt, is_patient=is_patient, chunk=chunk)

    def start(self, tokens, salt, *, is_patient=True, chunk=None):
        lookup = self.store.lookup(self.encode(tokens), salt)
        if not is_patient:
            self.store.stop_probing(lookup)
        self.await_answer(lookup)
        self.note(tokens, salt)
        entry = Entry(None, list(tokens), salt)
        if lookup.is_ready:
            with contextlib.suppress(OutOfBlocksError):
                entry.lease = self.store.reserve(lookup, len(tokens), chunk_tokens=chunk)
                self.held.append(entry)
        return entry

    @rule(tokens=PROMPTS, salt=SALTS)
    def serve(self, tokens, salt):
        """A whole request, as far as transfers allow."""
        entry = self.start(tokens, salt)
        self.run_until_idle()
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
        for wanted in (tokens + more, tokens):
            with contextlib.suppress(OutOfBlocksError):
                self.store.extend(lease, len(wanted))
                break
        else:
            return
        self.note(wanted, entry.salt)
        entry.tokens = wanted
        start = max(entry.num_computed, lease.num_cached_tokens(LAYOUT.block_size))
        self.engine.compute(lease, wanted, start, commits=commits)
        entry.num_computed = len(wanted)

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
            return Entry(None, [], "")
        entry = readable[choice % len(readable)]
        self.grow(entry, [], commits=commits)
        if not entry.num_computed:
            return Entry(None, [], "")
        num_tokens = max(0, entry.num_computed - fewer)
        fork = Entry(None, entry.tokens[:num_tokens], entry.salt, num_tokens)
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
        """Wait no longer for blocks that are on their way or did not come: reserve again."""
        if entry in self.held and (not entry.lease.is_ready or entry.lease.is_provisional):
            lookup = entry.lease.lookup
            if not entry.lease.is_ready:
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
        self.await_answer(lookup)
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

    @rule(seconds=st.sampled_from([0.0, 0.0, 3.0, 100.0]), is_urgent=st.booleans())
    def poll(self, seconds, is_urgent):
        """Time passes, and what that makes due is begun."""
        self.clock.advance(seconds)
        if is_urgent:
            self.store.urge()
        self.store.poll()

    @rule(busy=st.booleans())
    def settle(self, busy):
        self.store.poll(model_is_busy=busy)
        self.run_until_idle()

    @rule(tier=st.sampled_from([None, TierName.DEVICE, TierName.HOST]), salt=st.none() | SALTS)
    def reset(self, tier, salt):
        self.store.reset(tier, salt)

    @rule(num_tokens=st.sampled_from([1, 16]), seconds=st.sampled_from([1e-9, 1.0]))
    def measure(self, num_tokens, seconds):
        """What is computed costs nothing, or far more than a load."""
        self.store.cost.observe_step(num_tokens, 0.0, seconds)
        self.store.measure()

    @rule(tokens=PROMPTS, salt=SALTS)
    def look(self, tokens, salt):
        lookup = self.store.lookup(self.encode(tokens), salt, peek=True)
        self.store.weigh(lookup)
        self.store.continuations(lookup)
        self.store.under_other_salts(lookup)
        assert not self.store.has_lost(lookup)
        assert self.store.num_reusable_blocks(lookup) <= len(lookup.keys)

    @precondition(lambda self: self.disk is not None)
    @rule(names=st.sets(st.sampled_from(["probe", "read", "write", "clear", "pin"]), max_size=3))
    def hold_disk(self, names):
        """Some of what is asked of it waits, the rest goes on: it has a thread that writes, and
        others. What waited before and is not among it ends."""
        self.disk.held = frozenset(names)

    @precondition(lambda self: self.disk is not None)
    @rule(is_checking=st.booleans())
    def check_disk(self, is_checking):
        """Its file is in doubt: it takes nothing for now."""
        self.memory.is_checking = is_checking

    @precondition(lambda self: self.disk is not None)
    @rule(
        reads_fail=st.booleans(),
        chance=st.integers(0, 30),
        capacity=st.sampled_from([3, 6, 1000]),
        flipped=st.none() | st.integers(0, 100),
    )
    def harm_disk(self, reads_fail, chance, capacity, flipped):
        error = CorruptBlockError("flipped", reason="checksum") if reads_fail else None
        self.disk.fail_reads = lambda ref: error if ref.depth % 2 else None
        self.disk.is_broken = self.disk.is_broken or chance == 17
        self.memory.capacity = capacity

        async def flip():
            if self.memory.blocks and flipped is not None:
                key = sorted(self.memory.blocks)[flipped % len(self.memory.blocks)]
                ref, payload = self.memory.blocks[key]
                self.memory.blocks[key] = ref, bytes([payload[0] ^ 1]) + payload[1:]

        self.as_peer(flip)

    @precondition(lambda self: self.runtime is not None)
    @rule(names=st.sets(st.sampled_from(["compute", "urgent", "patient"]), max_size=2))
    def hold_streams(self, names):
        """The device does not get to what these have to do."""
        for stream in self.runtime.streams:
            stream.is_held = stream.name in names

    @precondition(lambda self: self.store.host is not None and self.runtime is None)
    @rule(chance=st.integers(0, 30))
    def break_host(self, chance):
        self.copier.is_broken = self.copier.is_broken or chance == 17

    def as_peer(self, change):
        """Another process changes the disk: in a transaction, so between two others of the loop,
        and without our being told."""

        async def run():
            watcher, self.memory._watcher = self.memory._watcher, lambda removed: None
            await change()
            self.memory._watcher = watcher

        asyncio.run_coroutine_threadsafe(run(), self.store._transfer._loop).result()

    @precondition(lambda self: self.memory is not None)
    @rule(choice=st.integers(0, 100), count=st.integers(1, 6))
    def peer_evicts(self, choice, count):
        async def evict():
            for _ in range(count):
                leaves = sorted(filter(self.may_go, self.memory.blocks))
                if leaves:
                    del self.memory.blocks[leaves[choice % len(leaves)]]

        self.as_peer(evict)

    @precondition(lambda self: self.disk is not None)
    @rule(seed=st.none() | st.integers(0, 100))
    def peer_is_in_our_way(self, seed):
        """Another process evicts just what we are about to read, or to continue."""
        chance = random.Random(seed)

        def evict(refs):
            for ref in reversed(refs):
                for key in (ref.key, ref.parent):
                    if key in self.memory.blocks and self.may_go(key) and chance.random() < 0.5:
                        del self.memory.blocks[key]

        self.disk.meanwhile = evict if seed is not None else lambda refs: None

    def may_go(self, key):
        """Whether disk may evict this block."""
        has_child = any(ref.parent == key for ref, _ in self.memory.blocks.values())
        return not has_child and key not in self.memory.pinned()

    @precondition(lambda self: self.memory is not None)
    @rule(tokens=PROMPTS, salt=SALTS, does=st.sampled_from(["write", "pin", "release", "clear"]))
    def peer_changes(self, tokens, salt, does):
        refs = self.note(tokens, salt)
        keys, owner = [ref.key for ref in refs], (NAMESPACE, salt_digest(salt))

        async def change():
            if does == "write":
                writes = [BlockWrite(ref, *owner, self.content[ref.key]) for ref in refs]
                await self.memory.write(writes)
            elif does == "pin":
                with contextlib.suppress(CapacityError):
                    await self.memory.pin(keys, None, b"a peer's")
            elif does == "release":
                await self.memory.release(keys[-1], b"a peer's")
            else:
                await self.memory.clear(chain_seed(NAMESPACE, salt))

        self.as_peer(change)

    @rule(mode=st.sampled_from(["rw", "rw", "ro"]))
    def reopen(self, mode):
        """Close, and open another store on the same disk: what it finds there must be right."""
        self.let_go()
        for entry in list(self.held):
            self.give_back(entry)
        self.pins.clear()
        self.close()
        self.config = replace(self.config, disk_mode=mode)
        assert all(pin.is_settled for pin, _, _ in self.disk_pins)
        self.outliving = [pin for pin, _, _ in self.disk_pins]
        self.open_store()

    @invariant()
    def every_invariant_holds(self):
        if hasattr(self, "store"):
            assert self.store.check() == []
            assert self.runtime is None or self.runtime.failures == []

    @invariant()
    def all_bytes_are_right(self):
        """In every tier, of every block that may be served."""
        if not hasattr(self, "store"):
            return
        index, content = self.store.index, self.content
        on_device = {
            index.device[slot]: content[index.key[slot]]
            for slot in index.used_slots()
            if index.device[slot] != NONE and index.loading[slot] == VALID
        }
        self.engine.check_blocks(on_device)
        for slot in index.used_slots():
            if index.host[slot] != NONE:
                assert bytes(self.store.host.payload(index.host[slot])) == content[index.key[slot]]
        for key, (ref, payload) in self.memory.good().items() if self.memory is not None else ():
            assert payload == content[key], "disk has wrong bytes with a right checksum"
            assert ref.depth == 0 or ref.parent in self.memory.blocks, "an orphan is on disk"

    @staticmethod
    def encode(tokens):
        return b"".join(token.to_bytes(4, "little") for token in tokens)


StoreMachine.TestCase.settings = settings(
    max_examples=max(1, NUM_STEPS // _STEPS_A_RUN),
    stateful_step_count=_STEPS_A_RUN,
    suppress_health_check=list(HealthCheck),
)
TestStoreMachine = StoreMachine.TestCase
