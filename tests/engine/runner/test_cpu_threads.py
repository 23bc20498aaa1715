import os
import sys
import threading

import pytest
import torch

from engine.runner.cpu_threads import on_all_threads, on_threads, release_threads

pytestmark = pytest.mark.skipif(
    not torch.backends.openmp.is_available(), reason="torch has no OpenMP here"
)


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_all_threads_are_back_inside_and_afterwards():
    with on_threads(3, is_narrow=True):
        assert torch.get_num_threads() == 1
        assert on_all_threads(torch.get_num_threads) == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_threads_than_there_are(count, is_narrow):
    with on_threads(count, is_narrow=is_narrow):
        assert torch.get_num_threads() == (1 if is_narrow else count)
        assert on_all_threads(torch.get_num_threads) == count
    assert torch.get_num_threads() == on_all_threads(torch.get_num_threads) == 3


def test_nothing_changes_where_nothing_is_narrowed():
    assert on_all_threads(torch.get_num_threads) == 3


def test_an_error_leaves_the_threads_as_they_were():
    def fail():
        raise KeyError

    with pytest.raises(KeyError), on_threads(3, is_narrow=True):
        on_all_threads(fail)
    assert torch.get_num_threads() == 3
    with on_threads(3, is_narrow=True):
        with pytest.raises(KeyError):
            on_all_threads(fail)
        assert torch.get_num_threads() == 1


def test_a_thread_that_comes_meanwhile_has_all_of_them():
    """``torch.set_num_threads`` would leave it with one, for good."""
    seen: list[int] = []
    with on_threads(3, is_narrow=True):
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [3]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing lists a process's threads")
def test_threads_that_were_released_come_again():
    """They are the library's own, and die: the next operator starts others."""
    rows = torch.ones(1 << 16)
    expected = rows.sin().sum()
    before = set(os.listdir("/proc/self/task"))
    release_threads()
    assert set(os.listdir("/proc/self/task")) < before
    assert rows.sin().sum() == expected
