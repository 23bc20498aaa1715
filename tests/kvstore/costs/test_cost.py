import pytest

from kvstore.block import TierName
from kvstore.costs.cost import CostModel, LoadEstimate, LoadReason
from kvstore.testing import FakeClock

DEVICE, HOST, DISK = TierName.DEVICE, TierName.HOST, TierName.DISK
BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 20
SECOND_OF_BLOCKS = 1000  # blocks that the tests' disk reads in a second when it is well


class Machine:
    """A machine with known costs, and a model that learns them. Time is the model's clock."""

    def __init__(self, policy="auto", uniform=lambda: 0.5):
        self.clock = FakeClock()
        self.cost = CostModel(policy, chunk_tokens=512, clock=self.clock, uniform=uniform)
        self.cost.start_from(DISK, LoadEstimate(0.001, SECOND_OF_BLOCKS * BLOCK_BYTES))
        self.disk_latency_s = 0.001
        self.disk_bytes_per_s = float(SECOND_OF_BLOCKS * BLOCK_BYTES)
        self.step_s, self.token_s, self.context_s = 0.01, 0.0001, 1e-8
        self.num_probes = 0

    def compute(self, num_tokens, prefix=0):
        """One prefill step."""
        context = num_tokens * prefix + num_tokens * (num_tokens - 1) / 2
        seconds = self.step_s + self.token_s * num_tokens + self.context_s * context
        self.clock.advance(seconds)
        self.cost.observe_step(num_tokens, context, seconds)

    def prefill(self, num_tokens, start=0):
        for prefix in range(start, num_tokens, 512):
            self.compute(min(512, num_tokens - prefix), prefix)

    def load(self, num_blocks):
        num_bytes = num_blocks * BLOCK_BYTES
        seconds = self.disk_latency_s + num_bytes / self.disk_bytes_per_s
        self.clock.advance(seconds)
        self.cost.observe_load(DISK, num_bytes, seconds)

    def choose(self, sources, **options):
        return self.cost.choose(
            sources, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, **options
        )

    def request(self, num_blocks):
        """A whole request for a prefix on disk: decides, then does what was decided."""
        decision = self.choose([DISK] * num_blocks)
        probed = decision.cut_blocks if decision.reason is LoadReason.PROBE else 0
        if probed:
            self.load(probed)
            self.num_probes += 1
            sources = [DEVICE] * probed + [DISK] * (num_blocks - probed)
            decision = self.choose(sources, may_probe=False)
        if decision.cut_blocks > probed:
            self.load(decision.cut_blocks - probed)
        self.prefill(num_blocks * BLOCK_TOKENS, decision.cut_blocks * BLOCK_TOKENS)
        return decision


@pytest.fixture
def machine():
    """Has computed a long prompt, and its disk is well."""
    machine = Machine()
    machine.prefill(16384)
    machine.load(100)
    return machine


# ---- the estimates -------------------------------------------------------------------------------


def test_latency_and_bandwidth_are_found_from_loads_of_different_size():
    machine = Machine()
    machine.disk_latency_s, machine.disk_bytes_per_s = 0.5, 1e7
    for num_blocks in (1, 100, 4, 30) * 3:
        machine.load(num_blocks)
    estimate = machine.cost.load_estimate(DISK)
    assert estimate.latency_s == pytest.approx(0.5, rel=0.1)
    assert estimate.bytes_per_s == pytest.approx(1e7, rel=0.1)


def test_loads_of_one_size_are_predicted_for_that_size():
    machine = Machine()
    machine.disk_bytes_per_s /= 100
    machine.load(64)
    num_bytes = 64 * BLOCK_BYTES
    measured = machine.disk_latency_s + num_bytes / machine.disk_bytes_per_s
    predicted = machine.cost.load_estimate(DISK).seconds(num_bytes)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_compute_is_found_from_steps_of_different_size_and_context(machine):
    for num_tokens, prefix in ((20, 8192), (100, 0), (512, 4096), (16, 100)):
        machine.compute(num_tokens, prefix)
    estimate = machine.cost.compute_estimate()
    assert estimate.step_s == pytest.approx(machine.step_s, rel=0.02)
    assert estimate.token_s == pytest.approx(machine.token_s, rel=0.02)
    assert estimate.context_s == pytest.approx(machine.context_s, rel=0.02)


def test_many_small_steps_do_not_wash_out_what_large_ones_told(machine):
    for step in range(2000):
        machine.step_s = 0.01 + 0.005 * (step % 3)  # noise, larger than what 20 tokens add
        machine.compute(20, 4000 + step)
    estimate = machine.cost.compute_estimate()
    predicted = estimate.seconds(0, 16384, 512)
    actual = 32 * 0.01 + 16384 * machine.token_s + 16384**2 / 2 * machine.context_s
    assert predicted == pytest.approx(actual, rel=0.1)


def test_one_slow_step_is_forgotten_with_the_next_of_its_size(machine):
    before = machine.cost.compute_estimate().seconds(0, 4096, 512)
    context = 512 * 511 / 2
    machine.cost.observe_step(512, context, 30.0)  # a kernel was compiled, say
    machine.compute(512)
    assert machine.cost.compute_estimate().seconds(0, 4096, 512) == pytest.approx(before, rel=0.05)


def test_steps_timed_together_count_as_so_many():
    together, apart = Machine(), Machine()
    for machine in (together, apart):
        machine.compute(100, 0)
    for _ in range(4):
        apart.compute(512, 2048)
    context = 4 * (512 * 2048 + 512 * 511 / 2)
    seconds = 4 * apart.step_s + 2048 * apart.token_s + context * apart.context_s
    together.cost.observe_step(2048, context, seconds, num_steps=4)
    predicted = together.cost.compute_estimate().seconds(0, 4096, 512)
    actual = 8 * apart.step_s + 4096 * apart.token_s + 4096**2 / 2 * apart.context_s
    assert predicted == pytest.approx(actual, rel=0.03)
    assert apart.cost.compute_estimate().seconds(0, 4096, 512) == pytest.approx(actual, rel=0.03)


# ---- loads under way -----------------------------------------------------------------------------


def test_overlapping_loads_are_observed_as_one():
    machine = Machine()
    start = machine.clock.now
    for num_blocks in (100, 300):
        machine.cost.begin_load(DISK, num_blocks * BLOCK_BYTES)
    assert machine.cost.queued_bytes(DISK) == 400 * BLOCK_BYTES
    waits = [
        machine.cost.end_load(
            DISK, num_blocks * BLOCK_BYTES, began_at=start, ended_at=start + end, is_good=True
        )
        for num_blocks, end in ((100, 0.2), (300, 0.8))
    ]
    assert waits == pytest.approx([0.0, 0.2])
    assert machine.cost.queued_bytes(DISK) == 0
    predicted = machine.cost.load_estimate(DISK).seconds(400 * BLOCK_BYTES)
    assert predicted == pytest.approx(0.8, rel=0.05)


def test_a_tier_that_is_never_idle_is_observed_all_the_same():
    machine = Machine()
    began = machine.clock.now
    machine.cost.begin_load(DISK, BLOCK_BYTES)
    for second in range(1, 10):
        machine.clock.advance(1.1)
        machine.cost.begin_load(DISK, BLOCK_BYTES)
        machine.cost.end_load(
            DISK, BLOCK_BYTES, began_at=began, ended_at=began + 1.1 * second, is_good=True
        )
    assert machine.cost.load_estimate(DISK).seconds(BLOCK_BYTES) == pytest.approx(1.1, rel=0.1)


def test_a_failed_load_tells_nothing_of_the_bandwidth():
    machine = Machine()
    before = machine.cost.load_estimate(DISK)
    now = machine.clock.now
    machine.cost.begin_load(DISK, BLOCK_BYTES)
    machine.cost.end_load(DISK, BLOCK_BYTES, began_at=now, ended_at=now + 60, is_good=False)
    assert machine.cost.load_estimate(DISK) == before
    assert machine.cost.queued_bytes(DISK) == 0


# ---- the decision --------------------------------------------------------------------------------


def test_until_compute_is_known_the_verdict_is_load():
    machine = Machine()
    machine.disk_bytes_per_s = 1.0
    machine.load(1)
    decision = machine.choose([DISK] * 100)
    assert (decision.reason, decision.cut_blocks) == (LoadReason.UNFITTED, 100)


def test_small_steps_do_not_say_what_a_long_prefill_costs():
    """A step of few tokens waits for the weights to be read: what a token costs cannot be seen."""
    machine = Machine()
    machine.disk_bytes_per_s = 1.0
    machine.load(1)
    for _ in range(10):
        machine.compute(20, 16384)
    assert machine.choose([DISK] * 1000).reason is LoadReason.UNFITTED
    machine.compute(512, 0)
    machine.compute(512, 8192)
    assert machine.choose([DISK] * 1000).reason is LoadReason.COMPUTE


def test_a_fast_disk_is_loaded_from_and_a_slow_one_is_not(machine):
    assert machine.request(500).reason is LoadReason.LOAD
    machine.disk_bytes_per_s /= 1000
    machine.load(500)
    decision = machine.request(500)
    assert (decision.reason, decision.cut_blocks) == (LoadReason.COMPUTE, 0)
    assert decision.compute_s < 0.9 * decision.load_all_s


def test_a_prefix_on_the_device_costs_nothing(machine):
    decision = machine.choose([DEVICE] * 10)
    assert (decision.cut_blocks, decision.reason) == (10, LoadReason.NOTHING_TO_LOAD)
    assert decision.load_s == decision.compute_s == 0


def test_what_host_holds_is_loaded_and_what_a_slow_disk_holds_is_computed(machine):
    machine.disk_bytes_per_s /= 1000
    machine.load(100)
    decision = machine.choose([DEVICE] * 10 + [HOST] * 200 + [DISK] * 100)
    assert (decision.cut_blocks, decision.reason) == (210, LoadReason.PARTIAL)


def test_device_blocks_behind_a_slow_load_are_weighed_against_it():
    """Loading the few disk blocks makes the many after them usable."""
    machine = Machine()
    machine.prefill(16384)
    machine.disk_bytes_per_s /= 20
    machine.load(20)
    assert machine.choose([DISK] * 20).cut_blocks == 0
    assert machine.choose([DISK] * 20 + [DEVICE] * 500).cut_blocks == 520


def test_no_cut_is_better_than_the_chosen_one(machine):
    """The best cut is a border between runs: checked against all cuts."""
    machine.disk_bytes_per_s /= 12
    machine.load(100)
    compute, load = machine.cost.compute_estimate(), machine.cost.load_estimate(DISK)
    for num_blocks in (4, 40, 150, 400, 900):
        decision = machine.choose([DISK] * num_blocks)

        def cost(cut, end=num_blocks * BLOCK_TOKENS):
            load_s = load.seconds(cut * BLOCK_BYTES) if cut else 0.0
            return load_s + compute.seconds(cut * BLOCK_TOKENS, end, 512)

        best = min(map(cost, range(num_blocks + 1)))
        assert cost(decision.cut_blocks) <= best / 0.9


def test_what_waits_before_a_load_counts(machine):
    sources = [DISK] * 100
    assert machine.choose(sources).reason is LoadReason.LOAD
    busy = machine.choose(sources, queued_bytes={DISK: 10_000 * BLOCK_BYTES})
    assert busy.reason is LoadReason.COMPUTE


def test_a_gain_below_a_tenth_is_not_worth_computing(machine):
    reasons = {}
    for percent in range(80, 130, 2):
        other = Machine()
        other.prefill(16384)
        compute_s = other.cost.compute_estimate().seconds(0, 8000, 512)
        load_s = compute_s * percent / 100
        other.cost.observe_load(DISK, 500 * BLOCK_BYTES, load_s)
        reasons[percent] = other.choose([DISK] * 500).reason
    assert {reason for percent, reason in reasons.items() if percent < 100} == {LoadReason.LOAD}
    assert {reasons[p] for p in range(102, 110, 2)} == {LoadReason.SMALL_GAIN}
    assert {reasons[p] for p in range(114, 130, 2)} == {LoadReason.COMPUTE}


@pytest.mark.parametrize(("policy", "cut"), [("always", 50), ("never", 0)])
def test_a_policy_decides_without_measuring(policy, cut):
    machine = Machine(policy)
    machine.prefill(16384)
    machine.disk_bytes_per_s = 1.0
    machine.load(1)
    decision = machine.choose([DISK] * 50)
    assert (decision.cut_blocks, decision.reason) == (cut, LoadReason(policy))


# ---- a verdict can change ------------------------------------------------------------------------


def slow_machine(uniform=lambda: 0.5):
    """Its disk has 1 MB/s, and it knows."""
    machine = Machine(uniform=uniform)
    machine.prefill(16384)
    machine.disk_bytes_per_s /= 1000
    machine.load(100)
    return machine


def test_one_request_in_32_tries_a_slow_tier_again():
    draws = iter([0.5, 1 / 32, 0.99, 1 / 32 - 1e-9, 0.5])
    machine = slow_machine(uniform=lambda: next(draws))
    reasons = [machine.choose([DISK] * 500).reason for _ in range(5)]
    assert reasons == ["compute", "compute", "compute", "probe", "compute"]


def test_a_slow_tier_is_tried_again_after_a_minute():
    machine = slow_machine()
    start = machine.clock.now
    while machine.clock.now < start + 605:
        machine.request(500)
    assert machine.num_probes == 9  # each begins 60 s after the one before has ended


def test_trying_costs_a_part_of_what_computing_costs():
    """To load the whole prefix would take eight minutes, computing it takes 1.3 s."""
    machine = slow_machine(uniform=lambda: 0.0)
    machine.disk_bytes_per_s *= 20
    machine.load(100)
    decision = machine.choose([DISK] * 500)
    assert decision.reason is LoadReason.PROBE
    assert 2 <= decision.cut_blocks < 10
    whole = machine.cost.compute_estimate().seconds(0, 8000, 512)
    assert decision.load_s + decision.compute_s < 1.26 * whole


def test_a_tier_that_was_slow_yesterday_is_tried_before_it_is_trusted():
    machine = slow_machine()
    machine.clock.advance(86400)
    assert machine.choose([DISK] * 500).reason is LoadReason.PROBE


def test_a_request_that_finds_the_tier_recovered_loads_the_rest():
    machine = slow_machine(uniform=lambda: 0.0)
    machine.disk_bytes_per_s *= 1000
    decision = machine.request(500)
    assert machine.num_probes == 1
    assert (decision.reason, decision.cut_blocks) == (LoadReason.LOAD, 500)


def test_the_verdict_follows_the_disk_and_recovers_with_it():
    draws = iter(([0.5] * 31 + [0.0]) * 100)  # every 32nd request tries
    machine = slow_machine(uniform=lambda: next(draws))
    assert {machine.request(500).reason for _ in range(10)} == {LoadReason.COMPUTE}
    machine.disk_bytes_per_s *= 1000
    reasons = [machine.request(500).reason for _ in range(64)]
    first_load = reasons.index(LoadReason.LOAD)
    assert first_load <= 32
    assert set(reasons[first_load:]) == {LoadReason.LOAD}
    machine.disk_bytes_per_s /= 1000
    reasons = [machine.request(500).reason for _ in range(10)]
    assert reasons[-1] is LoadReason.COMPUTE
    assert reasons.count(LoadReason.LOAD) <= 3


def test_one_slow_load_among_fast_ones_does_not_change_the_verdict(machine):
    for _ in range(5):
        machine.request(500)
    num_bytes = 500 * BLOCK_BYTES
    machine.cost.observe_load(DISK, num_bytes, 3.0)  # six times slower, and slower than computing
    assert machine.choose([DISK] * 500).reason is LoadReason.LOAD


@pytest.mark.parametrize("factor", [3.5, 5, 16])
def test_a_second_slow_load_in_a_row_is_believed(machine, factor):
    """From a disk that had become 3.5 times slower the model went on loading for good, where
    computing would have taken two thirds of the time."""
    for _ in range(5):
        machine.request(500)
    machine.disk_bytes_per_s /= factor
    reasons = [machine.request(500).reason for _ in range(3)]
    assert reasons == [LoadReason.LOAD, LoadReason.LOAD, LoadReason.COMPUTE]
