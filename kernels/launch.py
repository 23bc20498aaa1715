"""One kernel launch as a value: run it, or compile it for a GPU that is not there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """``arguments`` are the kernel's run-time arguments in order, ``options`` its constants.

    Fusing products and sums is asked for by name: Triton is about to change its default.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def run(self) -> None:
        """Enqueue on the current stream; does not synchronise."""
        self.kernel[self.grid](*self.arguments, enable_fp_fusion=True, **self.options)

    def warmup(self) -> Any:
        """Compile for the active driver; returns the compiled kernel."""
        return self.kernel.warmup(
            *self.arguments, grid=self.grid, enable_fp_fusion=True, **self.options
        )
