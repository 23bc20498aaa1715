import pytest

from kvstore.block import BlockLayout
from kvstore.hashing import namespace_id
from kvstore.store import BlockStore
from kvstore.testing import FakeClock, FakeEngine, FaultyDisk
from kvstore.tiers.host import HostPool

LAYOUT = BlockLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")


@pytest.fixture
def make_engine():
    """Engines on small stores; closed at the end, with every invariant checked first. No time
    passes for them, unless a test passes a clock."""
    engines: list[FakeEngine] = []
    disks: list[FaultyDisk] = []

    def make(
        device_blocks: int = 16, *, namespace: str = "model", device=None, **options
    ) -> FakeEngine:
        pool = device or HostPool(device_blocks, LAYOUT.block_bytes)
        if isinstance(options.get("disk"), FaultyDisk):
            disks.append(options["disk"])
        options.setdefault("clock", FakeClock())
        store = BlockStore(LAYOUT, namespace_id({"model": namespace}), pool, **options)
        engines.append(FakeEngine(store))
        return engines[-1]

    yield make
    for disk in disks:
        disk.is_held = False  # a test that failed meanwhile: closing would wait for ever
    for engine in engines:
        if not engine.store.is_closed:
            engine.store.run_until_idle(10.0)
            assert engine.store.check() == []
            engine.store.close(10.0)
