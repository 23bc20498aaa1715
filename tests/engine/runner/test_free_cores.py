import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from engine.runner.free_cores import FreeCores, core_waits, spin_count
from kvstore.testing import FakeClock

LOOK_S = 0.1


class Machine:
    """Two threads of ours wait for ``waiting`` cores all the time, together."""

    def __init__(self, most: int) -> None:
        self.clock = FakeClock()
        self.waits = {"1": 5.0, "2": 7.0}
        self.cores = FreeCores(most, lambda: dict(self.waits), self.clock)

    def run(self, waiting: float, looks: int = 1) -> int:
        for _ in range(looks):
            self.clock.advance(LOOK_S)
            for name in self.waits:
                self.waits[name] += waiting * LOOK_S / len(self.waits)
            count = self.cores.count()
        return count


@pytest.fixture
def machine():
    return Machine(4)


def test_all_cores_are_taken_until_a_thread_waits_for_one(machine):
    assert machine.run(waiting=0.0) == 4
    assert machine.run(waiting=0.2, looks=100) == 4  # what waking them takes
    assert machine.run(waiting=0.8) == 3
    assert machine.run(waiting=0.0) == 3


def test_as_many_threads_are_given_up_as_found_no_core_and_one_is_left(machine):
    assert machine.run(waiting=2.2) == 2
    assert machine.run(waiting=9.0) == 1
    assert machine.run(waiting=9.0) == 1


def test_a_core_that_is_free_again_is_taken(machine):
    machine.run(waiting=3.0)
    assert machine.run(waiting=0.0, looks=4) == 1
    assert machine.run(waiting=0.0, looks=4) == 4


def test_a_core_that_stays_taken_is_tried_ever_less_often():
    machine = Machine(2)
    tries = []
    for look in range(300):
        is_beside = machine.cores.count() == 2
        if machine.run(waiting=0.8 if is_beside else 0.0) == 2:
            tries.append(look)
    pauses = [(later - earlier) * LOOK_S for earlier, later in pairwise(tries)]
    assert len(tries) == 6
    assert pauses == sorted(pauses)
    assert 7.9 < pauses[-1] < 8.3


def test_between_two_looks_nothing_is_read(machine):
    machine.run(waiting=0.0)
    machine.waits = None  # cannot be copied
    assert machine.cores.count() == 4


def test_threads_that_come_and_go_are_no_news(machine):
    machine.waits["3"] = 0.0
    assert machine.run(waiting=0.0) == 4
    del machine.waits["1"]
    assert machine.run(waiting=0.0) == 4


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count")
def test_this_system_counts_for_every_thread_of_the_process():
    waits = core_waits()
    assert len(waits) >= 1
    assert all(wait >= 0 for wait in waits.values())


@pytest.mark.parametrize(
    ("ration", "count"),
    [
        ("max 100000", "10000"),
        ("-1", "10000"),
        ("150000 100000", "0"),
        ("50000", "0"),
        ("", "10000"),
    ],
)
def test_threads_do_not_wait_awake_where_cpu_time_is_rationed(ration, count, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(ration)
    files = [tmp_path / "none", tmp_path / "cpu.max"]
    monkeypatch.setattr("engine.runner.free_cores._RATIONS", files)
    assert spin_count() == count


def test_threads_do_not_wait_awake_where_nobody_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.runner.free_cores._RATIONS", [])
    monkeypatch.setattr("engine.runner.free_cores._THREADS", tmp_path / "none")
    assert core_waits() == {}
    assert spin_count() == "0"


SAID = """
import os
os.environ["GOMP_SPINCOUNT"] = "7"
import engine
print(os.environ["GOMP_SPINCOUNT"])
"""


def test_who_has_said_how_threads_wait_is_obeyed():
    result = subprocess.run([sys.executable, "-c", SAID], capture_output=True, check=True)
    assert result.stdout == b"7\n"
