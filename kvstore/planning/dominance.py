"""Counting, for each element of a sequence, the larger ones before a given place.

A wavelet tree walked level by level, all queries at once: 17 passes of numpy over 131,072 elements.
A Fenwick tree counts the same one by one, which is fifty times slower in Python.
"""

import numpy as np

from kvstore.planning.request_batch import Ints


def count_larger_before(ranks: Ints, ends: Ints) -> Ints:
    """For each i, how many j < ends[i] have ranks[j] > ranks[i].

    ranks   [n], a permutation of 0 … n - 1
    ends    [n], each in [0, n]
    returns [n]
    """
    n = len(ranks)
    values = np.arange(n, dtype=np.int32)
    sequence = ranks.astype(np.int32)
    # By value: elements before the query's end that share the value's bits above the level.
    inside = np.empty(n, np.int32)
    inside[sequence] = ends
    larger = np.zeros(n, np.int32)
    ones_before = np.zeros(n + 1, np.int32)
    # Invariant: ``sequence`` is sorted by the bits above the level and otherwise in its order, so
    # the node of a value begins at the value itself with the lower bits cleared, and half of what
    # lies before a node has a one at this level: all values below are there.
    for bit in reversed(range(max(1, (n - 1).bit_length()))):
        ones = (sequence >> bit) & 1
        np.cumsum(ones, out=ones_before[1:])
        start = values >> (bit + 1) << (bit + 1)
        ones_inside = ones_before[start + inside] - (start >> 1)
        is_one = (values >> bit & 1).astype(bool)
        larger += np.where(is_one, 0, ones_inside)
        inside = np.where(is_one, ones_inside, inside - ones_inside)
        node = sequence >> (bit + 1) << (bit + 1)
        rank_of_one = ones_before[:-1] - (node >> 1)
        place = np.where(ones == 1, node + (1 << bit) + rank_of_one, values - rank_of_one)
        following = np.empty_like(sequence)
        following[place] = sequence
        sequence = following
    return larger[ranks].astype(np.int64)
