"""A chat: every turn finds all that was said before in the cache, the model's answers too."""

from collections.abc import Iterator, Sequence

from engine import LLM, RequestOutput, SamplingParams

SYSTEM = "You are a patient guide in a botanical garden. Answer in one or two sentences."
QUESTIONS = [
    "What should I look at first?",
    "How old can it get?",
    "Does it need much water?",
    "And where do I find some shade afterwards?",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def talk(llm: LLM, questions: Sequence[str]) -> Iterator[RequestOutput]:
    session = llm.session(SYSTEM)
    for question in questions:
        yield session.ask(question, GREEDY)


def main() -> None:
    cached = total = 0
    with LLM("demo") as llm:
        for question, output in zip(QUESTIONS, talk(llm, QUESTIONS), strict=True):
            print(f"> {question}\n{output.outputs[0].text}")
            cached += output.num_cached_tokens
            total += len(output.prompt_token_ids)
    print(f"{cached} of {total} prompt tokens were not recomputed")


if __name__ == "__main__":
    main()
