"""Two questions about one long table: the second one does not read the table again.

The same script runs on vLLM with its first import changed to ``from vllm import LLM,
SamplingParams`` and a model that vLLM knows.
"""

import time
from pathlib import Path

from engine import LLM, SamplingParams

TABLE = Path(__file__).with_name("people.md").read_text(encoding="utf-8")
LONG_PROMPT = f"The table below lists people, one row each, in markdown.\n\n{TABLE}\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def ask_age(llm: LLM, name: str) -> None:
    prompt = f"{LONG_PROMPT}Question: What is the age of {name}?\nAnswer: The age of {name} is"
    started = time.perf_counter()
    outputs = llm.generate(prompt, GREEDY)
    elapsed = time.perf_counter() - started
    print(f"The age of {name} is{outputs[0].outputs[0].text}")
    print(f"generation took {elapsed:.2f} s, {outputs[0].num_cached_tokens} prompt tokens cached")


def main() -> None:
    llm = LLM(model="demo", enable_prefix_caching=True)
    ask_age(llm, "Marta Lindqvist")
    ask_age(llm, "Pavel Horak")


if __name__ == "__main__":
    main()
