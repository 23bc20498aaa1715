"""The machine code of six configurations, compiled offline (see benchmarks/kernel_resources.py).

Counts of instructions are the best that can be said about a kernel without a GPU: they find lost
vector width, a lost pipeline, spills, a rounded product. They find neither races nor miscompiles.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_kernels.json")
COUNTED = (
    "spills",
    "stack_bytes",
    "shared_bytes",
    "async_copies",
    "tensor_copies",
    "wide_loads",
    "wide_stores",
    "barriers",
    "mma",
    "uses_tf32",
)
NAMES = (
    "prefill-80-128-bfloat16",
    "prefill-90-128-bfloat16",
    "prefill-90-128-bfloat16-block64",
    "prefill-100-64-bfloat16",
    "decode-90-128-bfloat16",
    "decode-80-128-float32",
)


@pytest.fixture(scope="module")
def compiled():
    """The benchmark's JSON, from a process whose Triton compiles."""
    script = str(ROOT / "benchmarks" / "kernel_resources.py")
    command = [sys.executable, script, "--json"]
    for name in NAMES:
        command += ["--only", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def by_name(compiled: dict, name: str) -> dict:
    return next(row for row in compiled["rows"] if row["name"] == name)


@pytest.mark.parametrize("name", [name for name in NAMES if "float32" not in name])
def test_half_precision_neither_spills_nor_outgrows_shared_memory(compiled, name):
    row = by_name(compiled, name)
    assert row["spills"] == row["stack_bytes"] == 0
    assert row["shared_bytes"] <= row["shared_limit_bytes"]


@pytest.mark.parametrize(
    ("name", "mma"),
    [
        ("prefill-80-128-bfloat16", "HMMA"),
        ("prefill-90-128-bfloat16", "wgmma"),
        ("prefill-100-64-bfloat16", "tcgen05"),
        ("decode-90-128-bfloat16", "HMMA"),
    ],
)
def test_products_run_on_the_tensor_cores_of_the_architecture(compiled, name, mma):
    assert by_name(compiled, name)["mma"] == mma


def test_keys_and_values_arrive_by_wide_asynchronous_copies(compiled):
    rows = {name: by_name(compiled, name) for name in NAMES}
    with_tma = rows.pop("prefill-90-128-bfloat16-block64")
    assert with_tma["tensor_copies"] > 0
    assert with_tma["async_copies"] == 0
    for name, row in rows.items():
        assert row["async_copies"] > 0, name


def test_float32_products_are_not_rounded_to_tf32(compiled):
    row = by_name(compiled, "decode-80-128-float32")
    assert not row["uses_tf32"]
    assert row["mma"] == "FFMA"


def test_counts_are_the_recorded_ones(compiled):
    """To record new ones after a change that was meant: delete the file and run this test twice."""
    counts = {row["name"]: {key: row[key] for key in COUNTED} for row in compiled["rows"]}
    found = {"triton": compiled["triton"], "rows": counts}
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"recorded {GOLDEN.name}; read it, then run again")
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] != found["triton"]:
        pytest.skip(f"recorded with triton {golden['triton']}, this is {found['triton']}")
    assert found == golden
