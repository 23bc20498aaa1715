"""A tree of thoughts: each branch goes on from its parent's blocks and computes its own words only.

Thoughts are scored by their mean log-probability; a better judge is a prompt of its own.
"""

from collections.abc import Sequence

from engine import LLM, Generation, SamplingParams

TASK = "A day in Lisbon for two people who like tiles and dislike hills.\nMorning:"
LATER = ["Noon", "Afternoon", "Evening"]
THOUGHT = SamplingParams(n=3, temperature=0.9, seed=2, max_tokens=16, logprobs=0)


def grow(llm: LLM, task: str, later: Sequence[str]) -> list[Generation]:
    """Three thoughts a level; each level goes on from the best thought of the one before."""
    levels = [llm.start(task, THOUGHT)]
    for part in later:
        best = best_of(levels[-1])
        levels.append(levels[-1].fork(THOUGHT, append=f"\n{part}:", index=best))
    return levels


def best_of(level: Generation) -> int:
    def score(index: int) -> float:
        logprobs = level.result().outputs[index].logprobs or []
        return sum(max(each.logprob for each in token.values()) for token in logprobs)

    return max(range(len(level.result().outputs)), key=score)


def main() -> None:
    with LLM("demo") as llm:
        levels = grow(llm, TASK, LATER)
        thoughts = [level.result() for level in levels]
        best = [best_of(level) for level in levels]
    for part, thought, index in zip(["Morning", *LATER], thoughts, best, strict=True):
        print(f"{part}:{thought.outputs[index].text}")
    total = sum(len(thought.prompt_token_ids) * len(thought.outputs) for thought in thoughts)
    computed = sum(thought.metrics.computed_tokens for thought in thoughts)
    print(f"{total - computed} of {total} prompt tokens were not recomputed")


if __name__ == "__main__":
    main()
