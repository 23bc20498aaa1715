"""Forwards that nobody asked for, while the engine is idle: what prefill costs on this machine.

Loads are weighed against computing only when steps of that size have been seen. An engine that was
restarted on a full cache sees none as long as it loads everything, however slow its disk is.
"""

from collections.abc import Callable, Iterator

from engine.runner.model_runner import ModelRunner, SequenceStep
from kvstore.store import BlockStore

_LONGEST_S = 0.25  # a request that arrives meanwhile waits so long at most


class Calibration:
    """Runs on the step thread, one forward at a time, on free device blocks."""

    def __init__(
        self,
        store: BlockStore,
        runner: ModelRunner,
        clock: Callable[[], float],
        *,
        chunk_tokens: int,
    ) -> None:
        self._store = store
        self._runner = runner
        self._clock = clock
        self._trials = _trials(chunk_tokens, runner.max_model_len)
        self._last = (1, 0.0)  # tokens and seconds of the last forward
        self.is_done = not store.weighs_loads

    def advance(self) -> None:
        """The next forward, if there is one that is not too long."""
        trial = next(self._trials, None)
        if trial is None:
            self.is_done = True
            return
        num_tokens, num_prefix = trial
        tokens_before, seconds_before = self._last
        if num_tokens / tokens_before * seconds_before > _LONGEST_S:
            return
        seconds = self._time(num_tokens, num_prefix)
        if seconds is not None:
            self._last = num_tokens, seconds
            context = num_tokens * num_prefix + num_tokens * (num_tokens - 1) / 2
            self._store.cost.observe_step(num_tokens, context, seconds)

    def _time(self, num_tokens: int, num_prefix: int) -> float | None:
        """Seconds of one step of a sequence; None when there is no room for it."""
        pool, block_size = self._store.device, self._store.layout.block_size
        num_blocks = self._store.layout.blocks_for(num_tokens) + 1
        if num_blocks > pool.num_free:
            return None
        # The prefix is one block many times: its content does not matter, and it is not written.
        prefix_block, *blocks = pool.allocate(num_blocks)
        table = [prefix_block] * (num_prefix // block_size) + blocks
        started = self._clock()
        try:
            logits = self._runner.execute([SequenceStep([0] * num_tokens, num_prefix, table, True)])
            logits.argmax().item()  # waits for the device
            return self._clock() - started
        finally:
            for block_id in (prefix_block, *blocks):
                pool.free(block_id)


def _trials(chunk_tokens: int, max_model_len: int) -> Iterator[tuple[int, int]]:
    """Tokens and prefix of each forward: growing to a quarter of a full step, then with context."""
    num_tokens = 16
    while True:
        num_tokens = min(num_tokens, chunk_tokens, max_model_len)
        yield num_tokens, 0
        if 4 * num_tokens >= min(chunk_tokens, max_model_len):
            break
        num_tokens *= 4
    num_prefix = max_model_len // 4 // 256 * 256  # whole blocks of any size
    if num_prefix:
        yield 16, num_prefix
