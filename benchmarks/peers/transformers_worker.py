"""transformers' own ``generate``: prompts one after the other, each read anew.

Prompts of one length run as one batch with ``--batch N``: no padding then.
"""

import argparse
import time
from typing import Any

import torch
import transformers
from serving import serve, take_stdout


class _Watch:
    """A streamer that notes when the first token came; ``put`` is called with the prompt first."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_at = 0.0

    def put(self, _: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first_at = time.perf_counter()

    def end(self) -> None:
        pass


class TransformersWorker:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._batch = arguments.batch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, arguments.dtype), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._info = {"system": "transformers", "version": transformers.__version__}
        self._info |= vars(arguments)

    def generate(
        self, prompts: list[list[int]], max_tokens: int, batch: int | None = None
    ) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        started = time.perf_counter()
        size = batch or self._batch
        for first in range(0, len(prompts), size):
            together = prompts[first : first + size]
            watch = _Watch()
            result = self._model.generate(
                torch.tensor(together),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
                # A streamer takes one sequence only; a batch tells the time of its end alone.
                **({"streamer": watch} if len(together) == 1 else {}),
            )
            ended = time.perf_counter()
            outputs += [
                {
                    "token_ids": row[len(prompt) :].tolist(),
                    "ttft_s": watch.first_at - started if len(together) == 1 else None,
                    "total_s": ended - started,
                    "cached_tokens": 0,
                }
                for row, prompt in zip(result, together, strict=True)
            ]
        return {"outputs": outputs, "total_s": time.perf_counter() - started}

    def reset(self) -> dict[str, Any]:
        return {}

    def info(self) -> dict[str, Any]:
        return self._info

    def gaps(self, token_ids: list[int], candidates: list[int]) -> dict[str, Any]:
        """How far below the best next token each candidate lies, as a part of the logits' range."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1].float()
        best, spread = logits.max(), logits.max() - logits.min()
        return {"gaps": [float((best - logits[token]) / spread) for token in candidates]}


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    serve(TransformersWorker(parser.parse_args()), answers)


if __name__ == "__main__":
    main()
