import threading

import pytest
import torch

from engine.runner.forward_context import (
    AttentionBackend,
    ForwardContext,
    StepMetadata,
    current_context,
    forward_context,
)


def make_context() -> ForwardContext:
    def kernel(*_, **__) -> torch.Tensor:
        return torch.empty(0)

    return ForwardContext({}, AttentionBackend("none", kernel, kernel, kernel))


def make_step() -> StepMetadata:
    none = torch.empty(0)
    return StepMetadata(none, none, none, none, is_decode=False)


def test_there_is_no_context_outside_a_forward():
    with pytest.raises(RuntimeError):
        current_context()


def test_the_slot_is_filled_for_the_forward_and_empty_after_it():
    context, step = make_context(), make_step()
    with forward_context(context, step):
        assert current_context() is context
        assert context.step is step
    assert context.step is None
    with pytest.raises(RuntimeError):
        current_context()


def test_the_slot_is_empty_after_a_forward_that_failed():
    context = make_context()
    with pytest.raises(ZeroDivisionError), forward_context(context, make_step()):
        raise ZeroDivisionError
    assert context.step is None
    with pytest.raises(RuntimeError):
        current_context()


def test_an_inner_forward_gives_the_outer_one_back():
    outer, inner = make_context(), make_context()
    with forward_context(outer, make_step()):
        with forward_context(inner, make_step()):
            assert current_context() is inner
        assert current_context() is outer


def test_another_thread_does_not_see_the_context():
    seen: list[object] = []

    def look() -> None:
        try:
            seen.append(current_context())
        except RuntimeError as error:
            seen.append(error)

    with forward_context(make_context(), make_step()):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert isinstance(seen[0], RuntimeError)
