import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lru_oracle import batch_of, lru_hits

from kvstore.block import BlockLayout, BlockRef, BlockWrite, PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.errors import ConfigError, OutOfBlocksError
from kvstore.planning import CacheSetup, read_trace
from kvstore.planning.simulated_tiers import InstantTransfer, SimulatedDisk
from kvstore.planning.simulation import Simulation
from kvstore.planning.spool import Spool
from kvstore.planning.stack_distance import StackDistances
from kvstore.store import BlockStore
from kvstore.testing import FakeClock
from kvstore.tiers.host import HostPool

LAYOUT = BlockLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="float16")
# Prompts over three tokens: forests with much sharing, and requests larger than small caches.
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=25)


def prefix_ids(prompts) -> list[list[int]]:
    """Blocks of each prompt, one a token, numbered by the prefix they end."""
    keys: dict[tuple[int, ...], int] = {}
    return [
        [keys.setdefault(tuple(prompt[: end + 1]), len(keys)) for end in range(len(prompt))]
        for prompt in prompts
    ]


def simulated_hits(requests, setup: CacheSetup) -> list[Counter[str]]:
    with Simulation(setup) as simulation:
        hits = []
        for second, blocks in enumerate(requests):
            found = simulation.request(np.array(blocks, "<u4").tobytes(), float(second))
            hits.append(Counter())
            for tier, count in found:
                hits[-1][tier.value] += count
            assert simulation.store.check() == []
        return hits


def store_hits(requests, setup: CacheSetup) -> list[Counter[str]]:
    """The same requests through a store whose threads really copy."""
    clock = FakeClock()
    store = BlockStore(
        LAYOUT,
        bytes(32),
        HostPool(setup.device_blocks, LAYOUT.block_bytes),
        host_blocks=setup.host_blocks,
        disk=SimulatedDisk(setup.disk_blocks, DiskConfig()) if setup.disk_blocks else None,
        config=setup.config(),
        clock=clock,
    )
    store.publisher.stop()  # a simulated disk has no bytes to publish
    hits = []
    for blocks in requests:
        tokens = np.array(blocks[: setup.device_blocks], "<u4").tobytes()
        store.run_until_idle(10.0)
        while store.next_deadline() <= clock():
            store.run_until_idle(10.0)
        lookup = store.lookup(tokens, num_reusable=len(tokens) // 4)
        store.run_until_idle(10.0)
        hits.append(Counter(tier.value for tier in lookup.sources))
        lease = None
        while tokens and lease is None:
            try:
                lease = store.reserve(lookup, len(tokens) // 4)
            except OutOfBlocksError:
                store.run_until_idle(10.0)
        store.run_until_idle(10.0)
        if lease is not None:
            store.commit(lease, tokens, len(tokens) // 4)
            store.release(lease)
        store.poll()
        clock.advance(1.0)
    store.reset()
    store.close()
    return hits


@settings(max_examples=30)
@given(PROMPTS, st.integers(1, 12))
def test_simulated_lru_equals_the_curve_request_by_request(prompts, capacity):
    requests = prefix_ids(prompts)
    hits = [sum(each.values()) for each in simulated_hits(requests, CacheSetup(capacity))]
    batch = batch_of(requests)
    above = StackDistances().of(batch)
    assert hits == batch.per_request((above < capacity).astype(int)).tolist()
    assert hits == lru_hits(requests, capacity)


@pytest.mark.parametrize(
    "setup",
    [
        CacheSetup(200),
        CacheSetup(200, policy="slru"),
        CacheSetup(200, policy="s3-fifo"),
        CacheSetup(150, 300),
        CacheSetup(150, 0, 900),
        CacheSetup(150, 300, 900, write_policy="write_back"),
        CacheSetup(150, 300, 900, write_policy="min_hits"),
    ],
    ids=str,
)
def test_a_simulation_hits_where_a_store_with_real_transfers_hits(trace, setup):
    requests = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()[:50]]
    with Simulation(setup) as simulation:
        simulated = []
        for second, blocks in enumerate(requests):
            found = simulation.request(np.array(blocks, "<u4").tobytes(), 1000.0 + second)
            simulated.append(Counter())
            for tier, count in found:
                simulated[-1][tier.value] += count
    assert simulated == store_hits(requests, setup)


def test_a_host_tier_adds_its_blocks_to_the_cache():
    requests = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]
    assert sum(simulated_hits(requests, CacheSetup(4))[2].values()) == 0
    assert simulated_hits(requests, CacheSetup(4, 4))[2] == {"host": 4}
    assert simulated_hits(requests, CacheSetup(4, 0, 100))[2] == {"disk": 4}


def test_write_policies_write_what_they_say():
    requests = [[1, 2], [3, 4], [5, 6], [1, 2]]
    written = {}
    for policy in ("write_through", "write_back", "min_hits"):
        with Simulation(CacheSetup(10, 0, 100, write_policy=policy)) as simulation:
            for second, blocks in enumerate(requests):
                simulation.request(np.array(blocks, "<u4").tobytes(), float(second))
            written[policy] = simulation.written_blocks
    assert written == {"write_through": 6, "write_back": 0, "min_hits": 0}


def test_replayed_hits_are_weighed_by_the_tokens_of_their_blocks(trace):
    (batch,) = read_trace(trace)
    spool = Spool()
    spool.add(batch, sampler := StubSampler())
    ((numbered, tokens),) = spool.batches(sampler)
    with Simulation(CacheSetup(3000)) as simulation:
        replayed = simulation.replay(numbered, tokens)
    is_hit = StackDistances().of(batch) < 3000
    expected = batch.per_request(np.where(is_hit, batch.tokens_of_block(), 0))
    assert sum(replayed.tokens.values()).tolist() == expected.tolist()
    assert sum(replayed.blocks.values()).tolist() == batch.per_request(is_hit.astype(int)).tolist()


class StubSampler:
    """Everything is in the sample."""

    def of(self, batch):
        return batch, np.ones(len(batch.blocks), bool)


def ref(chain: str) -> BlockRef:
    """A block named by the letters of its prefix."""
    key = chain.encode().ljust(32, b".")
    return BlockRef(key, chain[:-1].encode().ljust(32, b"."), b"t" * 4, len(chain) - 1)


def run(job):
    with pytest.raises(StopIteration) as end:
        job.send(None)
    return end.value.value


def on_disk(disk: SimulatedDisk, chains: str) -> str:
    return " ".join(name for name in chains.split() if run(disk.probe([ref(name)])))


def put(disk: SimulatedDisk, chains: str) -> list[PutOutcome]:
    return run(disk.write([BlockWrite(ref(name), b"", b"", b"") for name in chains.split()]))


def test_the_simulated_disk_gives_up_the_ends_of_old_chains_first():
    disk = SimulatedDisk(10, DiskConfig(disk_high_watermark=0.6, disk_low_watermark=0.5))
    assert set(put(disk, "a ab abc")) == {PutOutcome.STORED}
    assert put(disk, "ab xy") == [PutOutcome.PRESENT, PutOutcome.ORPHAN]
    put(disk, "p pq pqr")
    run(disk.touch([ref(name).key for name in ("abc", "ab", "a")]))
    put(disk, "s")  # over the high watermark: two leave
    assert on_disk(disk, "a ab abc p pq pqr s") == "a ab abc p s"
    assert disk.num_written == 7


def test_the_simulated_disk_refuses_what_it_has_no_room_for():
    disk = SimulatedDisk(4, DiskConfig(disk_high_watermark=0.5, disk_low_watermark=0.5))
    assert set(put(disk, "a ab abc")) == {PutOutcome.FULL}
    assert put(disk, "a ab") == [PutOutcome.STORED] * 2
    assert put(disk, "abc") == [PutOutcome.FULL], "its ancestors are spared"


def test_the_simulated_disk_evicts_in_the_order_of_the_real_one(tmp_path):
    chains = ["a ab abc", "d de", "f fg fgh fghi", "ap apq"]
    names = [name for chain in chains for name in chain.split()]
    touched = [ref(name).key for name in ("fgh", "fg", "f", "ab", "a")]
    disk = SimulatedDisk(100, DiskConfig())
    config = DiskConfig(touch_interval_s=0.0)
    with DiskStore.open(tmp_path, capacity_bytes=64 << 20, config=config) as real:
        for chain in chains:
            put(disk, chain)
            writes = [BlockWrite(ref(name), bytes(32), b"", b"x") for name in chain.split()]
            assert set(real.put_group(writes)) == {PutOutcome.STORED}
        run(disk.touch(touched))
        real.touch(touched)

        def evict_really() -> None:
            with real._changes.ledger() as ledger:
                ledger.evict(1, ())

        def is_really_there(name: str) -> bool:
            return bool(real.probe([ref(name)]))

        simulated = victims(
            names, lambda: disk._evict(1, set()), lambda name: bool(on_disk(disk, name))
        )
        assert simulated == victims(names, evict_really, is_really_there)


def victims(names, evict, is_there) -> list[str]:
    """Which block each of so many evictions takes."""
    order = []
    for _ in names:
        evict()
        (gone,) = [name for name in names if name not in order and not is_there(name)]
        order.append(gone)
    return order


def test_an_instant_transfer_applies_outcomes_when_it_is_polled():
    applied = []
    transfer = InstantTransfer(
        HostPool(2, 4), None, host=None, disk=None, clock=lambda: 5.0, block_bytes=4
    )
    transfer.promote([0], [1], applied.append)
    assert (transfer.num_pending, applied) == (1, [])
    assert transfer.poll() == 1
    assert (transfer.num_pending, applied, transfer.finished_at) == (0, [None], 5.0)


@pytest.mark.parametrize(
    "values",
    [{"device_blocks": 0}, {"policy": "mru"}, {"write_policy": "never"}, {"host_blocks": -1}],
    ids=str,
)
def test_a_setup_that_cannot_be_is_refused(values):
    with pytest.raises(ConfigError):
        CacheSetup(**{"device_blocks": 10} | values)
