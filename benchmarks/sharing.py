"""A way of using a model whose prompts share prefixes, timed on an engine that shares and on one
that does not, in turns."""

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import workload
from harness import Record, paired_ratio, say, summarize

OPTIONS = {"runs": 5, "model": "demo", "dtype": "bfloat16"}

# Plays round ``number`` on an engine: the outputs in a fixed order. Rounds share no text.
Play = Callable[[Any, int], list[Any]]


def compare(
    case: str,
    arguments: Namespace,
    play: Play,
    predicted: Callable[[list[Any]], int],
    *,
    play_alone: Play | None = None,
    is_sampled: bool = False,
    **settings: Any,
) -> list[Record]:
    """One record. Every answer of the engine that shares is compared with the other one's.

    predicted    least prompt tokens that sharing saves, given a round's outputs
    play_alone   the same work on the engine without sharing, where that is done otherwise
    is_sampled   tokens are drawn: a draw may fall on the border between two of them, so one answer
                 in ten may differ
    """
    from engine import LLM

    common = {"dtype": arguments.dtype, **settings}
    shared = LLM(arguments.model, load_policy="always", **common)
    alone = LLM(arguments.model, enable_prefix_caching=False, **common)
    answers = workload.Answers(arguments.dtype)
    seconds: dict[str, list[float]] = {"shared": [], "alone": []}
    prompt_tokens = saved_tokens = least = differing = 0
    for number in range(arguments.runs + 1):
        started = time.perf_counter()
        outputs = play(shared, number)
        middle = time.perf_counter()
        expected = (play_alone or play)(alone, number)
        ended = time.perf_counter()
        found = [sample for output in outputs for sample in output.outputs]
        right = [sample for output in expected for sample in output.outputs]
        for place, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            if is_sampled:
                differing += mine.token_ids != theirs.token_ids
            else:
                answers.expect(place, theirs)
                answers.check(place, mine.token_ids)
        assert differing <= 0.1 * (number + 1) * len(found), "too many samples differ"
        if number:  # the first round warms up
            seconds["shared"].append(middle - started)
            seconds["alone"].append(ended - middle)
            prompt_tokens += sum(len(output.prompt_token_ids) for output in expected)
            computed = sum(output.metrics.computed_tokens for output in outputs)
            saved = sum(len(output.prompt_token_ids) for output in expected) - computed
            assert saved >= predicted(outputs), f"{saved} tokens saved, {predicted(outputs)} due"
            saved_tokens += saved
            least += predicted(outputs)
    shared.close()
    alone.close()
    say(f"{answers.num_compared} answers compared, {answers.num_ties} parted at a tie")
    return [
        {
            "case": case,
            "prompt_tokens": prompt_tokens // arguments.runs,
            "saved_tokens": saved_tokens // arguments.runs,
            "predicted_tokens": least // arguments.runs,
            "differing_samples": differing,
            "shared_s": summarize(seconds["shared"]),
            "alone_s": summarize(seconds["alone"]),
            "over": "no sharing",
            "ratio": paired_ratio(seconds["shared"], seconds["alone"]),
        }
    ]
