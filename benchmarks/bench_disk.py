"""The disk tier beside bare py-lmdb: the same value sizes, grouping and durability.

put      blocks per second of a bare loop, over the time of put_group; recycled pages in both
churn    the same at a full cache, where each group evicts as much as it stores
get      bare get plus one copy into the same buffer, over read_many with verification; page cache
         warm. Also read_into, one block at a time
cold     reading the file sequentially, over reading all blocks in two threads, and over verifying
         them as the command does; page cache dropped
open     from an imported library to the first verified block, by blocks in the cache
inspect  the summary of a cache, by blocks in it
walk     verify, export, and the choice of evict: time, and memory of Python at its peak, by blocks
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import lmdb
import numpy as np
from harness import Record, alternate, main, paired_ratio, say, summarize

from kvstore.block import BlockRef, BlockWrite, PutOutcome
from kvstore.config import DiskConfig
from kvstore.disk import DiskStore
from kvstore.disk.offline.carry import export_documents
from kvstore.disk.offline.evict import evict
from kvstore.disk.offline.summary import summarize as summarize_cache
from kvstore.disk.offline.verify import verify
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id

GOALS = {"put": 0.8, "churn": None, "get": 0.7, "cold": 0.7, "open": 20.0, "inspect": 1000.0}
NAMESPACE = namespace_id({"model": "bench"})
BLOCK_TOKENS = 16
OPTIONS = {"runs": 7, "blocks": 512, "index_blocks": 100_000, "directory": None}


def make_chain(num_blocks: int, start: int = 0) -> list[BlockRef]:
    tokens = encode_tokens((np.arange(num_blocks * BLOCK_TOKENS) * 7 + start) % (1 << 31))
    return chain_refs(chain_seed(NAMESPACE), tokens, 4 * BLOCK_TOKENS)


def as_writes(refs: list[BlockRef], payload: bytes) -> list[BlockWrite]:
    return [BlockWrite(ref, NAMESPACE, b"", payload) for ref in refs]


def groups(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class Bare:
    """What one would write with py-lmdb alone: one database, keys and values."""

    def __init__(self, directory: Path, map_bytes: int, durability: str) -> None:
        is_synced = durability == "power"
        self.env = lmdb.open(
            str(directory), map_size=map_bytes, max_dbs=1, sync=is_synced, metasync=is_synced
        )
        self.db = self.env.open_db(b"values")

    def put(self, keys: list[bytes], payload: bytes, old: list[bytes] = ()) -> None:
        with self.env.begin(write=True) as txn:
            for key in old:
                txn.delete(key, db=self.db)
            for key in keys:
                txn.put(key, payload, db=self.db)

    def get_into(self, key: bytes, dst: memoryview) -> None:
        with self.env.begin(buffers=True) as txn:
            dst[:] = txn.get(key, db=self.db)


def timed(run, *arguments) -> float:
    started = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - started


def bench_put(
    root: Path, value_bytes: int, num_blocks: int, group_bytes: int, durability: str, runs: int
) -> dict:
    refs = make_chain(num_blocks)
    payload = os.urandom(value_bytes)
    size = max(1, group_bytes // value_bytes)
    writes, keys = groups(as_writes(refs, payload), size), groups([r.key for r in refs], size)
    map_bytes = 3 * num_blocks * (value_bytes + 8192) + (64 << 20)
    config = DiskConfig(durability=durability, group_commit_bytes=group_bytes)
    bare = Bare(root / "bare", map_bytes, durability)
    with DiskStore.open(root / "ours", capacity_bytes=map_bytes, config=config) as store:

        def put_ours() -> float:
            store.clear(refs[0].parent)
            seconds = timed(lambda: [store.put_group(group) for group in writes])
            assert store.stats().blocks == num_blocks
            return seconds

        def put_bare() -> float:
            for group in keys:
                with bare.env.begin(write=True) as txn:
                    for key in group:
                        txn.delete(key, db=bare.db)
            return timed(lambda: [bare.put(group, payload) for group in keys])

        samples = alternate({"ours": put_ours, "bare": put_bare}, runs)
    bare.env.close()
    return _rates("put", samples, num_blocks * value_bytes, value_bytes) | {
        "group_bytes": group_bytes,
        "durability": durability,
    }


def bench_churn(root: Path, value_bytes: int, num_blocks: int, runs: int) -> dict:
    """A full cache: bare LMDB deletes the group it put longest ago, we evict."""
    payload = os.urandom(value_bytes)
    capacity = int(num_blocks * (value_bytes + 8192) / 0.85)
    size = max(1, (16 << 20) // value_bytes)
    bare = Bare(root / "bare", 3 * capacity, "process")  # it does not look for room: give it plenty
    alive: list[list[bytes]] = []
    with DiskStore.open(root / "ours", capacity_bytes=capacity) as store:
        number = 0
        while store.stats().evictions == 0:
            number += 1
            store.put_group(as_writes(make_chain(size, start=number * 1_000_003), payload))
        while len(alive) * size < num_blocks:
            alive.append([os.urandom(32) for _ in range(size)])
            bare.put(alive[-1], payload)

        def put_ours() -> float:
            nonlocal number
            chains = [make_chain(size, start=(number + i) * 1_000_003) for i in range(1, 9)]
            number += 8
            writes = [as_writes(chain, payload) for chain in chains]
            outcomes: list[PutOutcome] = []
            seconds = timed(lambda: [outcomes.extend(store.put_group(group)) for group in writes])
            assert set(outcomes) == {PutOutcome.STORED}
            return seconds

        def put_bare() -> float:
            fresh = [[os.urandom(32) for _ in range(size)] for _ in range(8)]

            def run() -> None:
                for group in fresh:
                    bare.put(group, payload, alive.pop(0))
                    alive.append(group)

            return timed(run)

        samples = alternate({"ours": put_ours, "bare": put_bare}, runs)
    bare.env.close()
    return _rates("churn", samples, 8 * size * value_bytes, value_bytes)


def bench_get(root: Path, value_bytes: int, num_blocks: int, runs: int) -> list[dict]:
    refs = make_chain(num_blocks)
    payload = os.urandom(value_bytes)
    map_bytes = 3 * num_blocks * (value_bytes + 8192) + (64 << 20)
    bare = Bare(root / "bare", map_bytes, "process")
    store = DiskStore.open(root / "ours", capacity_bytes=map_bytes)
    for group in groups(refs, 64):
        store.put_group(as_writes(group, payload))
        bare.put([ref.key for ref in group], payload)
    # As many destinations as a promoted prefix has blocks: one that is filled again and again would
    # stay in the processor's cache, which no device block does.
    num_buffers = min(num_blocks, (64 << 20) // value_bytes)
    blocks = [memoryview(bytearray(value_bytes)) for _ in range(num_buffers)]
    buffers = blocks[:16]
    for ref in refs:  # a page's first touch by a process is a fault, cached or not
        store.read_into(ref, buffers[0])
        bare.get_into(ref.key, buffers[0])
    position = 0

    def some(run) -> float:
        """A few blocks at a time, so that all contenders see the machine in the same state."""
        nonlocal position
        position = (position + 37) % num_blocks
        places = range(position, position + len(buffers))
        part = [(refs[i % num_blocks], blocks[i % len(blocks)]) for i in places]
        return timed(run, part)

    samples = alternate(
        {
            "ours": lambda: some(store.read_many),
            "one_by_one": lambda: some(lambda part: [store.read_into(*read) for read in part]),
            "bare": lambda: some(lambda part: [bare.get_into(ref.key, dst) for ref, dst in part]),
        },
        40 * runs,
    )
    assert all(block == payload for block in blocks)
    records = [_rates("get", samples, len(buffers) * value_bytes, value_bytes)]
    records[0]["one_by_one_ratio"] = paired_ratio(samples["bare"], samples["one_by_one"])
    store.close()
    bare.env.close()
    records.append(_bench_cold(root / "ours", refs, buffers, runs))
    return records


def _bench_cold(
    directory: Path, refs: list[BlockRef], buffers: list[memoryview], runs: int
) -> dict:
    file = directory / "data.mdb"
    num_bytes = len(refs) * len(buffers[0])

    def read_blocks() -> float:
        _drop_pages(file)
        with DiskStore.open(directory) as store, ThreadPoolExecutor(2) as threads:  # as the tier
            half = len(buffers) // 2
            free = SimpleQueue()
            free.put(buffers[:half])
            free.put(buffers[half:])

            def read(part: list[BlockRef]) -> None:
                own = free.get()
                assert set(store.read_many(list(zip(part, own, strict=False)))) == {None}
                free.put(own)

            return timed(lambda: list(threads.map(read, groups(refs, half))))

    def read_file() -> float:
        _drop_pages(file)
        buffer = bytearray(1 << 20)

        def run() -> None:
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

        return timed(run) * num_bytes / file.stat().st_size

    def verify_blocks() -> float:
        _drop_pages(file)
        with DiskStore.open(directory):  # beside an engine, so without a child for the structure
            return timed(lambda: verify(directory)["ok"] or sys.exit("verify found something"))

    contenders = {"ours": read_blocks, "verify": verify_blocks, "bare": read_file}
    samples = alternate(contenders, min(runs, 5))
    record = _rates("cold", samples, num_bytes, len(buffers[0]))
    record |= {"page_cache": "dropped"}
    return record | {"verify_ratio": paired_ratio(samples["bare"], samples["verify"])}


def _drop_pages(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


_FIRST_HIT = """
import json, sys, time
from kvstore.disk import DiskStore
from kvstore.block import BlockRef
key, parent, tokens = map(bytes.fromhex, sys.argv[2:5])
ref = BlockRef(key, parent, tokens, 0)
started = time.perf_counter()
store = DiskStore.open(sys.argv[1])
assert len(store.probe([ref])) == 1
store.read_into(ref, memoryview(bytearray(1024)))
print(time.perf_counter() - started)
store.close()
"""


def bench_index_size(root: Path, num_blocks: int, runs: int) -> list[dict]:
    """Opening and inspecting must not depend on the number of blocks; payloads of 1 KiB."""
    directory = root / f"index-{num_blocks}"
    payload = os.urandom(1024)
    with DiskStore.open(directory, capacity_bytes=4096 * num_blocks + (256 << 20)) as store:
        for start in range(0, num_blocks, 1000):
            refs = make_chain(min(1000, num_blocks - start), start=start * 977 + 1)
            assert set(store.put_group(as_writes(refs, payload))) == {PutOutcome.STORED}
        assert store.stats().blocks == num_blocks
    ref = make_chain(1, start=1)[0]
    arguments = [str(directory), ref.key.hex(), ref.parent.hex(), ref.tokens.hex()]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _FIRST_HIT, *arguments]
    opens = [
        json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        for _ in range(runs)
    ]
    inspects = [timed(summarize_cache, directory) for _ in range(runs)]
    assert summarize_cache(directory)["blocks"] == num_blocks
    walks = {
        "verify": lambda: verify(directory),
        "export": lambda: export_documents(directory, os.devnull),
        "evict": lambda: evict(directory, to_bytes=0, dry_run=True),
    }
    return [
        *(
            {
                "case": "walk",
                "what": what,
                "blocks": num_blocks,
                "ms": 1e3 * timed(walk),
                "peak_mib": _peak_bytes(walk) / (1 << 20),
            }
            for what, walk in walks.items()
        ),
        *(
            {
                "case": case,
                "blocks": num_blocks,
                "seconds": summarize(seconds),
                "over": f"{GOALS[case]:g} ms",
                "ratio": 1e3 * summarize(seconds)["median"] / GOALS[case],
                "goal": 1.0,
                "goal_is": "at most",
            }
            for case, seconds in (("open", opens), ("inspect", inspects))
        ),
    ]


def _peak_bytes(run) -> int:
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _rates(case: str, samples: dict[str, list[float]], num_bytes: int, value_bytes: int) -> dict:
    """GB/s is payload bytes over the median time; the ratio is that of samples side by side."""
    record = {"case": case, "value_bytes": value_bytes}
    record["ratio"] = paired_ratio(samples["bare"], samples["ours"])
    if GOALS[case] is not None:
        record |= {"goal": GOALS[case], "goal_is": "at least"}
    for name, seconds in samples.items():
        found = summarize(seconds)
        record[f"{name}_gb_s"] = num_bytes / found["median"] / 1e9
        record[f"{name}_s"] = found
    return record


def measure(arguments: Namespace) -> list[Record]:
    records: list[Record] = []
    root = Path(tempfile.mkdtemp(prefix="bench-disk-", dir=arguments.directory))
    runs = arguments.runs

    def run(name: str, bench, *parameters) -> None:
        say(f"{name} {parameters}")
        place = root / f"{len(records)}"
        place.mkdir()
        (place / "bare").mkdir()
        found = bench(place, *parameters)
        records.extend(found if isinstance(found, list) else [found])
        shutil.rmtree(place)

    try:
        for value_bytes in (256 << 10, 1 << 20):
            num_blocks = max(32, arguments.blocks * (256 << 10) // value_bytes)
            run("put", bench_put, value_bytes, num_blocks, 16 << 20, "process", runs)
            run("get", bench_get, value_bytes, num_blocks, runs)
        run("put", bench_put, 256 << 10, max(32, arguments.blocks // 4), 16 << 20, "power", runs)
        run("churn", bench_churn, 360 << 10, max(256, arguments.blocks), runs)
        for num_blocks in (100, arguments.index_blocks):
            run("index", bench_index_size, num_blocks, runs)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
