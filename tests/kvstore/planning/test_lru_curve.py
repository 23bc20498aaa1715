import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lru_oracle import batch_of, lru_hits

from kvstore.errors import ConfigError
from kvstore.planning import BlockSampler, RequestBatch, read_trace
from kvstore.planning.lru_curve import LruCurve

CAPACITIES = (30, 300, 1000, 3000, None)


@given(
    st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=1, max_size=20),
    st.integers(1, 15),
)
def test_misses_of_any_capacity_are_those_of_an_lru_cache(requests, capacity):
    curve = LruCurve()
    curve.add(batch_of(requests))
    missed = [len(r) - hits for r, hits in zip(requests, lru_hits(requests, capacity), strict=True)]
    assert curve.misses(capacity).blocks == sum(missed)
    assert curve.misses(capacity).tokens == 512 * sum(missed)
    assert curve.misses(capacity).error_blocks == 0


def test_without_a_limit_only_first_uses_are_missed():
    curve = LruCurve()
    curve.add(batch_of([[1, 2], [3], [1, 2]]))
    assert curve.misses(None).blocks == 3
    assert curve.misses(1).blocks == 5


def whole_trace(trace) -> RequestBatch:
    (batch,) = read_trace(trace)
    return batch


@pytest.mark.parametrize("options", [{"rate": 0.25}, {"most_blocks": 1000}], ids=str)
def test_a_sample_of_blocks_is_right_on_average_and_knows_its_error(trace, options):
    """Over 24 different samples: no bias, and nearly all intervals hold the truth."""
    batch = whole_trace(trace)
    exact = LruCurve()
    exact.add(batch)
    truth = np.array([exact.misses(capacity).blocks for capacity in CAPACITIES])
    found, covered = [], []
    for seed in range(24):
        curve = LruCurve(BlockSampler(**options))
        salted = batch.blocks * np.uint64(0x2545F4914F6CDD1D) + np.uint64(seed << 40)
        for part in parts_of(batch, salted):
            curve.add(part)
        misses = [curve.misses(capacity) for capacity in CAPACITIES]
        found.append([each.blocks for each in misses])
        covered += [
            abs(each.blocks - true) <= each.error_blocks + 1e-9
            for each, true in zip(misses, truth, strict=True)
        ]
        assert curve.sampler.rate < 1
    standard_error = np.std(found, axis=0) / np.sqrt(len(found))
    assert (
        abs(np.mean(found, axis=0) - truth) < 4 * standard_error + 0.003 * len(batch.blocks)
    ).all()
    assert np.mean(covered) > 0.85


def parts_of(batch: RequestBatch, blocks: np.ndarray) -> list[RequestBatch]:
    """Batches of ten requests, of other ids: what a long trace is to a sample."""
    parts = []
    for first in range(0, len(batch), 10):
        offsets = batch.offsets[first : first + 11]
        parts.append(
            RequestBatch(
                blocks[offsets[0] : offsets[-1]],
                offsets - offsets[0],
                batch.num_tokens[first : first + 10],
                batch.arrival_s[first : first + 10],
                batch.block_tokens,
            )
        )
    return parts


def test_a_bounded_sample_stays_within_its_bound_and_a_trace_that_fits_is_exact(trace):
    batch = whole_trace(trace)
    small, large = (
        LruCurve(BlockSampler(most_blocks=500)),
        LruCurve(BlockSampler(most_blocks=10**6)),
    )
    for part in parts_of(batch, batch.blocks):
        small.add(part)
        large.add(part)
        assert small.distances.num_blocks <= 500
    assert small.sampler.rate < 1
    assert large.sampler.rate == 1
    exact = LruCurve()
    exact.add(batch)
    assert large.misses(1000) == exact.misses(1000)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.5}, {"most_blocks": 0}], ids=str)
def test_a_sample_of_nothing_is_refused(options):
    with pytest.raises(ConfigError, match="sample"):
        BlockSampler(**options)
