"""Tree of thought: every thought is continued in several directions, each of which is kept.

With sharing a branch is a fork that has its ancestors' blocks; without, a request that reads all
that lies above it again. In float32 by default: an answer that parts at a tie changes every prompt
below it.
"""

from argparse import Namespace

import sharing
import workload
from harness import Record, main

OPTIONS = sharing.OPTIONS | {
    "dtype": "float32",
    "root_tokens": 400,
    "breadth": 3,
    "depth": 2,
    "thought_tokens": 16,
}


def measure(arguments: Namespace) -> list[Record]:
    from engine import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.thought_tokens, ignore_eos=True, logprobs=2
    )

    def root(number: int) -> str:
        return workload.document(number, arguments.root_tokens)

    def direction(branch: int) -> str:
        return f"\n\nApproach {branch + 1}:"

    def play(llm, number: int) -> list:
        level, tree = [llm.start(root(number), params)], []
        for _ in range(arguments.depth):
            tree += [thought.result() for thought in level]
            level = [
                thought.fork(append=direction(branch))
                for thought in level
                for branch in range(arguments.breadth)
            ]
        return tree + [thought.result() for thought in level]

    def play_alone(llm, number: int) -> list:
        level = llm.generate([root(number)], params, use_tqdm=False)
        tree = list(level)
        encode = llm.get_tokenizer().encode
        for _ in range(arguments.depth):
            ends = [
                encode(direction(branch), add_special_tokens=False)
                for branch in range(arguments.breadth)
            ]
            prompts = [
                [*thought.prompt_token_ids, *thought.outputs[0].token_ids, *end]
                for thought in level
                for end in ends
            ]
            level = llm.generate(prompts, params, use_tqdm=False)
            tree += level
        return tree

    def predicted(outputs: list) -> int:
        """A branch finds the full blocks of what it forks, up to its last sampled token."""
        known = [len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1 for out in outputs]
        num_inner = sum(arguments.breadth**level for level in range(arguments.depth))
        return arguments.breadth * sum(tokens // 16 * 16 for tokens in known[:num_inner])

    return sharing.compare(
        f"breadth {arguments.breadth}, depth {arguments.depth}",
        arguments,
        play,
        predicted,
        play_alone=play_alone,
        max_model_len=2 * arguments.root_tokens + 200,
    )


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
