import weakref

import pytest
import torch
from architectures import load

from engine.config import EngineConfig
from engine.runner import memory_budget
from engine.runner.memory_budget import free_bytes_for_pool, pool_bytes
from engine.runner.model_runner import ModelRunner

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "needed", "expected"),
    [
        (100 * GIB, 2 * GIB, 90 * GIB),  # a tenth of it is room enough for forwards
        (10 * GIB, 2 * GIB, 8 * GIB),
        (GIB, 2 * GIB, 0),
    ],
)
def test_the_pool_leaves_room_for_a_forward(free, needed, expected):
    assert pool_bytes(free, needed, 0.9) == expected


def test_a_forward_and_a_graph_are_tried_before_free_memory_is_read(monkeypatch):
    """What they took is given back by then: it is counted once, as what they need."""
    order, tried = [], []
    reserved = iter([5 * GIB, 8 * GIB])
    cuda = {
        "empty_cache": lambda: order.append("empty"),
        "reset_peak_memory_stats": lambda _: None,
        "memory_reserved": lambda _: next(reserved),
        "max_memory_reserved": lambda _: next(reserved),
        "mem_get_info": lambda _: (order.append(tried[0]()), (20 * GIB, 80 * GIB))[1],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)

    class Rehearsed(ModelRunner):
        def warm_up(self, num_tokens, *, is_rehearsal):
            order.append((num_tokens, is_rehearsal, len(self._pool)))
            tried.append(weakref.ref(self))
            self._graphs = self._forward_decode  # which hold it, as graphs that it captured do

    monkeypatch.setattr(memory_budget, "ModelRunner", Rehearsed)
    config = EngineConfig(max_num_batched_tokens=500)
    assert free_bytes_for_pool(config, load("Llama")) == 17 * GIB
    assert order == ["empty", (500, True, 1), "empty", None]  # nothing is left of it
