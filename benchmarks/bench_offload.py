"""What a tier is worth when everything overflows: hits, time to first token, throughput.

Documents whose KV together is a multiple of the slowest tier's capacity are asked about in random
order, all equally often or by Zipf's law, one question at a time. Each point is one multiple, one
popularity and one set of tiers: device alone, device and host, or device, host and disk. Device
and host hold two and four documents and disk eight, by default, so each tier overflows into the
next one.

    hit_share        prompt tokens by the fastest tier that held them, and computed ones
    ttft_s           with the cache; recompute_ttft_s: an engine without, on some of the questions
    ratio            mean time to first token over that of recomputing: where half of the questions
                     hit, a median would show only one half
    tokens_per_gib   tokens the slowest tier holds for each GiB that it takes
    tokens_per_s     prompt tokens answered for, over the time it took;
                     recompute_tokens_per_s: the same of the engine without

Every document's answer is first computed without a cache, and every later one compared with it.
Before a point's questions the tiers are filled, the most popular document last.

For longer documents and more questions: --document-tokens 2000 --questions 200
"""

import itertools
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import workload
from harness import Progress, Record, main, say, summarize

OPTIONS = {
    "model": "demo",
    "dtype": "bfloat16",
    "document_tokens": 320,
    "output_tokens": 2,
    "device_documents": 2,
    "host_documents": 4,
    "disk_documents": 8,
    "multiples": "0.5,1,2,4,8",
    "popularity": "uniform,zipf",
    "tiers": "device,host,disk",
    "questions": 48,  # of a point, counted ones
    "seed": 0,
}
SPARE_TOKENS = 64  # template and question
EVERY = 8  # every so manieth question is also asked of the engine without a cache
TOGETHER = 8  # first answers are computed so many at a time
# Time of a hit over that of a miss, for the estimate of what is left.
HIT_OVER_MISS = 0.2


@dataclass(frozen=True, slots=True)
class Point:
    """One multiple of a tier that holds ``holds`` documents, under one popularity."""

    tier: str
    popularity: str
    multiple: float
    holds: int

    @property
    def num_documents(self) -> int:
        return max(1, round(self.multiple * self.holds))

    @property
    def num_filling(self) -> int:
        """The most popular documents, twice what fits: read before questions count."""
        return min(self.num_documents, 2 * self.holds)

    def work(self, num_questions: int) -> float:
        """About how many documents it takes as long to read; popular ones are found oftener."""
        missing = max(0.0, 1 - self.holds / self.num_documents)
        asked = self.num_filling + num_questions * (missing + HIT_OVER_MISS)
        return asked + num_questions / EVERY


class Bench:
    """The options, an engine without a cache, and the answers it gave."""

    def __init__(self, options: Namespace) -> None:
        from engine import LLM, SamplingParams

        self.options = options
        self.max_len = options.document_tokens + SPARE_TOKENS + options.output_tokens
        common = {"dtype": options.dtype, "max_model_len": self.max_len}
        self.plain = LLM(options.model, enable_prefix_caching=False, **common)
        self.cached = lambda **sizes: LLM(options.model, load_policy="always", **common, **sizes)
        self.params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, logprobs=2)
        self.block_bytes = self.plain.stats().block_bytes
        self.answers = workload.Answers(options.dtype)

    def document(self, llm, number: int):
        text = workload.document(number, self.options.document_tokens)
        return llm.document(text, prefill=False)

    def ask(self, llm, number: int):
        output = self.document(llm, number).ask(workload.QUESTION, self.params)
        self.answers.check(number, output.outputs[0].token_ids)
        return output

    def answer_uncached(self, numbers: range, progress: Progress) -> None:
        for first in range(0, len(numbers), TOGETHER):
            some = numbers[first : first + TOGETHER]
            documents = [self.document(self.plain, number) for number in some]
            prompts = [document.prompt_token_ids(workload.QUESTION) for document in documents]
            outputs = self.plain.generate(prompts, self.params, use_tqdm=False)
            for number, output in zip(some, outputs, strict=True):
                self.answers.expect(number, output.outputs[0])
            progress.add(len(some), "answers without a cache")

    def sizes(self, tier: str, directory: str) -> dict:
        """Settings of an engine whose slowest tier is ``tier``."""
        options = self.options
        # Of a prompt whole blocks stay, the shared head of the template once.
        document_bytes = -(-self.max_len // 16) * self.block_bytes
        sizes = {"device_cache": options.device_documents * document_bytes, "host_cache": 0}
        if tier in ("host", "disk"):
            sizes["host_cache"] = options.host_documents * document_bytes
        if tier == "disk":
            # LMDB rounds payloads up to pages, and eviction stops at a share of the capacity.
            sizes["disk_cache"] = directory
            sizes["disk_cache_size"] = int(options.disk_documents * document_bytes / 0.8)
        return sizes

    def measure(self, llm, point: Point) -> Record:
        """Ask questions about the point's documents and see where their blocks come from."""
        options, count = self.options, point.num_documents
        order = workload.draws(point.popularity, count, options.questions, options.seed)
        for number in reversed(range(point.num_filling)):
            self.ask(llm, number)
        found: Counter[str] = Counter()
        seconds, recomputed = [], []
        spent, recomputing_spent, recomputed_tokens = 0.0, 0.0, 0
        for asked, number in enumerate(order):
            started = time.perf_counter()
            output = self.ask(llm, number)
            ended = time.perf_counter()
            spent += ended - started
            seconds.append(output.metrics.ttft_s)
            found.update(output.metrics.cached_tokens)
            found["computed"] += output.metrics.computed_tokens
            if asked % EVERY == 0:
                recomputed.append(self.ask(self.plain, number).metrics.ttft_s)
                recomputing_spent += time.perf_counter() - ended
                recomputed_tokens += len(output.prompt_token_ids)
        held = llm.stats().tiers[point.tier]
        tokens_held = 16 * held.used_blocks
        total = found.total()
        return {
            "case": f"{point.tier} {point.popularity} {point.multiple:g}",
            "tier": point.tier,
            "popularity": point.popularity,
            "multiple": point.multiple,
            "documents": count,
            "document_tokens": options.document_tokens,
            "questions": options.questions,
            "hit_share": {name: round(tokens / total, 4) for name, tokens in found.items()},
            "ttft_s": summarize(seconds),
            "recompute_ttft_s": summarize(recomputed),
            "over": "recomputing",
            "ratio": statistics.mean(seconds) / statistics.mean(recomputed),
            "tokens_per_gib": tokens_held and round(tokens_held / (held.used_bytes / 2**30)),
            "tokens_per_s": total / spent,
            "recompute_tokens_per_s": recomputed_tokens / recomputing_spent,
        }


def points(options: Namespace) -> Iterator[Point]:
    multiples = [float(each) for each in options.multiples.split(",")]
    popularities = options.popularity.split(",")
    for tier in options.tiers.split(","):
        holds = getattr(options, f"{tier}_documents")
        for multiple, popularity in itertools.product(multiples, popularities):
            yield Point(tier, popularity, multiple, holds)


def measure(arguments: Namespace) -> list[Record]:
    bench = Bench(arguments)
    every = list(points(arguments))
    most = max(point.num_documents for point in every)
    progress = Progress(most + sum(point.work(arguments.questions) for point in every))
    bench.answer_uncached(range(most), progress)
    records = []
    for tier, group in itertools.groupby(every, lambda point: point.tier):
        with (
            tempfile.TemporaryDirectory() as directory,
            bench.cached(**bench.sizes(tier, directory)) as llm,
        ):
            for point in group:
                assert llm.reset_prefix_cache() == 0, "blocks of the point before are in use"
                records.append(bench.measure(llm, point))
                progress.add(point.work(arguments.questions), records[-1]["case"])
    bench.plain.close()
    say(f"{bench.answers.num_compared} answers compared, {bench.answers.num_ties} parted at a tie")
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
