import sys
from pathlib import Path

import pytest

# importlib mode puts no test folder on the path
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kvstore" / "disk"))

import command_case
from disk_case import IDENTITY, NAMESPACE, Blocks

from kvstore.disk import DiskStore


@pytest.fixture(scope="session")
def kvstore():
    """The command in a process of its own, with a pipe at each end, as a script would run it."""
    return command_case.run_in_process


@pytest.fixture
def run():
    """The command in this process: the same but for the interpreter's start and end."""
    return command_case.run_here


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(payload_bytes=3000)


@pytest.fixture
def cache(tmp_path, blocks) -> Path:
    """Three documents: of five blocks, of three that share two of them, and of four."""
    directory = tmp_path / "a cache"
    with DiskStore.open(directory, capacity_bytes=32 << 20) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        trunk = blocks.chain(5, start=1)
        store.put_group(blocks.writes(trunk))
        store.put_group(blocks.writes(blocks.below(trunk[1], 1, start=2)))
        store.put_group(blocks.writes(blocks.chain(4, start=3)))
    return directory
