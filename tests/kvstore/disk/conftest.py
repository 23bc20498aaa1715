"""Fixtures of the disk tier's tests; what their child processes also need is in ``disk_case``."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no test folder on the path

from disk_case import Blocks, FakeClock

from kvstore.disk import DiskStore


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The soak counts take minutes: only ``-m soak`` runs them."""
    if "soak" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="run by make soak-disk"))


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(directory: Path) -> Iterator[DiskStore]:
    with DiskStore.open(directory, capacity_bytes=64 << 20) as opened:
        yield opened


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
