"""Page-locked host memory: what a GPU copies to and from at full speed, without a processor."""

import logging
import math
import mmap

from kvstore.tiers.base import Rows
from kvstore.tiers.cuda_runtime import CudaRuntime

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30


class PageLock:
    """Keeps the pages of ``rows`` registered with the CUDA driver until ``close``.

    Existing memory is registered, where ``pin_memory`` would allocate some, rounded up to a power
    of two. It is done in pieces of whole blocks and whole pages: one limit that the last piece hits
    costs only the rest. A copy must not cross from one piece into the next.

    rows     the whole of a mapping: its first page and its last are shared with nothing
    problem  why part of the rows, from a piece on, is not page-locked; empty when all is
    """

    def __init__(self, rows: Rows, runtime: CudaRuntime, *, piece_bytes: int | None = None) -> None:
        self._runtime = runtime
        self._rows = rows  # alive, and so mapped, for as long as it is registered
        self._addresses: list[int] = []
        self.locked_bytes = 0
        self.problem = ""
        block_bytes = rows.shape[1]
        unit = math.lcm(block_bytes, mmap.PAGESIZE)
        piece_bytes = max(unit, (piece_bytes or PIECE_BYTES) // unit * unit)
        self.rows_per_piece = piece_bytes // block_bytes
        for start in range(0, rows.nbytes, piece_bytes):
            address, num_bytes = rows.ctypes.data + start, min(piece_bytes, rows.nbytes - start)
            try:
                runtime.host_register(address, num_bytes)
            except RuntimeError as error:
                self.problem = str(error)
                break
            self._addresses.append(address)
            self.locked_bytes += num_bytes

    @property
    def pageable_bytes(self) -> int:
        return self._rows.nbytes - self.locked_bytes

    def close(self) -> None:
        """Undo the registration. No copy may be under way."""
        while self._addresses:
            try:
                self._runtime.host_unregister(self._addresses.pop())
            except RuntimeError as error:  # the device is gone; the driver has let go by itself
                logger.debug("host memory could not be unregistered: %s", error)
        self.locked_bytes = 0
