"""llama.cpp through llama-cpp-python: one sequence at a time, the longest prefix of the one before
it reused. ``--model`` is a ``.gguf`` file; only an F32 or BF16 one has the weights that the others
run.
"""

import argparse
import time
from typing import Any

from serving import serve, take_stdout


class LlamaCppWorker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import llama_cpp

        self._llm = llama_cpp.Llama(
            arguments.model, n_ctx=arguments.max_model_len, n_batch=512, verbose=False
        )
        self._info = {"system": "llama-cpp", "version": llama_cpp.__version__, **vars(arguments)}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        started = time.perf_counter()
        for prompt in prompts:
            evaluated = self._llm.n_tokens
            before = self._llm.input_ids[:evaluated].tolist()
            token_ids: list[int] = []
            first = 0.0
            for token in self._llm.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
                first = first or time.perf_counter() - started
                token_ids.append(token)
                if len(token_ids) == max_tokens:
                    break
            outputs.append(
                {
                    "token_ids": token_ids,
                    "ttft_s": first,
                    "total_s": time.perf_counter() - started,
                    "cached_tokens": _common(before, prompt[:-1]),
                }
            )
        return {"outputs": outputs, "total_s": time.perf_counter() - started}

    def reset(self) -> dict[str, Any]:
        self._llm.reset()
        return {}

    def info(self) -> dict[str, Any]:
        return self._info


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="of the file")
    parser.add_argument("--max-model-len", type=int, default=4096)
    serve(LlamaCppWorker(parser.parse_args()), answers)


if __name__ == "__main__":
    main()
