"""One set of worked examples, many inputs: the examples are computed for the first input only."""

from collections.abc import Sequence

from engine import LLM, RequestOutput, SamplingParams

EXAMPLES = """Decide whether a review is positive or negative.

Review: The soup was cold and the waiter nowhere to be seen.
Verdict: negative

Review: We stayed an hour longer than planned, the garden is lovely.
Verdict: positive

Review: The handle came off on the second day.
Verdict: negative

Review: It does what it says, quietly, and the battery lasts a week.
Verdict: positive
"""
REVIEWS = [
    "Arrived late, and one of the cups was broken.",
    "My daughter has not put it down since her birthday.",
    "The third repair in a year. Never again.",
    "Warm, light, and it dries overnight.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


def classify(llm: LLM, reviews: Sequence[str]) -> list[RequestOutput]:
    prompts = [f"{EXAMPLES}\nReview: {review}\nVerdict:" for review in reviews]
    return llm.generate(prompts, GREEDY, use_tqdm=False)


def main() -> None:
    with LLM("demo") as llm:
        outputs = classify(llm, REVIEWS)
    for review, output in zip(REVIEWS, outputs, strict=True):
        print(f"{review} ->{output.outputs[0].text}")
    cached = sum(output.num_cached_tokens for output in outputs)
    total = sum(len(output.prompt_token_ids) for output in outputs)
    print(f"{cached} of {total} prompt tokens were not recomputed")


if __name__ == "__main__":
    main()
