"""Random workloads on tiny tiers give what transformers gives without any cache.

Each workload is a few acts on one engine after another over the same directory: prompts that share
beginnings, chat turns over earlier answers, several samples, forks, aborts; a device of a few
blocks, so that they move and sequences are preempted; tiers that are emptied; disks that fail,
forget, are slow, and whose bits flip; restarts. Every answer is compared with transformers' own
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
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import lmdb
import torch
from architectures import BLOCK, VOCAB, Eager, make_network, make_tokenizer

from engine import LLM, RequestOutput, SamplingParams
from engine.generation import Generation
from engine.model.loader import LoadedModel, prepare_model
from engine.outputs import CompletionOutput
from kvstore.block import BlockRef
from kvstore.errors import BlockMissingError, CorruptBlockError, KVStoreError
from kvstore.testing import FaultyDisk
from kvstore.tiers.disk import LmdbTier

MODELS = ("Llama", "Gemma-3", "gpt-oss", "Qwen3-MoE", "GPT-2", "Mistral")
MAX_LEN = 64
LEAST_BLOCKS = MAX_LEN // BLOCK  # of the device: it must hold one sequence
NUM_REQUESTS = 6
EOS = 2

TEMPLATE = """{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}\
{% if add_generation_prompt %}a:{% endif %}"""

NUM_IN_CI = 40
NUM_ASKED = int(os.environ.get("KVSTORE_ENGINE_WORKLOADS", NUM_IN_CI))
NUM_PROCESSES = 2


@functools.cache
def model(name: str) -> tuple[LoadedModel, Eager]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    loaded = prepare_model(
        make_network(name), tokenizer, name=name, block_size=BLOCK, max_model_len=MAX_LEN
    )
    return loaded, Eager(make_network(name), MAX_LEN)


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
            "host_cache": size * rng.choice([0, 2, 8, 15, 30]),
            "disk_cache": self.directory if rng.random() < 0.7 else None,
            "disk_cache_size": "4MiB",
            "max_num_seqs": num_seqs,
            "max_num_batched_tokens": num_seqs + rng.choice([0, 3, 10, 60]),
            "load_policy": rng.choice(["always", "always", "always", "auto", "never"]),
            "write_policy": rng.choice(["write_behind", "write_through", "write_back", "min_hits"]),
            "enable_prefix_caching": rng.random() < 0.95,
            "scheduling_policy": rng.choice(["fcfs", "longest_prefix"]),
            "store_config": {
                "dirty_max_age_s": rng.choice([0.0, 0.005, 100.0]),
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
        """Some requests, and a look at their answers and at the cache."""
        kind = self.rng.choice([self.generate, self.generate, self.stream, self.branch, self.chat])
        count = min(self.num_left, self.rng.choice([1, 1, 2, 3, 6]))
        self.num_left -= count
        kind(llm, count, self.rng.choice([None, None, None, "other"]))
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
            detokenize=False,
            prompt_logprobs=0 if rng.random() < 0.1 else None,
        )

    def generate(self, llm: LLM, count: int, salt: str | None) -> None:
        params = [self.params() for _ in range(count)]
        prompts = [self.prompt() for _ in range(count)]
        outputs = llm.generate(prompts, params, cache_salt=salt, use_tqdm=False)
        for each, output in zip(params, outputs, strict=True):
            self.compare(each, output)
            self.seen.update(
                {f"from {tier}": n for tier, n in output.metrics.cached_tokens.items()}
            )

    def stream(self, llm: LLM, count: int, salt: str | None) -> None:
        """Read deltas, and abort some requests, or all that are left, on the way."""
        params = [self.params() for _ in range(count)]
        prompts = [self.prompt() for _ in range(count)]
        answers: dict[tuple[str, int], CompletionOutput] = {}
        stop_after = self.rng.choice([1000, 1000, self.rng.randint(1, 8)])
        with llm.generate(prompts, params, cache_salt=salt, stream=True) as deltas:
            asked = dict(zip(deltas.request_ids, zip(prompts, params, strict=True), strict=True))
            for number, delta in enumerate(deltas):
                for part in delta.outputs:
                    key = (delta.request_id, part.index)
                    answers[key] = joined(answers[key], part) if key in answers else part
                if number == stop_after or self.rng.random() < 0.1:
                    self.seen["aborts"] += 1
                    llm.abort(self.rng.choice(deltas.request_ids))
                if number == stop_after:
                    break
        for (request_id, _), answer in answers.items():
            self.compare_answer(*asked[request_id], answer)

    def branch(self, llm: LLM, count: int, salt: str | None) -> None:
        """Answers that are forked and aborted where they happen to be."""
        asked: list[tuple[SamplingParams, Generation]] = []
        for number in range(count):
            params = self.params()
            if number and self.rng.random() < 0.7:
                parent_params, parent = self.rng.choice(asked)
                wanted = self.rng.randint(0, 4)
                while not parent.is_finished and num_tokens(parent.so_far()) < wanted:
                    pass
                index = self.rng.randrange(parent_params.n)
                more = self.tokens(self.rng.choice([0, 0, 1, 5]))
                generation = parent.fork(params, append=more, index=index)
                self.seen["forks"] += 1
            else:
                generation = llm.start(self.prompt()[: MAX_LEN // 2], params, cache_salt=salt)
            asked.append((params, generation))
            if self.rng.random() < 0.1:
                self.rng.choice(asked)[1].abort()
                self.seen["aborts"] += 1
        for params, generation in asked:
            self.compare(params, generation.result())

    def chat(self, llm: LLM, count: int, salt: str | None) -> None:
        """Turns of one conversation, or of two that part ways."""
        sessions = [llm.session("Hi" if self.rng.random() < 0.5 else None, cache_salt=salt)]
        for _ in range(min(count, 3)):
            if self.rng.random() < 0.3:
                sessions.append(sessions[0].fork())
            params = replace(self.params(), n=1, max_tokens=self.rng.choice([1, 4]))
            output = self.rng.choice(sessions).ask(self.rng.choice(["a", "bcd"]), params)
            self.compare(params, output)
            self.seen["turns"] += 1

    def compare(self, params: SamplingParams, output: RequestOutput) -> None:
        prompt, cached = output.prompt_token_ids, output.metrics.cached_tokens
        assert sum(cached.values()) + output.metrics.computed_tokens == len(prompt)
        if output.prompt_logprobs is not None:
            assert len(output.prompt_logprobs) == len(prompt)
        for answer in output.outputs:
            self.compare_answer(prompt, params, answer)

    def compare_answer(
        self, prompt: list[int], params: SamplingParams, answer: CompletionOutput
    ) -> None:
        if answer.token_ids:
            is_told = self.eager.assert_answer(prompt, answer, is_greedy=params.is_greedy)
            self.seen["answers" if is_told else "ties of experts"] += 1
        if answer.finish_reason in ("stop", "length"):
            most = min(params.max_tokens, MAX_LEN - len(prompt))
            is_whole = len(answer.token_ids) == most or answer.token_ids[-1] == EOS
            assert is_whole, "it ended early"
            self.dialogues.append((prompt + answer.token_ids)[: MAX_LEN - 4])

    def count(self, llm: LLM) -> None:
        stats = llm.stats()
        self.seen["preemptions"] += llm._core.scheduler.num_preemptions
        self.seen["failed loads"] += sum(stats.failed_loads.values())
        self.seen["evicted blocks"] += stats.tiers["device"].evicted_blocks


def num_tokens(output: RequestOutput) -> int:
    return max(len(sample.token_ids) for sample in output.outputs)


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
    seen = sum((run_workload(seed) for seed in range(first, first + count)), Counter[str]())
    # A document with one makes a tie of every answer about it, so they come in dozens.
    assert seen["ties of experts"] <= 20 + seen["answers"] // 1000
    return seen


def test_random_workloads_answer_as_transformers_does(one_torch_thread):
    if NUM_ASKED > NUM_IN_CI:
        run_in_processes()
        return
    seen = run_workloads(0, NUM_ASKED)
    rare = ["from device", "from host", "from disk", "preemptions", "evicted blocks"]
    rare += ["forks", "turns", "aborts", "failed loads", "flipped bits", "restarts"]
    # What a workload does depends on whose turn it is, too: some go on until all has happened.
    for seed in range(NUM_ASKED, 10 * NUM_ASKED):
        if all(seen[event] for event in rare):
            break
        seen += run_workloads(seed, 1)
    assert [event for event in rare if not seen[event]] == []


def run_in_processes() -> None:
    share = -(-NUM_ASKED // NUM_PROCESSES)
    commands = [
        [sys.executable, __file__, f"{i * share}", f"{share}"] for i in range(NUM_PROCESSES)
    ]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait() for process in processes] == [0] * NUM_PROCESSES


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int((*sys.argv, "1")[2])
    print(f"workloads {first} to {first + count - 1}:", dict(run_workloads(first, count)))
