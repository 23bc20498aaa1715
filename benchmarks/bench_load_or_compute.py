"""Time to first token of a question about a cached document: load it, compute it, or decide.

Three engines share one cache directory on a disk whose bandwidth is limited: one always loads, one
always computes, one decides by what it has measured. Each case is a length of the document and a
bandwidth; where load and compute cross, the third should follow the faster one.

The third engine's own requests are all it learns from. In a first round, which is not counted, it
notices that the bandwidth has changed; there it is made to draw the lot, one in 32, of trying a
disk that was too slow. Later rounds in which it draws it are counted as probes and left out.
"""

import random
import statistics
import tempfile
from argparse import Namespace
from dataclasses import asdict

from harness import Record, main, paired_ratio, say, summarize

from engine import LLM, SamplingParams
from kvstore.testing import FaultyDisk

QUESTION_TOKENS = 24
MOST_OVER_BEST = 1.1
OPTIONS = {"runs": 3, "model": "demo", "tokens": "256,512,1024", "mb_per_s": "256,64,16,4"}
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
SETTINGS = {
    "device_cache": "512MiB",
    "max_model_len": 4096,
    # Nothing is written while times are taken: the limited disk would be busy with it.
    "store_config": {"write_policy": "write_back"},
}
CONTENDERS = {"load": "always", "compute": "never", "auto": "auto"}


class Contender:
    """An engine with a disk that can be slowed down."""

    def __init__(self, policy: str, model: str, directory: str) -> None:
        # "never" would not even ask the disk; what is compared is computing in spite of a hit.
        self.llm = LLM(model, disk_cache=directory, load_policy="auto", **SETTINGS)
        store = self.llm._core.store
        self.cost = store.cost
        self.cost.policy = policy
        self.disk = FaultyDisk(store._transfer._disk)
        store._transfer._disk = self.disk

    def ask(self, prompt: list[int]) -> tuple[float, list[int], dict]:
        """Seconds to the first token, the token, and what was decided."""
        self.llm.reset_prefix_cache(tier="device")
        (output,) = self.llm.generate([prompt], PARAMS)
        decision = asdict(output.metrics.load_decision)
        return output.metrics.ttft_s, output.outputs[0].token_ids, decision

    @property
    def num_probes(self) -> int:
        return self.llm.stats().load_decisions.get("probe", 0)

    def close(self) -> None:
        self.disk.bytes_per_s = float("inf")
        self.llm.close()


def bench_case(
    contenders: dict[str, Contender],
    document: list[int],
    bytes_per_s: float,
    rng: random.Random,
    runs: int,
) -> dict:
    for contender in contenders.values():
        contender.disk.bytes_per_s = bytes_per_s
    times: dict[str, list[float]] = {name: [] for name in contenders}
    probes, reasons = 0, []
    for number in range(runs + 1):
        contenders["auto"].cost.uniform = random.random if number else lambda: 0.0
        question = [rng.randrange(1000, 40_000) for _ in range(QUESTION_TOKENS)]
        answers, taken = [], {}
        probes_before = contenders["auto"].num_probes
        for name, contender in contenders.items():
            taken[name], token_ids, decision = contender.ask(document + question)
            answers.append(token_ids)
        assert answers.count(answers[0]) == len(answers), "the contenders' answers differ"
        if number == 0:
            continue
        reasons.append(decision["reason"].value)
        if contenders["auto"].num_probes > probes_before:
            probes += 1
            continue
        for name, seconds in taken.items():
            times[name].append(seconds)
    # The best of the medians: the smaller of two noisy times would beat both of them.
    best = min(("load", "compute"), key=lambda name: statistics.median(times[name]))
    return {
        "case": "auto",
        "document_tokens": len(document),
        "disk_mb_per_s": bytes_per_s / 1e6,
        **{f"{name}_s": summarize(each) for name, each in times.items()},
        "best": best,
        "over": "the better of both",
        "ratio": paired_ratio(times["auto"], times[best]),
        "goal": MOST_OVER_BEST,
        "goal_is": "at most",
        "decided": statistics.mode(reasons),
        "probes": probes,
    }


def measure(arguments: Namespace) -> list[Record]:
    rng = random.Random(7)
    documents = [
        [rng.randrange(1000, 40_000) for _ in range(int(length))]
        for length in arguments.tokens.split(",")
    ]
    records = []
    with tempfile.TemporaryDirectory() as directory:
        contenders = {
            name: Contender(policy, arguments.model, f"{directory}/cache")
            for name, policy in CONTENDERS.items()
        }
        say("reading the documents")
        writer = contenders["auto"].llm  # its steps are what it knows of computing
        for document in documents:
            writer.generate([document], PARAMS)
        writer.flush()
        for document in documents:
            for megabytes in map(float, arguments.mb_per_s.split(",")):
                say(f"{len(document)} tokens at {megabytes:g} MB/s")
                records.append(
                    bench_case(contenders, document, 1e6 * megabytes, rng, arguments.runs)
                )
        for contender in contenders.values():
            contender.close()
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
