"""Capacity planning by itself: how many block references a second, in how much memory.

read        a Mooncake trace as JSON lines into batches
exact       stack distances of all blocks, the whole LRU curve, over an LRU cache of one size in
            plain Python
simulated   one size, through the store's own code
sampled     the curve of a sample that fits a bound, of a much longer trace; memory is the process'
            peak above what it began with, and generating the trace is timed apart

Answers come first: the curve against the plain cache and against a simulation, and the sample
against the curve.
"""

import multiprocessing
import tempfile
import time
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from harness import Record, alternate, main, paired_ratio, say, summarize

from kvstore.planning import BlockSampler, CacheSetup, RequestBatch, make_plan, read_trace
from kvstore.planning.lru_curve import LruCurve
from kvstore.planning.synthetic import Workload, generate, write_mooncake

OPTIONS = {
    "runs": 3,
    "blocks": 5_000_000,
    "sampled_blocks": 100_000_000,
    "most_blocks": 1_000_000,
    "only": "",
}
WORKLOAD = Workload(documents=100_000, zipf=0.9, sessions=5_000, turns=5.0, drift=0.01)
BLOCKS_PER_REQUEST = 26  # of this workload, about
CHECKED = 200_000  # block references of the trace that answers are checked on


def trace(num_blocks: int) -> Iterable[RequestBatch]:
    return generate(WORKLOAD, num_blocks // BLOCKS_PER_REQUEST)


def lru_hits(batches: Iterable[RequestBatch], capacity: int) -> int:
    """An LRU cache in plain Python."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for batch in batches:
        for blocks, _, _ in batch.prompts():
            ids = blocks.tolist()
            hits += next((i for i, block in enumerate(ids) if block not in cached), len(ids))
            for block in reversed(ids):
                cached[block] = None
                cached.move_to_end(block)
            while len(cached) > capacity:
                cached.popitem(last=False)
    return hits


def check_answers() -> None:
    capacities = (500, 5_000, 50_000)
    plan = make_plan(trace(CHECKED), capacities=capacities, setups=[CacheSetup(capacities[1])])
    for point in plan.curves["lru"]:
        assert point.outcome.hit_blocks == lru_hits(trace(CHECKED), point.capacity_blocks)
    assert plan.splits[0].outcome.hit_blocks == plan.curves["lru"][1].outcome.hit_blocks
    sampled = make_plan(trace(CHECKED), capacities=capacities, sampler=BlockSampler(0.1))
    for true, found in zip(plan.curves["lru"], sampled.curves["lru"], strict=True):
        error = abs(found.outcome.hit_ratio_blocks - true.outcome.hit_ratio_blocks)
        assert error <= 2 * found.outcome.error_blocks, "the sample is off by two intervals"


def bench_read(num_blocks: int, runs: int) -> Record:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        with path.open("w") as file:
            write_mooncake(trace(num_blocks), file)
        count = sum(len(batch.blocks) for batch in trace(num_blocks))

        def read() -> float:
            started = time.perf_counter()
            assert sum(len(batch.blocks) for batch in read_trace(path)) == count
            return time.perf_counter() - started

        samples = alternate({"read": read}, runs)
    return {"case": "read", "blocks": count, **speed(count, samples["read"])}


def bench_exact(num_blocks: int, runs: int) -> Record:
    batches = list(trace(num_blocks))
    count = sum(len(batch.blocks) for batch in batches)
    curve = LruCurve()

    def exact() -> float:
        nonlocal curve
        curve = LruCurve()
        started = time.perf_counter()
        for batch in batches:
            curve.add(batch)
        return time.perf_counter() - started

    def plain() -> float:
        started = time.perf_counter()
        lru_hits(batches, num_blocks // 50)
        return time.perf_counter() - started

    samples = alternate({"exact": exact, "plain": plain}, runs)
    return {
        "case": "exact",
        "blocks": count,
        "unique_blocks": curve.distances.num_blocks,
        "ratio": paired_ratio(samples["plain"], samples["exact"]),
        **speed(count, samples["exact"]),
        **{f"plain_{name}": value for name, value in speed(count, samples["plain"]).items()},
    }


def bench_simulated(num_blocks: int, runs: int) -> Record:
    batches = list(trace(num_blocks))
    count = sum(len(batch.blocks) for batch in batches)

    def simulate() -> float:
        started = time.perf_counter()
        make_plan(batches, capacities=[1000], setups=[CacheSetup(max(1000, num_blocks // 50))])
        return time.perf_counter() - started

    samples = alternate({"simulate": simulate}, runs)
    return {"case": "simulated", "blocks": count, **speed(count, samples["simulate"])}


def bench_sampled(num_blocks: int, most_blocks: int) -> Record:
    """In a process of its own, whose peak of memory is this case's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(sampled_case, (num_blocks, most_blocks))


def sampled_case(num_blocks: int, most_blocks: int) -> Record:
    before = peak_bytes()
    curve = LruCurve(BlockSampler(most_blocks=most_blocks))
    generate_s = count_s = 0.0
    started = time.perf_counter()
    for batch in trace(num_blocks):
        middle = time.perf_counter()
        curve.add(batch)
        ended = time.perf_counter()
        generate_s, count_s = generate_s + middle - started, count_s + ended - middle
        started = ended
    capacity = max(1, round(curve.num_unique / 8))
    misses = curve.misses(capacity)
    return {
        "case": "sampled",
        "blocks": curve.num_blocks,
        "blocks_per_s": curve.num_blocks / count_s,
        "generate_s": generate_s,
        "count_s": count_s,
        "peak_mib": (peak_bytes() - before) / 2**20,
        "sampled_blocks": curve.distances.num_blocks,
        "rate": curve.sampler.rate,
        "unique_blocks": round(curve.num_unique),
        "capacity_blocks": capacity,
        "hit_ratio": 1 - misses.blocks / curve.num_blocks,
        "error": misses.error_blocks / curve.num_blocks,
    }


def peak_bytes() -> int:
    """Not ``ru_maxrss``, which a child has from its parent."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def speed(num_blocks: int, seconds: list[float]) -> Record:
    found = summarize(seconds)
    return {"blocks_per_s": num_blocks / found["median"], "seconds": found}


def measure(arguments: Namespace) -> list[Record]:
    say("checking answers")
    check_answers()
    cases = {
        "read": lambda: bench_read(arguments.blocks // 5, arguments.runs),
        "exact": lambda: bench_exact(arguments.blocks, arguments.runs),
        "simulated": lambda: bench_simulated(arguments.blocks // 20, arguments.runs),
        "sampled": lambda: bench_sampled(arguments.sampled_blocks, arguments.most_blocks),
    }
    wanted = arguments.only.split(",") if arguments.only else list(cases)
    return [cases[name]() for name in wanted]


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
