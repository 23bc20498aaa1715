"""Imports Triton for its interpreter, before any test module here does.

Triton decides when it is imported whether ``@jit`` interprets. So these tests want a process of
their own (``pytest tests/kernels``): where another folder's tests imported Triton first, those that
interpret are skipped and say so. The variable is set only while a test of an interpreted kernel
runs: for every other test the launchers take the torch twin.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# Tests have no packages (see the import mode in pyproject.toml); this folder's helpers are found
# like this.
sys.path.insert(0, str(Path(__file__).parent))

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    import triton

INTERPRETS = type(triton.language.max).__name__ == "InterpretedFunction"


@contextmanager
def interpreting() -> Iterator[None]:
    if not INTERPRETS:
        pytest.skip("triton was imported for compiling: run pytest tests/kernels by itself")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture
def interpreter():
    """The launchers run their Triton kernels, interpreted."""
    with interpreting():
        yield


@pytest.fixture(params=["twin", "interpreter"])
def backend(request):
    """The test runs twice: with the torch twin, and with the Triton kernel interpreted."""
    if request.param == "twin":
        yield request.param
    else:
        with interpreting():
            yield request.param
