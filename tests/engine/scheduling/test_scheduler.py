"""Who is computed next, without a model: a step is a commit, and a sampled token is a 7."""

import pytest

from engine.sampling.sampler import SampledToken
from engine.sampling.sampling_params import SamplingParams
from engine.scheduling.chunking import AsFits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import CacheOptions, Sequence, SequenceState
from kvstore.block import BlockLayout
from kvstore.config import StoreConfig
from kvstore.hashing import namespace_id
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk
from kvstore.tiers.host import HostPool

LAYOUT = BlockLayout(num_layers=1, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")


class World:
    def __init__(self, device_blocks=256, disk=None, **settings):
        self.clock = FakeClock()
        self.store = BlockStore(
            LAYOUT,
            namespace_id({}),
            HostPool(device_blocks, LAYOUT.block_bytes),
            disk=disk,
            config=StoreConfig(load_policy="always"),
            clock=self.clock,
        )
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "use_cache": True} | settings
        self.scheduler = Scheduler(self.store, clock=self.clock, chunking=AsFits(), **settings)
        self.computed = {}  # tokens by sequence

    def add(self, token_ids, max_tokens=1):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        sequence = Sequence(
            request_id="",
            index=0,
            params=params,
            cache=CacheOptions(),
            token_ids=list(token_ids),
            num_prompt=len(token_ids),
            max_len=len(token_ids) + max_tokens,
            eos_token_ids=frozenset(),
            detokenizer=None,
            generator=None,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        self.store.poll()
        batch = self.scheduler.schedule()
        for each in batch:
            sequence = each.sequence
            self.computed[sequence] = self.computed.get(sequence, 0) + each.num_tokens
            self.scheduler.commit(each)
            if sequence.num_uncomputed == 0:
                sequence.append(SampledToken(7))
                if sequence.finish_reason:
                    self.scheduler.finish(sequence)
        return {each.sequence: each.num_tokens for each in batch}

    def run(self, *sequences):
        """Steps until these have ended; the order in which all sequences began."""
        began = {}
        while not all(each.state is SequenceState.FINISHED for each in sequences):
            began |= dict.fromkeys(self.step())
        return list(began)


@pytest.fixture
def make_world():
    worlds = []

    def make(**settings):
        worlds.append(World(**settings))
        return worlds[-1]

    yield make
    for world in worlds:
        assert not world.scheduler.has_work
        assert not world.scheduler._being_computed
        assert not world.scheduler.waiting._files
        assert world.store.check() == []
        world.store.close(10.0)


def prompt(number, num_tokens=8):
    """Shares no block with another number's."""
    return [100 + number] * num_tokens


def test_a_long_prefill_delays_no_decoding_sequence(make_world):
    world = make_world()
    decoding = [world.add(prompt(i, 3), max_tokens=12) for i in range(2)]
    world.step()
    long = world.add(range(1000, 1145))
    num_chunks = 0
    while long.finish_reason is None:
        computed = world.step()
        assert [computed[each] for each in decoding] == [1, 1]
        num_chunks += 1
    assert num_chunks > 10
    world.run(*decoding)


def test_requests_begin_in_the_order_they_came(make_world):
    world = make_world(max_num_seqs=1)
    sequences = [world.add(prompt(i)) for i in range(5)]
    assert world.run(*sequences) == sequences


@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix"])
def test_a_common_prefix_in_one_batch_is_computed_once(make_world, count, policy):
    """One computes it; the others wait for its blocks, while other prompts run."""
    world = make_world(max_num_seqs=16, policy=policy)
    document = list(range(1000, 1080))
    asking = [world.add([*document, 2000 + i]) for i in range(count)]
    other = world.add(prompt(1))
    world.run(*asking, other)
    assert sum(world.computed[each] for each in asking) == 80 + count
    assert world.computed[other] == 8


def test_who_waits_for_a_prefix_goes_on_when_nobody_computes_it_any_more(make_world):
    world = make_world()
    document = list(range(1000, 1080))
    first, second = (world.add([*document, 2000 + i]) for i in range(2))
    world.step()
    assert second not in world.step()
    world.scheduler.finish(first)
    assert second in world.step()
    world.run(second)


def test_the_longest_cached_prefix_is_next(make_world):
    world = make_world(max_num_seqs=1, policy="longest_prefix")
    world.run(world.add(prompt(1, 40)))
    world.run(world.add(prompt(2, 20)))
    miss, short, long = world.add(prompt(3)), world.add(prompt(2, 21)), world.add(prompt(1, 41))
    assert world.run(miss, short, long) == [long, short, miss]


def test_a_prefix_that_is_computed_meanwhile_counts(make_world):
    world = make_world(max_num_seqs=1, policy="longest_prefix")
    running = world.add(prompt(1, 40))
    world.step()
    miss, hit = world.add(prompt(2, 40)), world.add(prompt(1, 60))
    assert world.run(running, miss, hit)[-2:] == [hit, miss]


def test_an_endless_flow_of_hits_starves_nobody(make_world):
    """A hit of 40 tokens is worth 4 seconds of waiting here: so long, and no longer, later ones
    overtake."""
    world = make_world(max_num_seqs=1, policy="longest_prefix", ageing_tokens_per_s=10.0)
    world.run(world.add(prompt(1, 40)))
    miss, hits, began_at = world.add(prompt(2)), [], world.clock()
    while miss not in world.computed:
        hits.append(world.add([*prompt(1, 40), 1000 + len(hits)]))
        world.step()
        world.clock.advance(0.5)
    assert 4.0 <= world.clock() - began_at <= 5.0
    world.run(miss, *hits)


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix"])
def test_a_request_that_waits_for_disk_blocks_nobody(make_world, policy):
    memory, cached = MemoryDisk(), prompt(1, 20)
    writer = make_world(disk=memory)
    writer.run(writer.add(cached))
    writer.store.flush(10.0)
    disk = FaultyDisk(memory)
    world = make_world(disk=disk, policy=policy)
    disk.is_held = True
    waiting = world.add([*cached, 5])
    world.run(world.add(prompt(2, 3)))
    assert waiting.state is SequenceState.PROBING
    disk.is_held = False
    world.store.run_until_idle(10.0)  # the probe ends
    disk.is_held = True  # the read does not
    world.step()
    assert waiting.state is SequenceState.PROMOTING
    world.run(world.add(prompt(3, 3)))
    assert waiting.state is SequenceState.PROMOTING
    disk.is_held = False
    world.run(waiting)
    assert world.computed[waiting] == 1


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix"])
def test_a_step_costs_the_same_however_many_wait(make_world, monkeypatch, policy):
    """Thousands wait, a third of them for one prefix: each is looked up once, and looked at only
    when something has changed for it."""
    world = make_world(max_num_seqs=8, max_num_batched_tokens=512, policy=policy)
    calls = {"lookup": 0, "num_reusable_blocks": 0}

    def count(name):
        method = getattr(world.store, name)

        def counted(*arguments, **keywords):
            calls[name] += 1
            return method(*arguments, **keywords)

        monkeypatch.setattr(world.store, name, counted)

    for name in calls:
        count(name)
    document = list(range(1000, 1032))
    sequences = [
        world.add([*document, 5000 + i] if i % 3 == 0 else prompt(5000 + i, 5)) for i in range(4000)
    ]
    most = 0
    while world.scheduler.has_work:
        before = calls["lookup"] + calls["num_reusable_blocks"]
        world.step()
        most = max(most, calls["lookup"] + calls["num_reusable_blocks"] - before)
    assert all(each.finish_reason for each in sequences)
    assert calls["lookup"] == 4000
    assert calls["num_reusable_blocks"] <= 16_000
    assert most <= 100


def test_an_aborted_request_leaves_the_queue(make_world):
    world = make_world(max_num_seqs=1)
    running, aborted, last = (world.add(prompt(i), max_tokens=4) for i in range(3))
    world.step()
    world.scheduler.finish(aborted)
    assert world.run(running, last) == [running, last]
    assert aborted not in world.computed
