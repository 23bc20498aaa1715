"""Load or recompute, through the store: what is measured, and what a request gets."""

import pytest

from kvstore.block import TierName
from kvstore.config import StoreConfig
from kvstore.costs.cost import CostModel, LoadEstimate, LoadReason
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk

DEVICE, HOST, DISK = TierName.DEVICE, TierName.HOST, TierName.DISK
PROMPT = [token for block in range(100) for token in [block] * 4] + [9]
OTHER = [token for block in range(100, 200) for token in [block] * 4] + [9]
NUM_BLOCKS = 100
WELL, SLOW = 1e6, 100.0  # bytes a second: 13 ms and 128 s for the prompt


class Scene:
    """A store whose disk can be slow, in a time that only loads and steps make pass.

    A step takes 1 ms a token: 0.4 s for the prompt.
    """

    def __init__(
        self, make_engine, *, policy="auto", uniform=lambda: 0.5, steps_are_measured=True, **options
    ):
        self.clock = FakeClock()
        self.cost = CostModel(policy, chunk_tokens=64, clock=self.clock, uniform=uniform)
        self.cost.start_from(DISK, LoadEstimate(1e-6, WELL))
        self.steps_are_measured = steps_are_measured
        self.disk = FaultyDisk(MemoryDisk())
        self.disk.bytes_per_s, self.disk.sleep = WELL, self.pass_time
        self.engine = make_engine(
            150,
            disk=self.disk,
            cost=self.cost,
            clock=self.clock,
            config=StoreConfig(load_policy=policy),
            **options,
        )
        self.store = self.engine.store
        for prompt in (PROMPT, OTHER):
            self.ask(prompt)
            assert self.store.flush(10.0)

    async def pass_time(self, seconds):
        self.clock.advance(seconds)

    def ask(self, token_ids):
        """One request; returns its decision and how many blocks were not computed."""
        lease = self.engine.start(token_ids)
        num_computed = len(token_ids) - 4 * lease.num_cached
        for start in range(4 * lease.num_cached, len(token_ids), 64):
            num_tokens = min(64, len(token_ids) - start)
            context = num_tokens * start + num_tokens * (num_tokens - 1) / 2
            self.clock.advance(0.001 * num_tokens)
            if self.steps_are_measured:
                self.cost.observe_step(num_tokens, context, 0.001 * num_tokens)
        self.engine.compute(lease, token_ids)
        assert num_computed == len(token_ids) - 4 * lease.num_cached
        num_cached = lease.num_cached
        self.store.release(lease)
        return lease.lookup.decision, num_cached

    def ask_from_disk(self):
        self.store.reset()
        return self.ask(PROMPT)


def test_the_verdict_flips_when_the_disk_is_slow_and_recovers_when_it_does(make_engine):
    draws = iter(([0.5] * 31 + [0.0]) * 10)  # every 32nd request that would compute tries
    scene = Scene(make_engine, uniform=lambda: next(draws))
    assert scene.ask_from_disk()[1] == NUM_BLOCKS

    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()  # pays for finding out
    verdicts = [scene.ask_from_disk() for _ in range(20)]
    assert {decision.reason for decision, _ in verdicts} == {LoadReason.COMPUTE}
    assert {num_cached for _, num_cached in verdicts} == {0}

    scene.disk.bytes_per_s = WELL
    cached = [scene.ask_from_disk()[1] for _ in range(40)]
    recovered = cached.index(NUM_BLOCKS)
    assert recovered <= 32
    assert set(cached[:recovered]) == {0}
    assert set(cached[recovered:]) == {NUM_BLOCKS}


def test_the_first_request_after_a_minute_finds_out_that_the_disk_recovered(make_engine):
    scene = Scene(make_engine)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    assert scene.ask_from_disk()[1] == 0
    scene.disk.bytes_per_s = WELL
    assert scene.ask_from_disk()[1] == 0
    scene.clock.advance(60)
    decision, num_cached = scene.ask_from_disk()
    assert (decision.reason, num_cached) == (LoadReason.LOAD, NUM_BLOCKS)


def test_a_disk_that_is_still_slow_costs_the_request_that_tries_it_little(make_engine):
    scene = Scene(make_engine)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    scene.clock.advance(60)
    reads, before = scene.disk.inner.num_reads, scene.clock.now
    decision, num_cached = scene.ask_from_disk()
    assert scene.disk.inner.num_reads - reads == 1
    assert (decision.reason, num_cached) == (LoadReason.COMPUTE, 1)
    assert scene.clock.now - before < 0.401 + 1.29  # all computed, one block read


def test_loading_is_tried_with_nothing_known_of_computing(make_engine):
    scene = Scene(make_engine, steps_are_measured=False)
    scene.disk.bytes_per_s = SLOW
    assert scene.ask_from_disk()[0].reason is LoadReason.UNFITTED


@pytest.mark.parametrize(("policy", "num_cached"), [("always", NUM_BLOCKS), ("never", 0)])
def test_a_fixed_policy_does_not_measure(make_engine, policy, num_cached):
    scene = Scene(make_engine, policy=policy)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    assert scene.ask_from_disk()[1] == num_cached
    assert scene.store.stats().load_decisions.keys() <= {policy, "nothing_to_load"}


def test_blocks_on_the_device_are_used_behind_a_cut(make_engine):
    """A verdict to compute is about loading: what somebody else computes meanwhile is shared."""
    scene = Scene(make_engine)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    scene.store.reset()
    lookup = scene.engine.look_up(PROMPT)
    assert scene.store.num_reusable_blocks(lookup) == 0
    scene.ask(PROMPT)
    assert scene.store.num_reusable_blocks(lookup) == NUM_BLOCKS


def test_a_request_that_computes_does_not_wait_for_a_load_of_the_same_blocks(make_engine):
    scene = Scene(make_engine)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    scene.store.reset()
    lookup, patient = (scene.engine.look_up(PROMPT) for _ in range(2))
    scene.disk.is_held = True
    scene.cost.policy = "always"
    loading = scene.store.reserve(patient, len(PROMPT))
    scene.cost.policy = "auto"
    num_reusable = scene.store.num_reusable_blocks(lookup)
    scene.disk.is_held = False
    scene.store.run_until_idle(10.0)
    scene.store.release(loading)
    assert (loading.num_cached, num_reusable) == (NUM_BLOCKS, 0)


def test_what_others_load_delays_a_request_but_its_own_blocks_under_way_do_not(make_engine):
    scene = Scene(make_engine)
    scene.disk.bytes_per_s = 400_000.0  # 32 ms for the prompt
    scene.ask_from_disk()
    scene.store.reset()
    scene.disk.is_held = True
    same, other = (scene.engine.look_up_memory(prompt) for prompt in (PROMPT, OTHER))
    for lookup in (same, other):
        lookup.on_disk = set(lookup.keys)
    first = scene.store.reserve(same, 4)
    assert first.num_loading == NUM_BLOCKS
    again = scene.engine.look_up_memory(PROMPT)
    scene.store.num_reusable_blocks(again)
    scene.store.num_reusable_blocks(other)
    scene.disk.is_held = False
    scene.store.run_until_idle(10.0)
    scene.store.release(first)
    assert other.decision.load_all_s == pytest.approx(2 * again.decision.load_all_s, rel=0.1)


def test_decisions_are_counted(make_engine):
    scene = Scene(make_engine)
    scene.ask_from_disk()
    scene.ask(PROMPT)
    scene.disk.bytes_per_s = SLOW
    scene.ask_from_disk()
    scene.ask_from_disk()
    decided = scene.store.stats().load_decisions
    assert {name: decided[name] for name in ("load", "compute")} == {"load": 2, "compute": 1}
    assert decided["nothing_to_load"] == 3  # the prompts' first requests found nothing


def test_a_load_that_ends_while_the_owner_is_busy_is_measured_by_its_own_end(make_engine):
    scene = Scene(make_engine)
    scene.store.reset()
    lease = scene.store.reserve(scene.engine.look_up(PROMPT), len(PROMPT))
    while not scene.store.has_events():
        pass
    scene.clock.advance(100)  # a long step of the model
    scene.store.run_until_idle(10.0)
    assert scene.cost.load_estimate(DISK).seconds(NUM_BLOCKS * 128) < 1
    scene.store.release(lease)
