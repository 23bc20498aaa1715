"""What people see on a terminal while they wait; nothing where stderr is none."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import transformers

from engine.outputs import RequestOutput


@contextlib.contextmanager
def answers_bar(num_samples: int, is_wanted: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over the samples of a call, with the rate of new tokens and the hit rate.

    Yields what is called with each finished request. A single sample has nothing to show.
    """
    if not (is_wanted and num_samples > 1 and sys.stderr.isatty()):
        yield lambda output: None
        return
    bar = transformers.utils.logging.tqdm(total=num_samples, desc="answers", unit="")
    began_at = time.monotonic()
    num_cached = num_prompt = num_new = 0

    def advance(output: RequestOutput) -> None:
        nonlocal num_cached, num_prompt, num_new
        num_cached += output.num_cached_tokens
        num_prompt += len(output.prompt_token_ids)
        num_new += sum(len(sample.token_ids) for sample in output.outputs)
        rate = num_new / max(time.monotonic() - began_at, 1e-6)
        bar.set_postfix_str(
            f"{rate:.0f} tokens/s, {num_cached / max(num_prompt, 1):.0%} of the prompts cached"
        )
        bar.update(len(output.outputs))

    with bar:
        yield advance


@contextlib.contextmanager
def reading_bar(num_tokens: int) -> Iterator[Callable[[int], None]]:
    """A bar over the tokens of a prompt while it is read; yields what sets it to a count.

    It appears with the first count and ends with the last token.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    bar = None

    def show(done: int) -> None:
        nonlocal bar
        if bar is None and done < num_tokens:
            bar = transformers.utils.logging.tqdm(total=num_tokens, desc="reading", unit=" tokens")
        if bar is not None and done > bar.n:
            bar.update(min(done, num_tokens) - bar.n)
            if bar.n == num_tokens:
                bar.close()

    try:
        yield show
        show(num_tokens)
    finally:
        if bar is not None:
            bar.close()
