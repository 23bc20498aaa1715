import pytest

from kvstore.costs.least_squares import least_squares


def test_exact_data_gives_back_its_coefficients():
    rows = [((1.0, x, x * x), 3 + 0.5 * x + 2 * x * x, 1.0) for x in (1.0, 2.0, 5.0, 9.0)]
    assert least_squares(rows) == pytest.approx([3, 0.5, 2])


def test_coefficients_of_very_different_size_are_found():
    points = [(x, 3 + 1e-3 * x + 1e-9 * x * x) for x in (1.0, 1e3, 1e5, 1e7)]
    rows = [((1.0, x, 1e9 * x * x), y, 1 / y**2) for x, y in points]
    assert least_squares(rows) == pytest.approx([3, 1e-3, 1e-18], rel=1e-6, abs=0)


def test_a_coefficient_that_would_be_negative_is_zero():
    rows = [((1.0, x), 10 - x, 1.0) for x in (1.0, 2.0, 3.0)]
    assert least_squares(rows) == pytest.approx([8, 0])


def test_a_row_counts_by_its_weight():
    assert least_squares([((1.0,), 1.0, 3.0), ((1.0,), 5.0, 1.0)]) == pytest.approx([2])


def test_rows_that_leave_coefficients_open_use_the_first_that_will_do():
    assert least_squares([((1.0, 2.0), 4.0, 1.0)]) == pytest.approx([4, 0])


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_size_of_targets_and_weights_does_not_matter(size):
    rows = [((1.0, x), size * (3 + 0.5 * x), 1e-20) for x in (1.0, 2.0, 5.0)]
    assert least_squares(rows) == pytest.approx([3 * size, 0.5 * size])
