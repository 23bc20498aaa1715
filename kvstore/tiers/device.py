"""The device tier on CUDA: a pool in device memory and copies on streams of their own."""

from collections.abc import Sequence
from typing import Any

import torch

from kvstore.block import BlockLayout
from kvstore.tiers.base import Rows
from kvstore.tiers.host import FreeIds


class CudaPool:
    """``capacity`` blocks as one tensor ``[capacity, *layout.shape]`` in device memory."""

    def __init__(self, capacity: int, layout: BlockLayout, device: torch.device) -> None:
        self.capacity = capacity
        self.tensor = torch.zeros(
            (capacity, *layout.shape), dtype=getattr(torch, layout.dtype), device=device
        )
        self._free = FreeIds(capacity)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_ids(self) -> set[int]:
        return set(self._free)

    def allocate(self, count: int) -> list[int]:
        return self._free.take(count)

    def free(self, block_id: int) -> None:
        self._free.give(block_id)

    def payload(self, block_id: int) -> None:
        """The processor cannot address device memory."""


class CudaCopier:
    """Block copies in both directions, each on its own stream, behind the owner's fence.

    The host side is registered (page-locked) the first time it is seen, so that copies are
    asynchronous; completion is waited for on the worker thread, never by the owner.
    """

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        self._bytes = pool.tensor.view(pool.capacity, -1).view(torch.uint8)
        device = pool.tensor.device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._registered: dict[int, torch.Tensor] = {}

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._pool.tensor.device))
        return event

    def copy_out(
        self, block_ids: Sequence[int], rows: Rows, row_ids: Sequence[int], fence: Any
    ) -> None:
        host = self._page_locked(rows)
        with torch.cuda.stream(self._out):
            self._out.wait_event(fence)
            for block, row in zip(block_ids, row_ids, strict=True):
                host[row].copy_(self._bytes[block], non_blocking=True)
        self._out.synchronize()

    def copy_in(
        self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int], fence: Any
    ) -> None:
        host = self._page_locked(rows)
        with torch.cuda.stream(self._in):
            self._in.wait_event(fence)
            for row, block in zip(row_ids, block_ids, strict=True):
                self._bytes[block].copy_(host[row], non_blocking=True)
        self._in.synchronize()

    def copy_within(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        for source, target in zip(src_ids, dst_ids, strict=True):
            self._bytes[target].copy_(self._bytes[source], non_blocking=True)

    def _page_locked(self, rows: Rows) -> torch.Tensor:
        """The rows as a tensor, registered with the driver: exactly their size, where
        ``pin_memory`` would round it up to a power of two."""
        address = rows.ctypes.data
        if address not in self._registered:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, rows.nbytes, 0))
            self._registered[address] = torch.from_numpy(rows)
        return self._registered[address]
