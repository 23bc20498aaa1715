import threading

import pytest
import torch

from engine.runner.cpu_threads import on_all_threads, on_one_thread

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
    with on_one_thread():
        assert torch.get_num_threads() == 1
        assert on_all_threads(torch.get_num_threads) == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


def test_nothing_changes_where_nothing_is_narrowed():
    assert on_all_threads(torch.get_num_threads) == 3


def test_an_error_leaves_the_threads_as_they_were():
    def fail():
        raise KeyError

    with pytest.raises(KeyError), on_one_thread():
        on_all_threads(fail)
    assert torch.get_num_threads() == 3
    with on_one_thread():
        with pytest.raises(KeyError):
            on_all_threads(fail)
        assert torch.get_num_threads() == 1


def test_a_thread_that_comes_meanwhile_has_all_of_them():
    """``torch.set_num_threads`` would leave it with one, for good."""
    seen: list[int] = []
    with on_one_thread():
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert seen == [3]
