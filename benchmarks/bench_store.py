"""The block store by itself: matching, bookkeeping at a million blocks, memory, promotion.

match       a prompt of 131,072 tokens, all resident, over a bare loop of sha256 on the same blocks
bookkeeping match, reserve, commit and release of whole prompts, hashing included, by index size
memory      bytes of index per block beyond its tokens
promotion   a prefix of 100 MB from host to device, over one copy of that size
cleaning    a decode step of the demo model while blocks are written to disk, over one without
"""

import gc
import itertools
import random
import tempfile
import time
import tracemalloc
from argparse import Namespace
from hashlib import sha256

import numpy as np
from harness import Record, alternate, main, paired_ratio, say, summarize

from kvstore.block import BlockLayout, TierName
from kvstore.config import StoreConfig
from kvstore.hashing import encode_tokens, namespace_id
from kvstore.store import BlockStore
from kvstore.tiers.host import HostPool

NAMESPACE = namespace_id({"model": "bench"})
SMALL = BlockLayout(num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float16")
GOALS = {
    "match": {"goal": 2.5, "goal_is": "at most"},
    "bookkeeping": {"goal": 2.0, "goal_is": "at most"},
    "memory": {"over": "450 bytes", "goal": 1.0, "goal_is": "at most"},
    "promotion": {"goal": 0.8, "goal_is": "at least"},
    "cleaning": {"goal": 1.1, "goal_is": "at most"},
}
OPTIONS = {
    "runs": 9,
    "tokens": 131_072,
    "blocks": 1_000_000,
    "bytes": 100_000_000,
    "steps": 24,
    "only": "",
}


def random_tokens(rng: random.Random, count: int) -> bytes:
    return encode_tokens(np.frombuffer(rng.randbytes(4 * count), "<u4") % 50_000)


def make_store(num_blocks: int, **options) -> BlockStore:
    config = StoreConfig(load_policy="always", **options.pop("config", {}))
    pool = HostPool(num_blocks, SMALL.block_bytes)
    return BlockStore(SMALL, NAMESPACE, pool, config=config, **options)


def insert(store: BlockStore, tokens: bytes) -> None:
    """One whole request, its computing left out."""
    num_tokens = len(tokens) // 4
    lease = store.reserve(store.lookup(tokens), num_tokens)
    store.commit(lease, tokens, num_tokens)
    store.release(lease)


def bench_match(num_tokens: int, runs: int) -> dict:
    tokens = random_tokens(random.Random(1), num_tokens)
    store = make_store(num_tokens // 16 + 16)
    insert(store, tokens + tokens[:4])
    blocks = [tokens[start : start + 64] for start in range(0, len(tokens), 64)]

    def match() -> float:
        started = time.perf_counter()
        lookup = store.lookup(tokens, num_reusable=num_tokens)
        num_found = store.num_reusable_blocks(lookup)
        seconds = time.perf_counter() - started
        assert num_found == len(blocks), "not all of the prompt was found"
        return seconds

    def bare() -> float:
        started, key = time.perf_counter(), bytes(32)
        for block in blocks:
            key = sha256(key + block).digest()
        return time.perf_counter() - started

    samples = alternate({"match": match, "bare": bare}, runs)
    store.close()
    ratio = paired_ratio(samples["match"], samples["bare"])
    return {"case": "match", "tokens": num_tokens, "ratio": ratio, **GOALS["match"]} | {
        f"{name}_s": summarize(times) for name, times in samples.items()
    }


def bench_bookkeeping(small: int, large: int, runs: int) -> dict:
    rng = random.Random(2)
    prompt_blocks = 500
    stores = {size: make_store(size) for size in (small, large)}
    for size, store in stores.items():
        say(f"indexing {size} blocks")
        for _ in range(size // prompt_blocks + 1):
            insert(store, random_tokens(rng, 16 * prompt_blocks))
        assert len(store.index) > 0.9 * size

    def run(size: int) -> float:
        """Half of each prompt is known, as a question about a document finds it."""
        tokens = random_tokens(rng, 16 * prompt_blocks)
        insert(stores[size], tokens[: len(tokens) // 2])
        started = time.perf_counter()
        insert(stores[size], tokens)
        return (time.perf_counter() - started) / prompt_blocks

    samples = alternate({str(size): lambda size=size: run(size) for size in stores}, runs)
    for store in stores.values():
        assert store.check() == [] if len(store.index) < 50_000 else True
        store.close()
    ratio = paired_ratio(samples[str(large)], samples[str(small)])
    record = {"case": "bookkeeping", "ratio": ratio, **GOALS["bookkeeping"]}
    for size, times in samples.items():
        found = summarize(times)
        record |= {f"s_per_block_at_{size}": found}
        record |= {f"us_per_block_at_{size}": 1e6 * found["median"]}
    return record


def bench_memory(num_blocks: int) -> dict:
    rng = random.Random(3)
    store = make_store(num_blocks)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(num_blocks // 500):
        insert(store, random_tokens(rng, 16 * 500))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    count = len(store.index)
    store.close()
    of_tokens = 64 + 33  # a bytes object
    bytes_per_block = (after - before) / count - of_tokens
    return {
        "case": "memory",
        "blocks": count,
        "bytes_per_block": bytes_per_block,
        "ratio": bytes_per_block / 450,
        **GOALS["memory"],
    }


def bench_promotion(num_bytes: int, runs: int) -> dict:
    layout = BlockLayout(30, 16, 3, 64, "bfloat16")  # SmolLM2-135M's
    count = num_bytes // layout.block_bytes
    device = HostPool(count + 1, layout.block_bytes)  # one prompt pushes the other out
    config = StoreConfig(load_policy="always")
    store = BlockStore(layout, NAMESPACE, device, host_blocks=2 * count, config=config)
    rng = random.Random(4)
    prompts = [random_tokens(rng, 16 * count + 1) for _ in range(2)]

    def ask(tokens: bytes) -> float:
        lookup = store.lookup(tokens)
        started = time.perf_counter()
        while True:
            try:
                lease = store.reserve(lookup, 16 * count + 1)
                break
            except Exception:
                store.run_until_idle()
                started = time.perf_counter()
        moves = lease.num_loading
        while not lease.is_ready:
            store.run_until_idle()
        seconds = time.perf_counter() - started
        store.commit(lease, tokens, 16 * count + 1)
        store.release(lease)
        return seconds if moves == count else 0.0

    for prompt in (*prompts, *prompts):
        ask(prompt)
    turn, halves = itertools.count(), itertools.count()

    def promote() -> float:
        """Into free room: making room is the eviction's time."""
        store.reset(TierName.DEVICE)
        seconds = ask(prompts[next(turn) % 2])
        assert seconds, "the prefix did not come from host"
        return seconds

    def copy() -> float:
        """One copy of as many bytes, from where the prefix lies that is promoted next, to where it
        goes: a buffer that is copied again and again would come from the processor's cache, and
        memory of its own may lie in larger pages. What it overwrites is dropped before anybody asks
        for it."""
        assert store.host is not None
        first = next(halves) % 2 * count
        source = store.host.rows[first : first + count]
        started = time.perf_counter()
        np.copyto(device.rows[:count], source)
        return time.perf_counter() - started

    samples = alternate({"promote": promote, "copy": copy}, runs)
    store.close()
    return {
        "case": "promotion",
        "bytes": count * layout.block_bytes,
        "ratio": paired_ratio(samples["copy"], samples["promote"]),
        **GOALS["promotion"],
    } | {f"{name}_s": summarize(times) for name, times in samples.items()}


def bench_cleaning(steps: int) -> dict:
    """Two engines decode the same prompt; one has hundreds of dirty blocks to write meanwhile."""
    from engine import LLM, SamplingParams

    rng = random.Random(5)
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    settings = {"dtype": "bfloat16", "max_model_len": 4096, "load_policy": "always"}
    samples: dict[str, list[float]] = {"without": [], "cleaning": []}
    written = 0
    with tempfile.TemporaryDirectory() as directory:
        plain = LLM("demo", **settings)
        dirty = LLM(
            "demo",
            disk_cache=f"{directory}/cache",
            store_config={"dirty_max_age_s": 0.0},
            **settings,
        )
        for _ in range(6):
            document = [rng.randrange(1000, 40_000) for _ in range(3000)]
            prompt = document[:200]
            texts = []
            for name, llm in (("without", plain), ("cleaning", dirty)):
                llm.generate([document], SamplingParams(temperature=0.0, max_tokens=1))
                (output,) = llm.generate([[*prompt, 7]], params)
                samples[name].append(output.metrics.decode_s / (steps - 1))
                texts.append(output.outputs[0].token_ids)
            assert texts[0] == texts[1], "cleaning changed the answer"
            written = dirty.stats().written.written_blocks
        plain.close()
        dirty.close()
    assert written > 100, "nothing was being cleaned"
    return {
        "case": "cleaning",
        "ratio": paired_ratio(samples["cleaning"][1:], samples["without"][1:]),
        **GOALS["cleaning"],
    } | {f"{name}_step_s": summarize(times[1:]) for name, times in samples.items()}


def measure(arguments: Namespace) -> list[Record]:
    few = max(1000, arguments.blocks // 100)
    cases = {
        "match": lambda: bench_match(arguments.tokens, arguments.runs),
        "bookkeeping": lambda: bench_bookkeeping(few, arguments.blocks, arguments.runs),
        "memory": lambda: bench_memory(arguments.blocks // 10),
        "promotion": lambda: bench_promotion(arguments.bytes, arguments.runs),
        "cleaning": lambda: bench_cleaning(arguments.steps),
    }
    wanted = arguments.only.split(",") if arguments.only else list(cases)
    records = []
    for name in wanted:
        records.append(cases[name]())
        gc.collect()  # a store of a million blocks must not be collected during the next case
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
