import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "extrapolate.py"


def extrapolated(*options: str) -> tuple[list[list[str]], list[list[str]]]:
    """Cells of its two tables, without their heads."""
    command = [sys.executable, str(SCRIPT), *options]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes, uses = (
        [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[2:]]
        for table in text.split("\n\n")
    )
    return sizes, uses


def test_a_thousand_engines_hold_a_thousand_times_as_much_and_the_scarcest_resource_is_first():
    sizes, uses = extrapolated("--device-gib", "1", "--host-gib", "3", "--disk-tib", "0.5")
    assert [row[0] for row in sizes] == ["1", "8", "100", "1,000"]
    assert sizes[0][1:4] == ["1 GiB", "3 GiB", "64 GiB"]
    assert sizes[0][4] == "34.8 thousand"  # 68 GiB of blocks of 2 MiB
    assert sizes[3][4] == "34.8 million"
    assert uses[0][0].startswith("wear of a node's drive")
    assert uses[-1][0] == "index in memory"
