"""The CUDA copy path, driven on a CPU through a runtime whose order of events the test decides."""

import asyncio
import logging
import random
from concurrent.futures import Executor, Future

import numpy as np
import pytest
import torch

from kvstore.block import BlockLayout, TierName
from kvstore.errors import KVStoreError, OutOfBlocksError
from kvstore.hashing import namespace_id
from kvstore.store import BlockStore
from kvstore.testing import FakeEngine, MemoryDisk
from kvstore.testing.cuda import FakeCudaRuntime, FakeEvent
from kvstore.testing.memory_suite import CAPACITY, MemoryTierSuite
from kvstore.tiers.cuda_runtime import TorchCudaRuntime
from kvstore.tiers.device import CudaCopier, CudaPool
from kvstore.tiers.host import HostPool
from kvstore.tiers.layer_groups import LayerGroups, choose_num_groups
from kvstore.tiers.page_lock import PageLock

LARGE = BlockLayout(num_layers=4, block_size=16, num_kv_heads=8, head_dim=64, dtype="float32")
SMALL = BlockLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=32, dtype="float16")
LAYOUTS = pytest.mark.parametrize("layout", [LARGE, SMALL], ids=["large", "small"])


class InlineExecutor(Executor):
    """Runs what it is given at once."""

    def __init__(self, max_workers: int, name: str) -> None:
        del max_workers, name

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.fixture
def repeatable(monkeypatch):
    """No threads and no clock: everything happens in the order of the loop."""
    monkeypatch.setattr("kvstore.tiers.lane.ThreadPoolExecutor", InlineExecutor)
    monkeypatch.setattr("kvstore.tiers.lane._PAUSE_S", 0)


@pytest.fixture
def short_batches(monkeypatch):
    """Batches and ring slots of a few blocks, so that a copy of a dozen needs several."""

    def set_for(layout, num_blocks=3):
        for module in ("runs", "ring"):
            monkeypatch.setattr(
                f"kvstore.tiers.{module}.BATCH_BYTES", num_blocks * layout.block_bytes
            )

    return set_for


class Bench:
    """A device pool and host rows with distinct contents, and the copier between them."""

    def __init__(self, layout, runtime=None, *, num_blocks=24, num_rows=24, device="cpu"):
        self.runtime = runtime or FakeCudaRuntime()
        self.pool = CudaPool(num_blocks, layout, torch.device(device))
        self.device = self.pool.tensor.view(num_blocks, -1).view(torch.uint8)
        self.rows = HostPool(num_rows, layout.block_bytes).rows
        self.device[:] = torch.arange(1, num_blocks + 1, device=device).remainder(251)[:, None]
        self.rows[:] = (np.arange(100, 100 + num_rows) % 251)[:, None]
        self.copier = CudaCopier(self.pool, runtime=self.runtime)
        self.copier.adopt(self.rows)
        if isinstance(self.runtime, FakeCudaRuntime):
            self.patient, self.urgent = self.runtime.streams[1:]  # out and in

    async def copy_out(self, block_ids, row_ids):
        await self.copier.copy_out(block_ids, self.rows, row_ids, self.copier.fence())

    async def copy_in(self, row_ids, block_ids):
        await self.copier.copy_in(self.rows, row_ids, block_ids, self.copier.fence())

    def on_device(self, block_ids):
        return [content_of(self.device[block].cpu().numpy()) for block in block_ids]

    def on_host(self, row_ids):
        return [content_of(self.rows[row]) for row in row_ids]


def content_of(block):
    """The one value that all bytes of a block have."""
    assert (block == block[0]).all(), "a block was copied in part"
    return int(block[0])


async def start(bench, coroutine, num_batches=1):
    """The copy as a task that has submitted so many batches and waits for a stream that is held."""
    runtime, task = bench.runtime, asyncio.ensure_future(coroutine)
    num_events = runtime.num_events + 1 + num_batches  # the fence has one
    while runtime.num_events < num_events or not runtime.is_stuck:
        await asyncio.sleep(0)
        assert not task.done()
    return task


# ---- what every memory tier does ----------------------------------------------------------------


class CudaCase(MemoryTierSuite):
    layout: BlockLayout

    @pytest.fixture(autouse=True)
    def _short_batches(self, short_batches):
        short_batches(self.layout)

    def make_tier(self):
        self.runtime = FakeCudaRuntime()
        pool = CudaPool(CAPACITY, self.layout, torch.device("cpu"))
        return pool, CudaCopier(pool, runtime=self.runtime)

    def raw(self, pool):
        self.runtime.run()
        return pool.tensor.view(CAPACITY, -1).view(torch.uint8).numpy()


class TestLargeBlocks(CudaCase):
    layout = LARGE


class TestSmallBlocksThroughTheRing(CudaCase):
    layout = SMALL


# ---- every copy arrives, in every order ---------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("seed", range(12))
def test_overlapping_copies_arrive_in_any_order_of_events(layout, seed, short_batches, repeatable):
    short_batches(layout)
    bench, choose = Bench(layout, FakeCudaRuntime(seed)), random.Random(seed)
    rows = choose.sample(range(24), 24)
    blocks = choose.sample(range(24), 24)
    if seed % 2:
        rows.sort()  # adjacent, so that small blocks go through the ring
    expected_host = dict(zip(rows, bench.on_host(rows), strict=True))
    expected_device = dict(zip(blocks, bench.on_device(blocks), strict=True))

    async def copy():
        copies = []
        for part in (slice(0, 8), slice(8, 12)):
            block_ids, row_ids = blocks[part], rows[part]
            copies.append(bench.copy_out(block_ids, row_ids))
            expected_host.update({r: b + 1 for b, r in zip(block_ids, row_ids, strict=True)})
        for part in (slice(12, 14), slice(14, 24)):
            block_ids, row_ids = blocks[part], rows[part]
            copies.append(bench.copy_in(row_ids, block_ids))
            expected_device.update({b: 100 + r for b, r in zip(block_ids, row_ids, strict=True)})
        await asyncio.gather(*copies)

    asyncio.run(copy())
    assert bench.on_host(rows) == [expected_host[row] for row in rows]
    assert bench.on_device(blocks) == [expected_device[block] for block in blocks]
    bench.copier.close()
    assert bench.runtime.locked == {}


@LAYOUTS
def test_adjacent_blocks_cross_as_one_piece_whichever_end_comes_first(layout):
    bench = Bench(layout)
    before = bench.runtime.num_copies
    asyncio.run(bench.copy_out([9, 8, 7, 6], [5, 4, 3, 2]))
    assert bench.runtime.num_copies == before + 1
    assert bench.on_host(range(2, 6)) == [7, 8, 9, 10]


def test_scattered_small_blocks_cross_as_one_piece():
    bench = Bench(SMALL)
    before = bench.runtime.num_copies
    asyncio.run(bench.copy_out([20, 3, 11, 0], [4, 5, 6, 7]))
    assert bench.runtime.num_copies == before + 2  # the block ids, and the blocks
    assert bench.on_host([4, 5, 6, 7]) == [21, 4, 12, 1]


def test_a_copy_within_the_pool_stands_in_line_with_the_owners_work():
    bench = Bench(LARGE)
    bench.runtime.submit(lambda: bench.device[3].fill_(77))
    bench.copier.copy_within([3, 8], [5, 9])
    bench.runtime.submit(lambda: bench.device[3].fill_(78))
    assert bench.on_device([5]) == [6], "nothing has run yet"
    bench.runtime.run()
    assert bench.on_device([3, 5, 9]) == [78, 77, 9]


# ---- what an event guards -----------------------------------------------------------------------


@LAYOUTS
def test_a_demotion_takes_what_the_running_step_is_still_writing(layout):
    async def demote():
        bench = Bench(layout)
        bench.runtime.compute.is_held = True
        bench.runtime.submit(lambda: bench.device[2].fill_(55))
        copy = await start(bench, bench.copy_out([2, 9], [0, 1]))
        assert bench.on_host([0, 1]) == [100, 101]
        bench.runtime.compute.is_held = False
        await copy
        assert bench.on_host([0, 1]) == [55, 10]

    asyncio.run(demote())


@LAYOUTS
def test_a_load_waits_for_the_reader_of_its_destination(layout):
    async def load():
        bench, seen = Bench(layout), []
        bench.runtime.compute.is_held = True
        bench.runtime.submit(lambda: seen.extend(bench.on_device([6, 9])))
        copy = await start(bench, bench.copy_in([0, 1], [6, 9]))
        assert bench.on_device([6, 9]) == [7, 10]
        bench.runtime.compute.is_held = False
        await copy
        assert seen == [7, 10]
        assert bench.on_device([6, 9]) == [100, 101]

    asyncio.run(load())


def test_small_blocks_cross_while_the_reader_of_their_destination_still_runs():
    async def load():
        bench = Bench(SMALL)
        bench.runtime.compute.is_held = True
        copy = await start(bench, bench.copy_in([0, 1, 2, 3], [6, 9, 1, 17]))
        assert isinstance(bench.urgent.work[0], FakeEvent), "blocks and ids have not crossed"
        bench.runtime.compute.is_held = False
        await copy
        assert bench.on_device([6, 9, 1, 17]) == [100, 101, 102, 103]

    asyncio.run(load())


@LAYOUTS
def test_a_copy_has_not_ended_before_its_last_event(layout, short_batches):
    async def demote():
        short_batches(layout)
        bench = Bench(layout)
        bench.patient.is_held = True
        copy = await start(bench, bench.copy_out(range(12), range(12)), num_batches=4)
        bench.patient.is_held = False
        await copy
        assert not bench.patient.work
        assert bench.on_host(range(12)) == list(range(1, 13))

    asyncio.run(demote())


@LAYOUTS
def test_a_long_copy_leaves_room_for_a_short_one(layout, short_batches, repeatable):
    async def demote():
        short_batches(layout, num_blocks=1)
        bench = Bench(layout)
        bench.patient.is_held = True
        long = await start(bench, bench.copy_out(range(0, 20, 2), range(0, 20, 2)), 4)
        short = await start(bench, bench.copy_out([21], [21]))
        bench.patient.is_held = False
        done, _ = await asyncio.wait([long, short], return_when=asyncio.FIRST_COMPLETED)
        assert done == {short}
        await long

    asyncio.run(demote())


def test_closing_waits_for_what_a_cancelled_copy_left_under_way():
    async def demote():
        bench = Bench(LARGE)
        bench.patient.is_held = True
        copy = await start(bench, bench.copy_out([3], [0]))
        while not copy.done():
            copy.cancel()
            await asyncio.sleep(0)
        assert bench.on_host([0]) == [100]
        bench.copier.close()
        assert bench.on_host([0]) == [4]
        assert bench.runtime.locked == {}

    asyncio.run(demote())


def test_a_batch_that_fails_half_way_is_no_longer_under_way():
    class HalfCopies(FakeCudaRuntime):
        def copy(self, stream, targets, sources):
            super().copy(stream, targets[:1], sources[:1])
            raise RuntimeError("invalid argument")

    bench = Bench(LARGE, HalfCopies(runs_when_queried=False))
    with pytest.raises(RuntimeError, match="invalid argument"):
        asyncio.run(bench.copy_out([3, 7], [0, 1]))
    assert not any(stream.work for stream in bench.runtime.streams)
    assert bench.on_host([0, 1]) == [4, 101]


def test_a_copy_that_fails_later_waits_for_its_earlier_batches(short_batches):
    short_batches(LARGE)

    class ThirdFails(FakeCudaRuntime):
        def copy(self, stream, targets, sources):
            if self.num_copies >= 2:
                raise RuntimeError("invalid argument")
            super().copy(stream, targets, sources)

    bench = Bench(LARGE, ThirdFails())
    with pytest.raises(RuntimeError, match="invalid argument"):
        asyncio.run(bench.copy_out(range(9), range(9)))
    assert bench.on_host(range(9)) == [1, 2, 3, 4, 5, 6, 106, 107, 108]


# ---- page-locked memory -------------------------------------------------------------------------


def test_rows_are_registered_exactly_and_let_go_at_close():
    bench = Bench(LARGE)
    assert bench.runtime.locked == {bench.rows.ctypes.data: bench.rows.nbytes}
    stats = bench.copier.stats()
    assert (stats.page_locked_bytes, stats.pageable_bytes) == (bench.rows.nbytes, 0)
    bench.copier.close()
    assert bench.runtime.locked == {}


def test_a_failed_registration_is_said_once_and_copies_go_on(caplog):
    with caplog.at_level(logging.WARNING):
        bench = Bench(LARGE, FakeCudaRuntime(max_locked_bytes=0))
        more = HostPool(4, LARGE.block_bytes).rows
        bench.copier.adopt(more)
    assert len(caplog.records) == 1
    assert "not page-locked" in caplog.text
    stats = bench.copier.stats()
    assert stats.page_locked_bytes == 0
    assert stats.pageable_bytes == bench.rows.nbytes + more.nbytes
    assert "out of memory" in stats.reason
    asyncio.run(bench.copy_out([1, 2], [0, 1]))
    assert bench.on_host([0, 1]) == [2, 3]


def test_a_copy_never_spans_two_registered_pieces(monkeypatch):
    monkeypatch.setattr("kvstore.tiers.page_lock.PIECE_BYTES", 4 * LARGE.block_bytes)
    bench = Bench(LARGE, num_rows=10)
    assert len(bench.runtime.locked) == 3
    asyncio.run(bench.copy_out(range(2, 9), range(2, 9)))  # the runtime looks at each copy
    assert bench.runtime.num_copies == 3
    assert bench.on_host(range(2, 9)) == list(range(3, 10))


def test_a_piece_is_whole_blocks_and_whole_pages():
    rows = HostPool(100, 3000).rows
    runtime = FakeCudaRuntime()
    lock = PageLock(rows, runtime, piece_bytes=1)
    sizes = sorted(runtime.locked.values(), reverse=True)
    assert sizes[0] % 3000 == sizes[0] % 4096 == 0 or len(sizes) == 1
    assert lock.rows_per_piece * 3000 >= sizes[0]
    assert sum(sizes) == rows.nbytes


def test_what_was_registered_before_a_failure_stays_page_locked():
    rows = HostPool(8, 4096).rows
    lock = PageLock(rows, FakeCudaRuntime(max_locked_bytes=5 * 4096), piece_bytes=2 * 4096)
    assert (lock.locked_bytes, lock.pageable_bytes) == (4 * 4096, 4 * 4096)
    assert lock.problem


# ---- layer groups -------------------------------------------------------------------------------


def test_layers_arrive_group_by_group():
    async def load():
        bench = Bench(LARGE)
        groups = LayerGroups(LARGE.num_layers, 2)
        bench.urgent.is_held = True
        copy = await start(
            bench,
            bench.copier.copy_in_groups(bench.rows, [3, 4], [8, 2], bench.copier.fence(), groups),
        )
        seen = []
        for layer in range(LARGE.num_layers):
            bench.copier.wait_layer(groups, layer)
            bench.runtime.submit(
                lambda layer=layer: seen.append(bench.pool.tensor[8, layer].view(torch.uint8))
            )
        bench.urgent.is_held = False
        await copy
        bench.runtime.run()
        assert [content_of(layer.flatten().numpy()) for layer in seen] == [103] * 4
        assert bench.on_device([8, 2]) == [103, 104]

    asyncio.run(load())


def test_a_forward_reads_a_group_while_the_next_is_still_on_its_way():
    async def load():
        bench = Bench(LARGE)
        bench.urgent.is_held = True
        groups = LayerGroups(LARGE.num_layers, 2)
        copy = await start(
            bench,
            bench.copier.copy_in_groups(bench.rows, [3], [8], bench.copier.fence(), groups),
        )
        for _ in range(3):  # the fence, the first group and its event
            bench.runtime.run_one(bench.urgent)
        assert bench.runtime.query(groups.event_of(1))
        assert not bench.runtime.query(groups.event_of(2))
        block = bench.pool.tensor[8].view(torch.uint8).flatten(1)
        assert [content_of(layer.numpy()) for layer in block] == [103, 103, 9, 9]
        bench.urgent.is_held = False
        await copy

    asyncio.run(load())


def test_a_failed_group_is_an_error_for_the_forward_that_waits():
    class Fails(FakeCudaRuntime):
        def copy(self, stream, targets, sources):
            raise RuntimeError("invalid argument")

    bench, groups = Bench(LARGE, Fails()), LayerGroups(LARGE.num_layers, 2)
    with pytest.raises(RuntimeError, match="invalid argument"):
        asyncio.run(bench.copier.copy_in_groups(bench.rows, [3], [8], bench.copier.fence(), groups))
    with pytest.raises(KVStoreError, match="layer 0 did not arrive"):
        bench.copier.wait_layer(groups, 0)


def test_layer_groups_are_chosen_only_where_they_hide_a_tenth():
    block_bytes = 2 << 20
    assert choose_num_groups(block_bytes, load_s=0.086, compute_s=0.005) == 1
    assert choose_num_groups(block_bytes, load_s=0.086, compute_s=0.140) == 4
    assert choose_num_groups(512 << 10, load_s=0.086, compute_s=0.140) == 2
    assert choose_num_groups(128 << 10, load_s=0.086, compute_s=0.140) == 1


# ---- the store on such a device -----------------------------------------------------------------


@pytest.fixture
def make_engine():
    engines = []

    def make(device_blocks, runtime=None, layout=SMALL, **options):
        runtime = runtime or FakeCudaRuntime()
        pool = CudaPool(device_blocks, layout, torch.device("cpu"))
        copier = CudaCopier(pool, runtime=runtime)
        store = BlockStore(layout, namespace_id({"m": "m"}), pool, copier=copier, **options)
        rows = pool.tensor.view(device_blocks, -1).view(torch.uint8).numpy()
        engines.append((FakeEngine(store, rows, runtime.submit), runtime))
        return engines[-1][0]

    yield make
    for engine, runtime in engines:
        if not engine.store.is_closed:
            engine.store.close(10.0)
        assert runtime.locked == {}, "host memory is still registered"
        runtime.run()
        assert runtime.failures == []


def prompt(*blocks):
    return [token for block in blocks for token in [block] * 4] + [99]


@pytest.mark.parametrize("seed", range(4))
def test_a_store_serves_right_blocks_in_any_order_of_events(make_engine, seed):
    engine = make_engine(8, FakeCudaRuntime(seed), host_blocks=10, disk=MemoryDisk())
    choose = random.Random(seed)
    for _ in range(30):
        first = choose.randrange(5)
        engine.run(prompt(*range(first, first + choose.randint(1, 4))))
        engine.store.poll()
        assert engine.store.check() == []
    assert engine.store.flush(10.0)
    stats = engine.store.stats()
    assert stats.demoted_blocks > 0
    assert stats.promoted_blocks["host"] > 0


def test_a_block_is_not_reused_before_its_copy_is_done(make_engine):
    runtime = FakeCudaRuntime()
    engine = make_engine(4, runtime, host_blocks=8)
    engine.run(prompt(1, 2, 3))
    runtime.run()
    for stream in runtime.streams:
        stream.is_held = stream.name == "patient"
    lookup = engine.look_up_memory(prompt(5, 6, 7))
    for _ in range(20):  # however often it is asked, while the copy to host is under way
        with pytest.raises(OutOfBlocksError):
            engine.store.reserve(lookup, 13)
        engine.store.poll()
    assert engine.store.num_pending > 0
    assert engine.store.check() == []
    for stream in runtime.streams:
        stream.is_held = False
    engine.run(prompt(5, 6, 7))
    engine.run(prompt(1, 2, 3))  # compares what comes back from host


def test_closing_waits_for_copies_under_way_and_then_lets_go_of_the_memory(make_engine):
    runtime = FakeCudaRuntime()
    disk = MemoryDisk()
    engine = make_engine(4, runtime, host_blocks=8, disk=disk)
    engine.run(prompt(1, 2, 3))
    engine.store.urge()
    engine.store.poll()
    assert engine.store.num_pending > 0
    engine.store.close(10.0)
    assert len(disk.blocks) == 3
    assert runtime.locked == {}  # the runtime refuses that while any stream has work


def test_a_store_says_that_its_host_memory_is_not_page_locked(make_engine):
    limited = make_engine(4, FakeCudaRuntime(max_locked_bytes=0), host_blocks=8)
    host = limited.store.stats().tiers["host"]
    assert (host.state, host.reason) == ("degraded", "out of memory (2)")
    host = make_engine(4, host_blocks=8).store.stats().tiers["host"]
    assert (host.state, host.reason) == ("ok", "")


def test_a_broken_device_fails_the_load_and_not_the_request(make_engine):
    runtime = FakeCudaRuntime()
    engine = make_engine(4, runtime, host_blocks=8)
    engine.run(prompt(1, 2))
    engine.run(prompt(5, 6, 7))
    assert engine.store.run_until_idle(10.0)
    engine.store.reset(TierName.DEVICE)
    lookup = engine.look_up(prompt(1, 2))
    runtime.error = RuntimeError("an illegal memory access was encountered")
    lease = engine.reserve(lookup, 9)
    assert engine.store.run_until_idle(10.0)
    assert lease.is_ready
    assert len(lease.failed_keys) == 2
    engine.store.release(lease)
    runtime.error = None
    engine.run(prompt(1, 2))
    assert engine.store.check() == []


# ---- many blocks, on a device where there is one ------------------------------------------------


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
@LAYOUTS
@pytest.mark.parametrize("are_rows_adjacent", [True, False], ids=["adjacent", "scattered"])
def test_blocks_leave_and_come_back(layout, device, are_rows_adjacent):
    runtime = FakeCudaRuntime() if device == "cpu" else TorchCudaRuntime(torch.device(device))
    bench = Bench(layout, runtime, num_blocks=300, num_rows=300, device=device)
    choose = random.Random(0)
    blocks, targets = choose.sample(range(300), 200), choose.sample(range(300), 200)
    rows = list(range(200)) if are_rows_adjacent else choose.sample(range(300), 200)
    expected = [(block + 1) % 251 for block in blocks]
    asyncio.run(bench.copy_out(blocks, rows))
    assert bench.on_host(rows) == expected
    asyncio.run(bench.copy_in(rows, targets))
    assert bench.on_device(targets) == expected
    assert bench.copier.stats().reason == ""
    bench.copier.close()
