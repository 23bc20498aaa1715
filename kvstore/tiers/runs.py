"""Which blocks of a copy lie side by side, so that they move as one piece."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

BATCH_BYTES = 32 << 20  # copied as one unit: what a later, shorter copy may have to wait for


class Run(NamedTuple):
    """Blocks ``block …`` of one side and ``row …`` of the other, ``num_blocks`` of each."""

    block: int
    row: int
    num_blocks: int


def in_row_order(block_ids: Sequence[int], row_ids: Sequence[int]) -> tuple[Ids, Ids]:
    """The same pairs with rows ascending.

    A copy may move its blocks in any order, and a prefix arrives here root first or leaf first,
    depending on who asked; only in one of the two directions do neighbours follow each other.
    """
    blocks, rows = np.asarray(block_ids, np.int64), np.asarray(row_ids, np.int64)
    assert blocks.shape == rows.shape, "every block has one row"
    order = np.argsort(rows, kind="stable")
    return blocks[order], rows[order]


def find_runs(blocks: Ids, rows: Ids, rows_per_piece: int | None = None) -> list[Run]:
    """Maximal stretches in which both ids go up by one.

    ``rows_per_piece``: no run crosses a multiple of it, for rows that are page-locked piecewise.
    """
    if not len(blocks):
        return []
    ends = (np.diff(blocks) != 1) | (np.diff(rows) != 1)
    if rows_per_piece is not None:
        ends |= np.diff(rows // rows_per_piece) != 0
    starts = np.concatenate(([0], np.flatnonzero(ends) + 1))
    counts = np.diff(starts, append=len(blocks))
    columns = blocks[starts].tolist(), rows[starts].tolist(), counts.tolist()
    return list(map(Run, *columns))


def batches(num_blocks: int, block_bytes: int) -> list[slice]:
    """Parts of a copy, each at most ``BATCH_BYTES`` but at least one block."""
    step = max(1, BATCH_BYTES // block_bytes)
    return [slice(start, start + step) for start in range(0, num_blocks, step)]
