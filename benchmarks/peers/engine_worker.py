"""Our own engine, in a process of its own like the others."""

import argparse
import time
from functools import wraps
from typing import Any

from serving import serve, take_stdout

from engine import LLM, SamplingParams


class EngineWorker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._llm = LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            disk_cache=arguments.disk_cache,
            load_policy="always",
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        total = time.perf_counter() - started
        return {
            "outputs": [
                {
                    "token_ids": output.outputs[0].token_ids,
                    "ttft_s": output.metrics.ttft_s,
                    "total_s": output.metrics.ttft_s + output.metrics.decode_s,
                    "cached_tokens": output.num_cached_tokens,
                }
                for output in outputs
            ],
            "total_s": total,
        }

    def reset(self) -> dict[str, Any]:
        self._llm.reset_prefix_cache()
        return {}

    def info(self) -> dict[str, Any]:
        return {"system": "ours", "version": "this checkout", **vars(self._arguments)}

    def overhead(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Seconds of a decode step, and of it those in the model's forward. On a CPU only, where a
        forward has ended when it returns."""
        model = self._llm._loaded.model
        spans: list[float] = []
        forward = model.forward

        @wraps(forward)
        def timed(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = forward(*positional, **named)
            spans.append(time.perf_counter() - start)
            return result

        model.forward = timed
        try:
            output = self.generate([prompt], max_tokens)["outputs"][0]
        finally:
            del model.forward
        decode = spans[-(max_tokens - 1) :]
        step_s = (output["total_s"] - output["ttft_s"]) / len(decode)
        return {"step_s": step_s, "model_s": sum(decode) / len(decode)}


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--disk-cache", help="directory of the disk tier; without, there is none")
    serve(EngineWorker(parser.parse_args()), answers)


if __name__ == "__main__":
    main()
