"""Long documents, each asked about several times: the workload of vLLM's and LMCache's benchmarks.

A warm-up round reads every document, then the query round asks ``repeat_count`` questions about
each in the order of ``repeat_mode``: "random", "tile" (A B C A B C) or
"interleave" (A A B B C C). ``hit_miss_ratio`` "3:1" makes every fourth prompt of the query round
one that no round has read. ``max_inflight`` prompts run at once. The text is real.

The same rounds run on an engine without a cache, document by document side by side, and every
answer is compared with it.
"""

import random
import tempfile
import time
from argparse import Namespace
from collections import Counter

import workload
from harness import Record, main, paired_ratio, say, summarize

OPTIONS = {
    "model": "demo",
    "dtype": "bfloat16",
    "num_documents": 6,
    "document_length": 1500,
    "output_len": 16,
    "repeat_count": 2,
    "repeat_mode": "random",
    "shuffle_seed": 0,
    "hit_miss_ratio": "1:0",
    "max_inflight": 1,
    "device_cache": "128MiB",
    "host_cache": "256MiB",
    "disk_cache_size": "2GiB",
}


def query_round(options: Namespace) -> list[int]:
    """The document of each prompt; those that must miss ask about one that nobody has read."""
    documents = range(options.num_documents)
    if options.repeat_mode == "tile":
        order = [number for _ in range(options.repeat_count) for number in documents]
    elif options.repeat_mode == "interleave":
        order = [number for number in documents for _ in range(options.repeat_count)]
    elif options.repeat_mode == "random":
        order = [number for number in documents for _ in range(options.repeat_count)]
        random.Random(options.shuffle_seed).shuffle(order)
    else:
        raise SystemExit(
            f"--repeat-mode: expected random, tile or interleave, got {options.repeat_mode}"
        )
    hits, misses = map(int, options.hit_miss_ratio.split(":"))
    unread = iter(range(options.num_documents, options.num_documents + len(order)))
    return [
        number if at % (hits + misses) < hits else next(unread) for at, number in enumerate(order)
    ]


def measure(arguments: Namespace) -> list[Record]:
    from engine import LLM, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True, logprobs=2
    )
    common = {
        "dtype": arguments.dtype,
        "max_model_len": arguments.document_length + arguments.output_len + 128,
        "max_num_seqs": arguments.max_inflight,
    }
    answers = workload.Answers(arguments.dtype)

    def ask(llm, numbers: list[int]) -> tuple[float, list]:
        """Prompts that run at once; seconds from the first arrival to the last token."""
        prompts = [
            llm.document(
                workload.document(number, arguments.document_length), prefill=False
            ).prompt_token_ids(workload.QUESTION)
            for number in numbers
        ]
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    rounds = {
        "warmup": list(range(arguments.num_documents)),
        "query": query_round(arguments),
    }
    records = []
    with tempfile.TemporaryDirectory() as directory:
        plain = LLM(arguments.model, enable_prefix_caching=False, **common)
        cached = LLM(
            arguments.model,
            device_cache=arguments.device_cache,
            host_cache=arguments.host_cache,
            disk_cache=directory,
            disk_cache_size=arguments.disk_cache_size,
            **common,
        )
        for llm in (plain, cached):  # a document of its own: nothing that is timed finds it
            ask(llm, [1_000_000])
        for name, order in rounds.items():
            say(f"{name} round: {len(order)} prompts")
            seconds: dict[str, list[float]] = {"cached": [], "plain": []}
            firsts: dict[str, list[float]] = {"cached": [], "plain": []}
            found: Counter[str] = Counter()
            for first in range(0, len(order), arguments.max_inflight):
                group = order[first : first + arguments.max_inflight]
                took, outputs = ask(plain, group)
                seconds["plain"].append(took)
                firsts["plain"] += [output.metrics.ttft_s for output in outputs]
                for number, output in zip(group, outputs, strict=True):
                    answers.expect(number, output.outputs[0])
                took, outputs = ask(cached, group)
                seconds["cached"].append(took)
                firsts["cached"] += [output.metrics.ttft_s for output in outputs]
                for number, output in zip(group, outputs, strict=True):
                    answers.check(number, output.outputs[0].token_ids)
                    found.update(output.metrics.cached_tokens)
                    found["computed"] += output.metrics.computed_tokens
            total = found.total()
            num_tokens = total + len(order) * arguments.output_len
            records.append(
                {
                    "case": f"{name} round",
                    **{key: getattr(arguments, key) for key in OPTIONS},
                    "prompts": len(order),
                    "hit_share": {tier: round(n / total, 4) for tier, n in found.items()},
                    "ttft_s": summarize(firsts["cached"]),
                    "plain_ttft_s": summarize(firsts["plain"]),
                    "round_s": sum(seconds["cached"]),
                    "plain_round_s": sum(seconds["plain"]),
                    "tokens_per_s": num_tokens / sum(seconds["cached"]),
                    "over": "no cache",
                    "ratio": paired_ratio(seconds["cached"], seconds["plain"]),
                    "ties": answers.num_ties,
                }
            )
        plain.close()
        cached.close()
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
