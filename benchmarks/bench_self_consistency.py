"""Self-consistency: several samples of one prompt, whose answers are then put to the vote.

With sharing they are ``n`` samples of one request and read the prompt once; without, one request
each with the seed of the sample. In float32 by default: a draw depends on every bit of the logits.
"""

from argparse import Namespace
from dataclasses import replace

import sharing
import workload
from harness import Record, main

OPTIONS = sharing.OPTIONS | {
    "dtype": "float32",
    "prompt_tokens": 600,
    "samples": 8,
    "output_tokens": 16,
}


def measure(arguments: Namespace) -> list[Record]:
    from engine import SamplingParams

    params = SamplingParams(
        n=arguments.samples,
        temperature=0.7,
        top_p=0.95,
        seed=1,
        max_tokens=arguments.output_tokens,
        ignore_eos=True,
    )
    alone = [replace(params, n=1, seed=1 + index) for index in range(arguments.samples)]

    def prompt(number: int) -> str:
        text = workload.document(number, arguments.prompt_tokens)
        return f"{text}\n\nLet us think step by step."

    def play(llm, number: int) -> list:
        return llm.generate([prompt(number)], params, use_tqdm=False)

    def play_alone(llm, number: int) -> list:
        return llm.generate([prompt(number)] * len(alone), alone, use_tqdm=False)

    def predicted(outputs: list) -> int:
        """Every token of the prompt, but for the one sample that reads it."""
        return (arguments.samples - 1) * len(outputs[0].prompt_token_ids)

    return sharing.compare(
        f"{arguments.samples} samples",
        arguments,
        play,
        predicted,
        play_alone=play_alone,
        is_sampled=True,
        max_model_len=2 * arguments.prompt_tokens,
    )


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
