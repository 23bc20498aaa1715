"""Multi-turn chat: each turn's prompt is the whole conversation, the model's own answers included.

With sharing a turn computes what is new since the last one; without, everything again. In float32
by default: an answer that parts at a tie changes every later prompt.
"""

from argparse import Namespace

import sharing
import workload
from harness import Record, main

OPTIONS = sharing.OPTIONS | {
    "dtype": "float32",
    "turns": 6,
    "turn_tokens": 120,
    "output_tokens": 24,
}


def measure(arguments: Namespace) -> list[Record]:
    from engine import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=arguments.output_tokens, ignore_eos=True, logprobs=2
    )

    def play(llm, number: int) -> list:
        chat = llm.session()
        return [
            chat.ask(workload.document(1000 * number + turn, arguments.turn_tokens), params)
            for turn in range(arguments.turns)
        ]

    def predicted(outputs: list) -> int:
        """Each turn finds the full blocks of the conversation up to the last sampled token."""
        known = [len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1 for out in outputs]
        return sum(num_tokens // 16 * 16 for num_tokens in known[:-1])

    max_len = arguments.turns * (2 * arguments.turn_tokens + arguments.output_tokens) + 64
    return sharing.compare(
        f"{arguments.turns} turns", arguments, play, predicted, max_model_len=max_len
    )


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
