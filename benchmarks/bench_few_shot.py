"""Few-shot prompting: a long run of worked examples before each of several short questions.

All questions are asked at once. With sharing the examples are computed once and everybody waits for
that; without, each prompt computes them again.
"""

from argparse import Namespace

import sharing
import workload
from harness import Record, main

OPTIONS = sharing.OPTIONS | {"example_tokens": 800, "questions": 8, "output_tokens": 8}


def measure(arguments: Namespace) -> list[Record]:
    from engine import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.output_tokens, ignore_eos=True, logprobs=2
    )

    def play(llm, number: int) -> list:
        examples = workload.document(number, arguments.example_tokens)
        prompts = [
            f"{examples}\n\nQ: What is {7 * each + number} times 3?\nA:"
            for each in range(arguments.questions)
        ]
        return llm.generate(prompts, params, use_tqdm=False)

    def predicted(outputs: list) -> int:
        """All but the first find what the prompts have in common, in whole blocks at least."""
        prompts = [output.prompt_token_ids for output in outputs]
        common = next(at for at, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
        return (len(prompts) - 1) * (common // 16 * 16)

    max_len = 2 * arguments.example_tokens
    return sharing.compare(
        f"{arguments.questions} questions", arguments, play, predicted, max_model_len=max_len
    )


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
