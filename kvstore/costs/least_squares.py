"""Least squares of a few coefficients that cannot be negative, such as costs."""

import math
from collections.abc import Sequence

_TINY = 1e-12  # of quantities whose natural size is one


def least_squares(rows: Sequence[tuple[Sequence[float], float, float]]) -> list[float]:
    """Coefficients p >= 0 that minimise the sum of w (features · p - target)² over the rows
    (features, target, w).

    Exact: of the few subsets of coefficients that are not zero, the best; of equally good ones the
    first, so that what the rows leave open goes to the earlier coefficients.
    """
    size = len(rows[0][0])
    # Columns and targets of length one, so that one threshold fits all.
    scales = [math.sqrt(sum(w * x[j] * x[j] for x, _, w in rows)) or 1.0 for j in range(size)]
    length = math.sqrt(sum(w * target * target for _, target, w in rows)) or 1.0
    products = [
        [sum(w * x[i] * x[j] for x, _, w in rows) / scales[i] / scales[j] for j in range(size)]
        for i in range(size)
    ]
    right = [
        sum(w * x[i] * target for x, target, w in rows) / scales[i] / length for i in range(size)
    ]
    best, most = [0.0] * size, 0.0
    for subset in range(1, 1 << size):
        chosen = [i for i in range(size) if subset >> i & 1]
        solution = _solve([[products[i][j] for j in chosen] + [right[i]] for i in chosen])
        if solution is None or min(solution) < 0:
            continue
        explained = sum(right[i] * p for i, p in zip(chosen, solution, strict=True))
        if explained > most + _TINY:
            most, best = explained, [0.0] * size
            for i, p in zip(chosen, solution, strict=True):
                best[i] = p * length / scales[i]
    return best


def _solve(matrix: list[list[float]]) -> list[float] | None:
    """Gaussian elimination on [A | b], which is overwritten; None when A is singular."""
    size = len(matrix)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < _TINY:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [
                    a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)
                ]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
