"""Several samples of one prompt and a vote: the prompt is computed once for all of them."""

import re
from collections import Counter

from engine import LLM, RequestOutput, SamplingParams

QUESTION = (
    "A tram leaves every 12 minutes. The first one leaves at 6:00. Ida comes to the stop at 6:40. "
    "How many minutes does she wait? Think step by step and end with the number."
)


def sample(llm: LLM, question: str, num_samples: int) -> RequestOutput:
    params = SamplingParams(n=num_samples, temperature=0.8, seed=1, max_tokens=60)
    (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    return output


def vote(answers: list[str]) -> tuple[str, int]:
    """The last number that most answers have, and how many have it."""
    numbers = [re.findall(r"\d+", answer) for answer in answers]
    counts = Counter(found[-1] for found in numbers if found)
    return counts.most_common(1)[0] if counts else ("none", 0)


def tokens_not_recomputed(output: RequestOutput) -> int:
    """Every sample but the first found the whole prompt computed."""
    num_prompt = len(output.prompt_token_ids)
    return num_prompt * len(output.outputs) - output.metrics.computed_tokens


def main() -> None:
    with LLM("demo") as llm:
        output = sample(llm, QUESTION, num_samples=8)
    answer, votes = vote([each.text for each in output.outputs])
    print(f"{votes} of {len(output.outputs)} samples say {answer}")
    total = len(output.prompt_token_ids) * len(output.outputs)
    print(f"{tokens_not_recomputed(output)} of {total} prompt tokens were not recomputed")


if __name__ == "__main__":
    main()
