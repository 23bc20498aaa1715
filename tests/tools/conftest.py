import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KVSTORE = Path(sys.executable).with_name("kvstore")


@pytest.fixture(scope="session")
def kvstore() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the installed command with a pipe at each end, as a script would."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [KVSTORE, *map(str, arguments)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in result.stderr
        return result

    return run
