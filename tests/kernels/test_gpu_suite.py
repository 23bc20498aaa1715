"""The GPU suite's harness, interpreted at toy sizes: it must not be broken when a GPU comes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_suite.py"), "--toy", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GOMP_SPINCOUNT": "0"}
    done = subprocess.run(
        [*command, "--out", str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (folder / "gpu_suite-toy.md").read_text().count("\n|") > 10
    assert json.loads((folder / "gpu_suite-toy.json").read_text()) == json.loads(done.stdout)
    return json.loads(done.stdout)


@pytest.mark.parametrize("section", ["correctness", "attention", "copies", "decode", "ttft"])
def test_every_section_has_rows_and_none_failed(result, section):
    rows = [row for row in result["rows"] if row["section"] == section]
    assert len(rows) >= 4
    assert not [row["case"] for row in rows if row["ok"] is False]


def test_every_tier_served_the_random_model(result):
    cases = [row["case"] for row in result["rows"] if row["section"] == "ttft"]
    assert cases == ["cold", "device", "host", "disk"]
