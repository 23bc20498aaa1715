import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.runs import BATCH_BYTES, batches, find_runs, in_row_order


def runs_of(block_ids, row_ids, rows_per_piece=None):
    return find_runs(*in_row_order(block_ids, row_ids), rows_per_piece)


def test_neighbours_on_both_sides_are_one_run():
    assert runs_of([4, 5, 6, 9], [1, 2, 3, 4]) == [(4, 1, 3), (9, 4, 1)]
    assert runs_of([4, 5, 6], [1, 2, 8]) == [(4, 1, 2), (6, 8, 1)]


def test_a_prefix_from_its_end_is_the_same_run():
    assert runs_of([6, 5, 4], [3, 2, 1]) == runs_of([4, 5, 6], [1, 2, 3]) == [(4, 1, 3)]


def test_no_run_crosses_a_piece():
    assert runs_of(range(10, 16), range(2, 8), 4) == [(10, 2, 2), (12, 4, 4)]


def test_no_blocks_are_no_runs():
    assert runs_of([], []) == []
    assert batches(0, 4096) == []


@given(
    pairs=st.dictionaries(st.integers(0, 40), st.integers(0, 40)),
    rows_per_piece=st.none() | st.integers(1, 9),
)
def test_runs_cover_every_pair_once_within_pieces(pairs, rows_per_piece):
    runs = runs_of(list(pairs.values()), list(pairs), rows_per_piece)
    covered = [(row + i, block + i) for block, row, count in runs for i in range(count)]
    assert sorted(covered) == sorted(pairs.items())
    if rows_per_piece:
        assert all(
            row // rows_per_piece == (row + count - 1) // rows_per_piece for _, row, count in runs
        )


@given(num_blocks=st.integers(0, 300), block_bytes=st.integers(1 << 18, 1 << 26))
def test_batches_cover_all_blocks_and_keep_their_limit(num_blocks, block_bytes):
    ids = np.arange(num_blocks)
    parts = [ids[batch] for batch in batches(num_blocks, block_bytes)]
    assert [i for part in parts for i in part] == list(range(num_blocks))
    assert all(len(part) == 1 or len(part) * block_bytes <= BATCH_BYTES for part in parts)
