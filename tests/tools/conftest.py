import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

KVSTORE = Path(sys.executable).with_name("kvstore")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path) -> Path:
    """A user's cache directory that holds nothing, and shares no model."""
    return tmp_path / "home with a space"


@pytest.fixture
def kvstore(home) -> Run:
    """Runs the installed command with a pipe at each end, as a script would."""

    def run(*arguments: object, check_one_line: bool = False, **keywords):
        environment = os.environ | {"KVSTORE_HOME": str(home)} | keywords.pop("env", {})
        result = subprocess.run(
            [KVSTORE, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            **keywords,
        )
        assert "Traceback" not in result.stderr
        return result

    return run


def last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]


def listing(directory: Path) -> Sequence[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
