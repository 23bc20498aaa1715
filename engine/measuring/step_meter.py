"""Tells the cost model what prefill takes, from the steps that requests need anyway."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.runner.model_runner import SequenceStep
from kvstore.costs.cost import CostModel

_LONGEST_GAP_S = 0.005  # between steps that are timed together


@dataclass(slots=True)
class _Stretch:
    """Steps since the device was last waited for."""

    began_at: float
    ended_at: float
    num_steps: int = 0
    num_tokens: int = 0
    num_decoded: int = 0
    context: float = 0.0  # sum over the tokens of the positions before each


class StepMeter:
    """Times steps. Owned by the step thread.

    is_device_awaited   whether a step has ended when the runner returns (a CPU). Elsewhere a step
                        that samples waits for the device, and with it for the steps before it that
                        did not: those are timed together.
    """

    def __init__(self, cost: CostModel, *, is_device_awaited: bool) -> None:
        self._cost = cost
        self._is_device_awaited = is_device_awaited
        self._stretch: _Stretch | None = None

    def add(
        self, steps: Sequence[SequenceStep], began_at: float, ended_at: float, *, has_sampled: bool
    ) -> None:
        """One step that ran from ``began_at`` to ``ended_at``."""
        stretch = self._stretch
        # After a gap the device may have been idle: what it took is not known any more.
        if stretch is None or began_at - stretch.ended_at > _LONGEST_GAP_S:
            stretch = self._stretch = _Stretch(began_at, ended_at)
        stretch.ended_at = ended_at
        stretch.num_steps += 1
        for step in steps:
            count = len(step.token_ids)
            stretch.num_tokens += count
            stretch.num_decoded += count == 1
            stretch.context += count * step.num_prefix + count * (count - 1) / 2
        if not (has_sampled or self._is_device_awaited):
            return
        self._stretch = None
        # Decoding reads all weights for one token a sequence: it says nothing about prefill.
        if stretch.num_decoded < stretch.num_tokens / 2:
            self._cost.observe_step(
                stretch.num_tokens,
                stretch.context,
                stretch.ended_at - stretch.began_at,
                num_steps=stretch.num_steps,
            )
