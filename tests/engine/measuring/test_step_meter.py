import pytest

from engine.measuring.step_meter import StepMeter
from engine.runner.model_runner import SequenceStep


class Observed:
    """Stands in for the cost model."""

    def __init__(self):
        self.steps = []

    def observe_step(self, num_tokens, context, seconds, *, num_steps=1):
        self.steps.append((num_tokens, context, pytest.approx(seconds), num_steps))


def step(num_tokens, num_prefix=0):
    return SequenceStep([0] * num_tokens, num_prefix, [], True)


def meter(**options):
    observed = Observed()
    return StepMeter(observed, **options), observed.steps


def test_a_prefill_step_tells_its_tokens_and_the_positions_before_each():
    timer, seen = meter(is_device_awaited=True)
    timer.add([step(4, 10)], 1.0, 1.5, has_sampled=False)
    assert seen == [(4, 10 + 11 + 12 + 13, 0.5, 1)]


def test_sequences_of_one_step_add_up():
    timer, seen = meter(is_device_awaited=True)
    timer.add([step(4), step(2, 100), step(1, 50)], 1.0, 1.5, has_sampled=True)
    assert seen == [(7, 6 + 201 + 50, 0.5, 1)]


def test_a_step_that_mostly_decodes_tells_nothing():
    timer, seen = meter(is_device_awaited=True)
    timer.add([step(1, 50), step(1, 60)], 1.0, 1.5, has_sampled=True)
    timer.add([step(2)] + [step(1, 60)] * 2, 2.0, 2.5, has_sampled=True)
    assert seen == []


def test_steps_are_timed_together_until_the_device_is_awaited():
    timer, seen = meter(is_device_awaited=False)
    timer.add([step(8)], 1.0, 1.001, has_sampled=False)
    timer.add([step(8, 8)], 1.002, 1.003, has_sampled=False)
    timer.add([step(4, 16)], 1.004, 3.0, has_sampled=True)
    assert seen == [(20, sum(range(20)), 2.0, 3)]


def test_what_was_not_awaited_is_forgotten_when_the_device_may_have_been_idle():
    timer, seen = meter(is_device_awaited=False)
    timer.add([step(8)], 1.0, 1.001, has_sampled=False)
    timer.add([step(4)], 2.0, 2.5, has_sampled=True)
    assert seen == [(4, 6, 0.5, 1)]
