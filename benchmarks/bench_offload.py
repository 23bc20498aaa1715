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
    tokens_per_s     prompt tokens answered for, over the time it took

Every document's answer is first computed without a cache, and every later one compared with it.
"""

import itertools
import statistics
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

import workload
from harness import Record, main, say, summarize

OPTIONS = {
    "model": "demo",
    "dtype": "bfloat16",
    "document_tokens": 560,
    "output_tokens": 4,
    "device_documents": 2,
    "host_documents": 4,
    "disk_documents": 8,
    "multiples": "0.5,1,2,4,8",
    "popularity": "uniform,zipf",
    "tiers": "device,host,disk",
    "questions": 2.0,  # counted ones, per document
    "least_questions": 32,
    "seed": 0,
}
SPARE_TOKENS = 64  # template and question
EVERY = 4  # every so manieth question is also asked of the engine without a cache


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

    def ask(self, llm, number: int):
        text = workload.document(number, self.options.document_tokens)
        document = llm.document(text, prefill=False)
        output = document.ask(workload.QUESTION, self.params)
        if llm is self.plain:
            self.answers.expect(number, output.outputs[0])
        else:
            self.answers.check(number, output.outputs[0].token_ids)
        return output

    def sizes(self, tier: str, directory: str) -> tuple[dict, int]:
        """Settings of an engine whose slowest tier is ``tier``, and documents that tier holds."""
        options = self.options
        # Of a prompt whole blocks stay, the shared head of the template once.
        blocks = -(-self.max_len // 16)
        document_bytes = blocks * self.block_bytes
        sizes = {"device_cache": options.device_documents * document_bytes, "host_cache": 0}
        holds = options.device_documents
        if tier in ("host", "disk"):
            holds = options.host_documents
            sizes["host_cache"] = holds * document_bytes
        if tier == "disk":
            holds = options.disk_documents
            # LMDB rounds payloads up to pages, and eviction stops at a share of the capacity.
            sizes["disk_cache"] = directory
            sizes["disk_cache_size"] = int(holds * document_bytes / 0.8)
        return sizes, holds

    def point(self, llm, popularity: str, count: int, multiple: float, tier: str) -> Record:
        """Ask questions about ``count`` documents and see where their blocks come from."""
        options = self.options
        num_questions = max(options.least_questions, round(options.questions * count))
        order = workload.draws(popularity, count, count + num_questions, options.seed)
        for number in order[:count]:  # until the tiers hold what this popularity puts there
            self.ask(llm, number)
        found: Counter[str] = Counter()
        seconds, recomputed, spent = [], [], 0.0
        for asked, number in enumerate(order[count:]):
            started = time.perf_counter()
            output = self.ask(llm, number)
            spent += time.perf_counter() - started
            seconds.append(output.metrics.ttft_s)
            found.update(output.metrics.cached_tokens)
            found["computed"] += output.metrics.computed_tokens
            if asked % EVERY == 0:
                recomputed.append(self.ask(self.plain, number).metrics.ttft_s)
        held = llm.stats().tiers[tier]
        tokens_held = 16 * held.used_blocks
        total = found.total()
        return {
            "case": f"{tier} {popularity} {multiple:g}",
            "tier": tier,
            "popularity": popularity,
            "multiple": multiple,
            "documents": count,
            "questions": num_questions,
            "hit_share": {name: round(tokens / total, 4) for name, tokens in found.items()},
            "ttft_s": summarize(seconds),
            "recompute_ttft_s": summarize(recomputed),
            "over": "recomputing",
            "ratio": statistics.mean(seconds) / statistics.mean(recomputed),
            "tokens_per_gib": tokens_held and round(tokens_held / (held.used_bytes / 2**30)),
            "tokens_per_s": total / spent,
        }


def points(bench: Bench, tier: str) -> Iterator[Record]:
    options = bench.options
    multiples = [float(each) for each in options.multiples.split(",")]
    for multiple, popularity in itertools.product(multiples, options.popularity.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            sizes, holds = bench.sizes(tier, directory)
            count = max(1, round(multiple * holds))
            say(f"{tier}: {count} documents, {popularity}")
            for number in range(count):
                if not bench.answers.knows(number):
                    bench.ask(bench.plain, number)
            with bench.cached(**sizes) as llm:
                yield bench.point(llm, popularity, count, multiple, tier)


def measure(arguments: Namespace) -> list[Record]:
    bench = Bench(arguments)
    records = [record for tier in arguments.tiers.split(",") for record in points(bench, tier)]
    bench.plain.close()
    say(f"{bench.answers.num_compared} answers compared, {bench.answers.num_ties} parted at a tie")
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
