import pytest
import torch

from engine.measuring.calibration import Calibration
from kvstore.block import BlockLayout
from kvstore.config import StoreConfig
from kvstore.costs.cost import LoadReason
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, MemoryDisk
from kvstore.tiers.host import HostPool

LAYOUT = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=2, dtype="float32")


class FakeRunner:
    """A model whose forwards take a known time; records what it was given."""

    def __init__(self, clock, token_s=0.0001, max_model_len=4096):
        self._clock, self._token_s, self.max_model_len = clock, token_s, max_model_len
        self.steps = []

    def execute(self, steps):
        (step,) = steps
        self.steps.append(step)
        self._clock.advance(self._token_s * len(step.token_ids))
        return torch.zeros(1, 8)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make_store(clock):
    stores = []

    def make(num_blocks=256, **options):
        pool = HostPool(num_blocks, LAYOUT.block_bytes)
        options.setdefault("disk", MemoryDisk())
        store = BlockStore(LAYOUT, b"n" * 32, pool, clock=clock, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        assert store.check() == []
        store.close()


def run(store, runner, clock, chunk_tokens=2048):
    calibration = Calibration(store, runner, clock, chunk_tokens=chunk_tokens)
    for _ in range(20):
        if not calibration.is_done:
            calibration.advance()
    assert calibration.is_done
    return [(len(step.token_ids), step.num_prefix) for step in runner.steps]


def test_forwards_grow_to_a_quarter_of_a_step_and_of_the_context(make_store, clock):
    store, runner = make_store(), FakeRunner(clock)
    assert run(store, runner, clock) == [(16, 0), (64, 0), (256, 0), (1024, 0), (16, 1024)]


def test_what_they_told_is_enough_to_weigh_a_load_of_any_length(make_store, clock):
    store, runner = make_store(), FakeRunner(clock)
    run(store, runner, clock)
    store.cost.observe_load("disk", 1000, 1000.0)
    decision = store.cost.choose(["disk"] * 200, block_tokens=16, block_bytes=1000)
    assert decision.reason is LoadReason.COMPUTE


def test_a_slow_model_is_not_made_to_run_long(make_store, clock):
    runner = FakeRunner(clock, token_s=0.002)
    assert run(make_store(), runner, clock) == [(16, 0), (64, 0), (16, 1024)]


def test_every_block_a_forward_needs_is_its_own(make_store, clock):
    store, runner = make_store(), FakeRunner(clock)
    run(store, runner, clock)
    for step in runner.steps:
        assert 16 * len(step.block_ids) >= step.num_prefix + len(step.token_ids)
        written = step.block_ids[step.num_prefix // 16 :]
        assert not set(written) & set(step.block_ids[: step.num_prefix // 16])
    assert store.device.num_free == store.device.capacity


def test_without_room_nothing_runs(make_store, clock):
    store, runner = make_store(4), FakeRunner(clock)
    assert run(store, runner, clock) == [(16, 0), (16, 1024)]


@pytest.mark.parametrize(
    "options", [{"disk": None}, {"config": StoreConfig(load_policy="always")}], ids=str
)
def test_nothing_runs_where_nothing_is_weighed(make_store, clock, options):
    assert run(make_store(**options), FakeRunner(clock), clock) == []
