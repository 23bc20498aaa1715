"""Runs a grid's programs in other orders than the interpreter's: a GPU promises none."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

ORDERS = ("forward", "reverse", "shuffled")


@contextmanager
def program_order(order: str, seed: int = 0) -> Iterator[None]:
    """Run the programs of each grid in another order than the interpreter's."""
    from triton.runtime.interpreter import interpreter_builder as builder

    original = builder.set_grid_idx
    orders: dict[tuple[int, ...], list[int]] = {}

    def set_grid_idx(x: int, y: int, z: int) -> None:
        grid = tuple(builder.grid_dim)
        size = grid[0] * grid[1] * grid[2]
        if grid not in orders:
            orders[grid] = list(range(size))
            if order == "reverse":
                orders[grid].reverse()
            elif order == "shuffled":
                random.Random(seed).shuffle(orders[grid])
        program = orders[grid][(x * grid[1] + y) * grid[2] + z]
        x, rest = divmod(program, grid[1] * grid[2])
        original(x, *divmod(rest, grid[2]))

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx
