import dataclasses

import pytest

from kvstore.reports.histogram import BOUNDS_S, Histogram


def test_a_value_counts_in_the_first_bucket_that_is_not_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        histogram.observe(value)
    stats = histogram.stats()
    assert stats.counts == (2, 2, 2)
    assert (stats.count, stats.total) == (6, pytest.approx(16.5))


def test_a_snapshot_does_not_change():
    histogram = Histogram()
    before = histogram.stats()
    histogram.observe(0.1)
    assert before.count == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.total = 1.0


def test_bounds_rise():
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
