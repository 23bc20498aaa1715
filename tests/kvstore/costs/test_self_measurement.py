import pytest

from kvstore.block import TierName
from kvstore.config import StoreConfig
from kvstore.errors import BlockMissingError
from kvstore.testing import FakeClock, FaultyDisk, MemoryDisk

HOST, DISK = TierName.HOST, TierName.DISK


@pytest.fixture
def disk():
    return FaultyDisk(MemoryDisk())


def store_with_prompts(make_engine, **options):
    engine = make_engine(16, **options)
    for token in (1, 2, 3):
        engine.run([token] * 4 + [9])
    engine.store.flush(10.0)
    return engine.store


def estimate(store, tier):
    return store.cost.load_estimate(tier)


def test_latency_and_bandwidth_of_a_disk_are_told_apart(make_engine, disk):
    clock = FakeClock()

    async def pass_time(seconds):
        clock.advance(seconds)

    store = store_with_prompts(make_engine, disk=disk, clock=clock)
    disk.sleep, disk.delay_s, disk.bytes_per_s = pass_time, 0.05, 1280.0
    store.measure()
    store.run_until_idle(10.0)
    assert estimate(store, DISK).latency_s == pytest.approx(0.05)
    assert estimate(store, DISK).bytes_per_s == pytest.approx(1280)


def test_host_is_measured_along_the_way_of_real_loads(make_engine):
    store = make_engine(16, host_blocks=8).store
    guess = estimate(store, HOST)
    store.measure()
    store.run_until_idle(10.0)
    assert estimate(store, HOST) != guess
    assert store.device.num_free == 16
    assert store.host.num_free == 8


def test_the_store_works_on_while_it_is_measured(make_engine, disk):
    store = store_with_prompts(make_engine, disk=disk, host_blocks=8)
    disk.is_held = True
    store.measure()
    assert store.check() == []
    disk.is_held = False
    store.run_until_idle(10.0)
    assert store.check() == []


def test_an_empty_disk_is_measured_when_it_holds_something(make_engine, disk):
    engine = make_engine(16, disk=disk)
    guess = estimate(engine.store, DISK)
    engine.store.measure()
    engine.store.run_until_idle(10.0)
    assert estimate(engine.store, DISK) == guess
    for token in (1, 2):
        engine.run([token] * 4 + [9])
    engine.store.flush(10.0)
    engine.store.measure()
    engine.store.run_until_idle(10.0)
    assert estimate(engine.store, DISK) != guess


def test_what_was_measured_is_not_measured_again(make_engine, disk):
    store = store_with_prompts(make_engine, disk=disk)
    for _ in range(3):
        store.measure()
        store.run_until_idle(10.0)
    assert disk.inner.num_reads == 3


def test_a_read_that_fails_measures_nothing(make_engine, disk):
    store = store_with_prompts(make_engine, disk=disk)
    guess = estimate(store, DISK)
    disk.fail_reads = lambda ref: BlockMissingError("gone")
    store.measure()
    store.run_until_idle(10.0)
    assert estimate(store, DISK) == guess
    assert store.stats().failed_loads == {}


def test_a_full_device_is_not_disturbed(make_engine):
    engine = make_engine(4, host_blocks=8)
    lease = engine.start([1] * 13)
    guess = estimate(engine.store, HOST)
    engine.store.measure()
    engine.store.run_until_idle(10.0)
    assert estimate(engine.store, HOST) == guess
    engine.store.release(lease)


@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_fixed_policy_measures_nothing(make_engine, disk, policy):
    store = store_with_prompts(make_engine, disk=disk, config=StoreConfig(load_policy=policy))
    store.measure()
    store.run_until_idle(10.0)
    assert disk.inner.num_reads == 0
