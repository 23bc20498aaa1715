"""``attention_backend="auto"`` beside stand-ins for libraries, whose speed a fake clock keeps."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.runner import backend_choice
from engine.runner.attention_backends import find_backend
from engine.runner.backend_choice import choose_backend
from engine.runner.forward_context import AttentionBackend
from kvstore.block import BlockLayout

LAYOUT = BlockLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16")
NUM_HEADS = 4


class Machine:
    """Makes backends that compute with our kernels and take the seconds they are said to take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: Counter[str] = Counter()
        self.ours = self.backend("ours", (1.0, 1.0))

    def backend(
        self,
        name: str,
        seconds: tuple[float, float],
        error: float = 0.0,
        problem: Exception | None = None,
    ) -> AttentionBackend:
        """``seconds`` of a prefill and of a decode; ``error`` is added to what they give."""
        real = find_backend("torch", torch.device("cpu"), LAYOUT)

        def timed(function, cost):
            def run(*operands, **options):
                self.now += cost
                self.calls[name] += 1
                if problem is not None:
                    raise problem
                return function(*operands, **options).add_(error)

            return run

        functions = zip((real.paged_prefill, real.paged_decode), seconds, strict=True)
        prefill, decode = (timed(function, cost) for function, cost in functions)
        return replace(real, name=name, paged_prefill=prefill, paged_decode=decode)

    def time_call(self, call) -> float:
        began = self.now
        call()
        return self.now - began


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def choose(machine, monkeypatch, tmp_path):
    """Choose among ours and some libraries; the verdicts are kept from call to call."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    def choose(*libraries: AttentionBackend, num_heads: int = NUM_HEADS) -> AttentionBackend:
        found = {library.name: library for library in libraries}
        monkeypatch.setattr(backend_choice, "_usable", lambda layout, device: found)
        return choose_backend(
            machine.ours,
            LAYOUT,
            torch.full((40, *LAYOUT.shape), torch.nan, dtype=torch.bfloat16),
            num_heads=num_heads,
            max_model_len=64,
            time_call=machine.time_call,
            verdicts=tmp_path / "verdicts.json",
        )

    return choose


def ran(machine: Machine, backend: AttentionBackend, sinks: torch.Tensor | None = None) -> set[str]:
    """Names of the backends that a prefill of the chosen one calls."""
    machine.calls.clear()
    pool = torch.randn(2, 16, 2, 64).bfloat16()
    q = torch.randn(3, NUM_HEADS, 64).bfloat16()
    table, cu, lens = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 3], [9]))
    options = {"scale": 0.1, "window": None, "softcap": None, "sinks": sinks}
    backend.paged_prefill(q, pool, pool, table, cu, lens, **options, out=torch.empty_like(q))
    return set(machine.calls)


def test_without_a_library_nothing_is_measured(machine, choose):
    assert choose() is machine.ours
    assert machine.now == 0.0


def test_prefill_and_decode_are_chosen_apart(machine, choose):
    chosen = choose(
        machine.backend("flash_attn", (0.5, 2.0)), machine.backend("flashinfer", (0.7, 0.3))
    )
    assert chosen.name == "flash_attn+flashinfer"
    assert ran(machine, chosen) == {"flash_attn"}


@pytest.mark.parametrize(("seconds", "name"), [(0.95, "ours"), (0.85, "flash_attn")])
def test_a_library_must_gain_a_tenth(machine, choose, seconds, name):
    chosen = choose(machine.backend("flash_attn", (seconds, seconds)))
    assert chosen.name == name
    assert ran(machine, chosen) == {name}


@pytest.mark.parametrize(
    "fault", [{"error": 0.2}, {"error": float("nan")}, {"problem": RuntimeError("no kernel image")}]
)
def test_a_library_that_answers_otherwise_or_fails_is_not_chosen(machine, choose, caplog, fault):
    chosen = choose(machine.backend("flashinfer", (0.1, 0.1), **fault))
    assert chosen.name == "ours"
    assert "attention library flashinfer" in caplog.text


def test_a_verdict_is_kept_for_its_device_and_shape(machine, choose):
    library = machine.backend("flash_attn", (0.5, 0.5))
    first = choose(library)
    measured = machine.now
    assert choose(library).name == first.name == "flash_attn"
    assert machine.now == measured
    choose(library, num_heads=8)
    assert machine.now > measured


def test_a_verdict_for_a_library_that_is_gone_is_ours(machine, choose):
    choose(machine.backend("flash_attn", (0.5, 0.5)))
    chosen = choose(machine.backend("flashinfer", (2.0, 2.0)))
    assert chosen.name == "ours"
    assert ran(machine, chosen) == {"ours"}


def test_verdicts_that_cannot_be_read_are_measured_again(machine, choose, tmp_path):
    for text in ("", "[1]", '{"a": '):
        (tmp_path / "verdicts.json").write_text(text)
        assert choose(machine.backend("flash_attn", (0.5, 0.5))).name == "flash_attn"


def test_layers_with_attention_sinks_stay_with_our_kernel(machine, choose):
    chosen = choose(machine.backend("flash_attn", (0.5, 0.5)))
    assert ran(machine, chosen, sinks=torch.zeros(NUM_HEADS)) == {"ours"}
