"""What deterministic mode costs: time to the first token and per token, with it and without.

cold      a document and a question, nothing cached
question  the same with the document on the device
decode    one token of the answer to one question
decode together   one token each of several answers at once

The mode's own promise is checked on the way: the answer behind the cached document is the cold one.
"""

from argparse import Namespace

from bench_ttft import QUESTION, document_text
from harness import Record, alternate, main, paired_ratio, say, summarize

OPTIONS = {
    "runs": 5,
    "words": 2150,
    "new_tokens": 17,  # the first is not decoded
    "together": 8,
    "model": "demo",
    "dtype": "bfloat16",
}


def measure(arguments: Namespace) -> list[Record]:
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=arguments.new_tokens, ignore_eos=True)
    text = document_text(arguments.words)
    settings = {"dtype": arguments.dtype, "load_policy": "always", "max_model_len": 4096}
    engines = {
        "plain": LLM(arguments.model, **settings),
        "deterministic": LLM(arguments.model, deterministic=True, **settings),
    }
    documents = {name: llm.document(text) for name, llm in engines.items()}
    answers: dict[str, list[int]] = {}
    salts = iter(range(1_000_000))

    def output_of(name, document):
        output = document.ask(QUESTION, params)
        token_ids = output.outputs[0].token_ids
        if name == "deterministic":
            assert answers.setdefault(name, token_ids) == token_ids, "the answer changed"
        return output

    def cold(name):
        document = engines[name].document(text, prefill=False, cache_salt=f"run {next(salts)}")
        output = output_of(name, document)
        assert output.num_cached_tokens == 0
        return output.metrics.ttft_s

    def question(name):
        output = output_of(name, documents[name])
        # Deterministic mode reuses whole chunks.
        assert output.num_cached_tokens >= (documents[name].num_tokens - 1) // 256 * 256 > 0
        return output.metrics.ttft_s

    def decode(name):
        return output_of(name, documents[name]).metrics.decode_s / (arguments.new_tokens - 1)

    def decode_many(name):
        outputs = documents[name].ask(
            [f"{QUESTION} Part {part}." for part in range(arguments.together)], params
        )
        return max(output.metrics.decode_s for output in outputs) / (arguments.new_tokens - 1)

    cases = {"cold": cold, "question": question, "decode": decode, "decode together": decode_many}
    say(f"{len(documents['plain'].prompt_token_ids(QUESTION))} prompt tokens")
    samples = alternate(
        {
            f"{case} {name}": lambda run=run, name=name: run(name)
            for case, run in cases.items()
            for name in engines
        },
        arguments.runs,
    )
    for llm in engines.values():
        llm.close()
    records = []
    for case in cases:
        plain, mode = (samples[f"{case} {name}"] for name in engines)
        records.append(
            {"case": case, "plain_s": summarize(plain), "deterministic_s": summarize(mode)}
            | {"over": "plain", "ratio": paired_ratio(mode, plain)}
        )
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
