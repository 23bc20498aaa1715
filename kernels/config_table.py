"""Tile shapes, made by ``python -m kernels.tune``; see ``configs.py``. Do not edit by hand.

``TABLE[regime, itemsize][compute capability, head_dim] = (rows, keys, warps, stages, tma)``
"""

Row = tuple[int, int, int, int, bool]
TABLE: dict[tuple[str, int], dict[tuple[int, int], Row]] = {
    ("prefill", 2): {
        (80, 64): (128, 64, 8, 3, False),
        (80, 128): (128, 64, 8, 3, False),
        (80, 256): (64, 32, 8, 2, False),
        (90, 64): (128, 64, 8, 3, True),
        (90, 128): (128, 64, 8, 3, True),
        (90, 256): (128, 32, 8, 2, False),
    },
    ("prefill", 4): {
        (80, 64): (32, 32, 8, 2, False),
        (80, 128): (32, 32, 8, 2, False),
        (80, 256): (32, 16, 8, 2, False),
    },
    ("decode", 2): {
        (80, 64): (16, 64, 4, 3, False),
        (80, 128): (16, 64, 4, 3, False),
        (80, 256): (16, 32, 4, 3, False),
    },
    ("decode", 4): {
        (80, 64): (16, 32, 4, 2, False),
        (80, 128): (16, 32, 4, 2, False),
        (80, 256): (16, 16, 4, 2, False),
    },
}
