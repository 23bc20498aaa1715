"""What the cache costs where nothing is ever reused.

Two engines, one of them without a cache, answer the same prompts in turns. No two prompts share a
block; the engine with a cache writes all of them to disk as well. The ratio is that of the times
from arrival to the last token.
"""

import random
import tempfile
from argparse import Namespace

import workload
from harness import Record, main, paired_ratio, say, summarize

OPTIONS = {
    "runs": 15,
    "model": "demo",
    "dtype": "bfloat16",
    "prompt_tokens": 1000,
    "output_tokens": 32,
}
GOAL = 1.03


def measure(arguments: Namespace) -> list[Record]:
    from engine import LLM, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.output_tokens, ignore_eos=True, logprobs=2
    )
    rng = random.Random(11)
    prompts = [
        [rng.randrange(1000, 40_000) for _ in range(arguments.prompt_tokens)]
        for _ in range(arguments.runs + 1)
    ]
    answers = workload.Answers(arguments.dtype)
    common = {
        "dtype": arguments.dtype,
        "max_model_len": arguments.prompt_tokens + arguments.output_tokens + 16,
    }
    with tempfile.TemporaryDirectory() as directory:
        plain = LLM(arguments.model, enable_prefix_caching=False, **common)
        cached = LLM(arguments.model, disk_cache=directory, **common)

        samples: dict[str, list[float]] = {"without": [], "with": []}
        for number, prompt in enumerate(prompts):
            (expected,) = plain.generate([prompt], params, use_tqdm=False)
            answers.expect(number, expected.outputs[0])
            (output,) = cached.generate([prompt], params, use_tqdm=False)
            answers.check(number, output.outputs[0].token_ids)
            assert output.num_cached_tokens == 0, "a prompt was not new"
            if number:  # the first round warms up
                samples["without"].append(expected.metrics.total_s)
                samples["with"].append(output.metrics.total_s)
        cached.flush()
        written = cached.stats().written.written_blocks
        plain.close()
        cached.close()
    assert written >= arguments.runs * (arguments.prompt_tokens // 16), "not all of it was written"
    say(f"{answers.num_compared} answers compared, {answers.num_ties} parted at a tie")
    return [
        {
            "case": "total time",
            "prompt_tokens": arguments.prompt_tokens,
            "output_tokens": arguments.output_tokens,
            "written_blocks": written,
            "with_s": summarize(samples["with"]),
            "without_s": summarize(samples["without"]),
            "over": "caching off",
            "ratio": paired_ratio(samples["with"], samples["without"]),
            "goal": GOAL,
            "goal_is": "at most",
        }
    ]


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
