"""vLLM's CPU build with prefix caching. Runs in its own environment; see ``client.py``."""

import argparse
import time
from typing import Any

from serving import serve, take_stdout


class VllmWorker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import vllm

        self._llm = vllm.LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            enable_prefix_caching=True,
            enforce_eager=True,
            seed=0,
        )
        self._params = vllm.SamplingParams
        self._info = {"system": "vllm", "version": vllm.__version__, **vars(arguments)}
        self._count = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Through the engine's steps, which is what its ``generate`` does, to see first tokens."""
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine = self._llm.llm_engine
        firsts: dict[str, float] = {}
        finished: dict[str, tuple[Any, float]] = {}
        started = time.perf_counter()
        names = []
        for prompt in prompts:
            names.append(str(self._count))
            self._count += 1
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            results = engine.step()
            now = time.perf_counter() - started
            for result in results:
                if result.outputs and result.outputs[0].token_ids:
                    firsts.setdefault(result.request_id, now)
                if result.finished:
                    finished[result.request_id] = result, now
        total = time.perf_counter() - started
        outputs = []
        for name in names:
            result, ended = finished[name]
            outputs.append(
                {
                    "token_ids": list(result.outputs[0].token_ids),
                    "ttft_s": firsts[name],
                    "total_s": ended,
                    "cached_tokens": result.num_cached_tokens,
                }
            )
        return {"outputs": outputs, "total_s": total}

    def reset(self) -> dict[str, Any]:
        self._llm.reset_prefix_cache()
        return {}

    def info(self) -> dict[str, Any]:
        return self._info


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    serve(VllmWorker(parser.parse_args()), answers)


if __name__ == "__main__":
    main()
