"""The engine on the Triton kernels, interpreted: promoted blocks are there before they are read.

In a process of its own, because Triton decides when it is imported whether it interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the child process printed; it serves one prompt cold, from the device, the host and the
    disk, and a longer one in between."""
    child = subprocess.run(
        [
            sys.executable,
            Path(__file__).with_name("engine_on_triton.py"),
            tmp_path_factory.mktemp("triton"),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_the_engine_ran_on_the_triton_kernels(report):
    assert report["backend"] == "triton"
    assert report["launches"]["attend"] == report["launches"]["write_kv"] > 0


def test_answers_equal_transformers_cold_and_from_every_tier(report):
    asked, other = report["expected"]
    cached, answers, _ = zip(*report["runs"], strict=True)
    assert list(cached) == [{}, {"device": 96}, {}, {"host": 96}, {"disk": 96}]
    assert list(answers) == [asked, asked, other, asked, asked]


def test_every_promoted_block_was_resident_before_the_first_launch_that_read_it(report):
    assert report["problems"] == []
    # Six blocks, and two layers that each launch once.
    assert [reused for _, _, reused in report["runs"]] == [0, 12, 0, 12, 12]
