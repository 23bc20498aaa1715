"""Random workloads on tiny tiers give what transformers gives without any cache.

Each workload is a few acts on one engine after another over the same directory: prompts that share
beginnings, chat turns over earlier answers, several samples, aborts; a device of a few blocks, so
that they move and sequences are preempted; tiers that are emptied, disks that fail, are slow,
forget and flip bits; restarts. Every answer is compared with transformers' own
(``Eager.assert_answer``).

    .venv/bin/python tests/engine/test_differential.py SEED [COUNT]

runs the workloads from SEED on, and stops at the first that differs. Threads take turns as they
like, so a rare failure may need several runs of its seed.
"""

import contextlib
import functools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import lmdb
import pytest
import torch
from architectures import BLOCK, VOCAB, Eager, load, make_network

from engine import LLM, RequestOutput, SamplingParams
from engine.model_loader import LoadedModel
from engine.outputs import CompletionOutput
from kvstore.block import BlockRef
from kvstore.errors import BlockMissingError, CorruptBlockError, KVStoreError
from kvstore.testing import FaultyDisk
from kvstore.tiers.disk import LmdbTier

MODELS = ("Llama", "Gemma-3", "gpt-oss", "Qwen3-MoE", "GPT-2", "Mistral")
MAX_LEN = 64
LEAST_BLOCKS = MAX_LEN // BLOCK  # of the device: it must hold one sequence
NUM_REQUESTS = 6

NUM_IN_CI = 40
NUM_ASKED = int(os.environ.get("KVSTORE_ENGINE_WORKLOADS", NUM_IN_CI))
NUM_PROCESSES = 2


@functools.cache
def model(name: str) -> tuple[LoadedModel, Eager]:
    return load(name, max_model_len=MAX_LEN), Eager(make_network(name), MAX_LEN)


@dataclass(slots=True)
class Exchange:
    """A request and what came back, some of it while it ran."""

    prompt: list[int]
    params: SamplingParams
    answers: dict[int, CompletionOutput]


class Workload:
    """What one seed stands for. ``seen`` counts what happened, to know that something did."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.loaded, self.eager = model(MODELS[seed % len(MODELS)])
        self.directory = directory
        self.seen: Counter[str] = Counter()
        self.documents = [self.tokens(rng.randint(20, 50)) for _ in range(3)]
        self.dialogues: list[list[int]] = []  # prompts with their answers, to be continued
        self.num_left = NUM_REQUESTS
        self.disks: list[FaultyDisk] = []

    def run(self) -> None:
        while self.num_left:
            with self.engine() as llm:
                for _ in range(self.rng.randint(1, 3)):
                    self.act(llm)
                    if not self.num_left:
                        break
                    self.disturb(llm)
                self.count(llm)
            if self.directory.joinpath("data.mdb").exists() and self.rng.random() < 0.3:
                self.flip_a_bit()
            self.seen["restarts"] += self.num_left > 0

    # ---- engines -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def engine(self) -> Iterator[LLM]:
        with (
            patch("engine.llm.load_model", lambda *_, **__: self.loaded),
            patch("engine.parts.LmdbTier", self.faulty_disk),
            LLM("tiny", **self.settings()) as llm,
        ):
            yield llm
        self.disks.clear()

    def settings(self) -> dict:
        rng, size = self.rng, self.loaded.layout.block_bytes
        num_seqs = rng.randint(1, NUM_REQUESTS)
        return {
            "block_size": BLOCK,
            "max_model_len": MAX_LEN,
            "device_cache": size * (LEAST_BLOCKS + rng.choice([0, 0, 0, 2, 8])),
            "host_cache": size * rng.choice([0, 1, 4, 10, 20]),
            "disk_cache": self.directory if rng.random() < 0.8 else None,
            "disk_cache_size": "4MiB",
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": num_seqs + rng.choice([0, 3, 10, 60]),
            "load_policy": rng.choice(["always", "always", "always", "auto", "never"]),
            "write_policy": rng.choice(["write_behind", "write_through", "write_back", "min_hits"]),
            "enable_prefix_caching": rng.random() < 0.95,
            "skip_tokenizer_init": True,
            "store_config": {
                "dirty_max_age_s": rng.choice([0.0, 0.005, 100.0]),
                "group_commit_s": 0.0,
                "namespace_quota": rng.choice([None, size * 12]),
                "policy": rng.choice(["lru", "slru", "s3-fifo"]),
                "min_hits": rng.randint(1, 2),
                "min_partial_tokens": rng.randint(1, BLOCK),
                "promote_deadline_s": rng.choice([None, None, 0.0, 0.002]),
                "low_watermark": (low := rng.uniform(0.1, 0.8)),
                "high_watermark": rng.uniform(low, 1.0),
            },
        }

    def faulty_disk(self, disk) -> FaultyDisk:
        """The tier the engine opens. How it fails is drawn anew by ``disturb``."""
        tier = FaultyDisk(LmdbTier(disk))
        self.disks.append(tier)
        self.draw_faults(tier)
        return tier

    def draw_faults(self, disk: FaultyDisk) -> None:
        rng = self.rng
        disk.is_broken = rng.random() < 0.1
        disk.delay_s = rng.choice([0.0, 0.0, 0.0, 0.001, 0.01])
        rate, faults = rng.choice([0.0, 0.0, 0.3, 1.0]), random.Random(rng.random())

        def fail(ref: BlockRef) -> KVStoreError | None:
            if faults.random() >= rate:
                return None
            if faults.random() < 0.5:
                return BlockMissingError("it has gone")
            return CorruptBlockError("its bytes are others", reason="checksum")

        disk.fail_reads = fail

    def disturb(self, llm: LLM) -> None:
        """What happens between two acts."""
        for disk in self.disks:
            self.draw_faults(disk)
        if any(disk.is_broken for disk in self.disks):
            return  # what follows would wait for it
        event = self.rng.choice(
            ["nothing", "flush", *["forget device"] * 3, "forget host", "forget all"]
        )
        if event == "flush":
            llm.flush()
        elif event.startswith("forget"):
            tier = event.removeprefix("forget ")
            llm.reset_prefix_cache(None if tier == "all" else tier)

    def flip_a_bit(self) -> None:
        """Of one block on disk, past the store and its checksums."""
        env = lmdb.open(str(self.directory), max_dbs=16, readonly=True, lock=False)
        with env.begin() as txn:
            payloads = env.open_db(b"payload", txn, create=False)
            values = [bytes(value) for _, value in txn.cursor(payloads)]
        env.close()
        if values:
            file = self.directory / "data.mdb"
            data = bytearray(file.read_bytes())
            value = self.rng.choice(values)
            data[data.find(value[:256]) + self.rng.randrange(len(value))] ^= 1 << 4
            file.write_bytes(data)
            self.seen["flipped bits"] += 1

    # ---- requests ------------------------------------------------------------------------------

    def act(self, llm: LLM) -> None:
        """Some requests at once, and a look at their answers and at the cache."""
        count = min(self.num_left, self.rng.choice([1, 1, 2, 3, 6]))
        self.num_left -= count
        asked = [Exchange(self.prompt(), self.params(), {}) for _ in range(count)]
        salt = self.rng.choice([None, None, None, "other"])
        streamed = self.rng.random() < 0.4
        (self.stream if streamed else self.generate)(llm, asked, salt)
        for exchange in asked:
            for answer in exchange.answers.values():
                self.compare(exchange, answer)
        assert llm.check() == []

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def prompt(self) -> list[int]:
        begin = self.rng.choice([*self.documents, *self.dialogues])
        end = self.tokens(self.rng.choice([1, 1, 2, 7, 8, 9, 20]))
        cut = len(begin) if self.rng.random() < 0.8 else self.rng.randint(1, len(begin))
        return (begin[:cut] + end)[: MAX_LEN - self.rng.randint(1, 12)]

    def params(self) -> SamplingParams:
        rng = self.rng
        drawn = {"temperature": 1.0, "seed": rng.randrange(1000), "n": rng.choice([1, 2])}
        return SamplingParams(
            **(drawn if rng.random() < 0.3 else {"temperature": 0.0}),
            max_tokens=rng.choice([1, 4, 12]),
            ignore_eos=rng.random() < 0.5,
            logprobs=-1,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )

    def generate(self, llm: LLM, asked: list[Exchange], salt: str | None) -> None:
        prompts, params = [each.prompt for each in asked], [each.params for each in asked]
        outputs = llm.generate(prompts, params, cache_salt=salt, use_tqdm=False)
        for exchange, output in zip(asked, outputs, strict=True):
            self.keep(exchange, output)
            cached = output.metrics.cached_tokens
            assert sum(cached.values()) + output.metrics.computed_tokens == len(exchange.prompt)
            self.seen.update({f"from {tier}": count for tier, count in cached.items()})

    def stream(self, llm: LLM, asked: list[Exchange], salt: str | None) -> None:
        """Read deltas, and abort some requests, or all that are left, on the way."""
        prompts, params = [each.prompt for each in asked], [each.params for each in asked]
        with llm.generate(prompts, params, cache_salt=salt, stream=True) as deltas:
            exchanges = dict(zip(deltas.request_ids, asked, strict=True))
            stop_after = self.rng.choice([1000, 1000, self.rng.randint(1, 8)])
            for number, delta in enumerate(deltas):
                self.keep(exchanges[delta.request_id], delta)
                if self.rng.random() < 0.1:
                    llm._core.abort([self.rng.choice(deltas.request_ids)])
                    self.seen["aborts"] += 1
                if number == stop_after:
                    self.seen["aborts"] += 1
                    break

    def keep(self, exchange: Exchange, output: RequestOutput) -> None:
        """Add what is new to what is known of the answers; all of it, where it came at once."""
        if output.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(exchange.prompt)
        for part in output.outputs:
            old = exchange.answers.get(part.index)
            exchange.answers[part.index] = part if old is None else joined(old, part)
            if part.finish_reason in ("stop", "length"):
                answer = exchange.answers[part.index].token_ids
                self.dialogues.append((exchange.prompt + answer)[: MAX_LEN - 4])

    def compare(self, exchange: Exchange, answer: CompletionOutput) -> None:
        self.seen["answers"] += 1
        assert answer.finish_reason or len(answer.token_ids) <= exchange.params.max_tokens
        if answer.token_ids:
            is_greedy = exchange.params.is_greedy
            self.eager.assert_answer(exchange.prompt, answer, is_greedy=is_greedy)

    def count(self, llm: LLM) -> None:
        stats = llm.stats()
        self.seen["preemptions"] += llm._core.scheduler.num_preemptions
        self.seen["failed loads"] += sum(stats.failed_loads.values())
        self.seen["evicted blocks"] += stats.tiers["device"].evicted_blocks


def joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        index=new.index,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
        logprobs=(old.logprobs or []) + (new.logprobs or []),
    )


def run_workload(seed: int) -> Counter[str]:
    with TemporaryDirectory(prefix="workload-") as directory:
        workload = Workload(seed, Path(directory))
        try:
            workload.run()
        except BaseException as error:
            error.add_note(f"workload {seed}: python tests/engine/test_differential.py {seed}")
            raise
    return workload.seen


def run_workloads(first: int, count: int) -> Counter[str]:
    torch.set_num_threads(1)
    return sum((run_workload(seed) for seed in range(first, first + count)), Counter())


@pytest.fixture
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(NUM_ASKED != NUM_IN_CI, reason="the long run has these workloads too")
def test_random_workloads_answer_as_transformers_does(one_torch_thread):
    seen = run_workloads(0, NUM_IN_CI)
    print(dict(seen))
    happened = ["from device", "from host", "from disk", "preemptions", "evicted blocks"]
    happened += ["aborts", "failed loads", "flipped bits", "restarts"]
    assert [event for event in happened if not seen[event]] == []


@pytest.mark.skipif(NUM_ASKED == NUM_IN_CI, reason="KVSTORE_ENGINE_WORKLOADS asks for no more")
def test_the_long_run_of_workloads_answers_as_transformers_does():
    share = -(-NUM_ASKED // NUM_PROCESSES)
    commands = [
        [sys.executable, __file__, f"{i * share}", f"{share}"] for i in range(NUM_PROCESSES)
    ]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0] * NUM_PROCESSES


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int((*sys.argv, "1")[2])
    print(f"workloads {first} to {first + count - 1}:", dict(run_workloads(first, count)))
