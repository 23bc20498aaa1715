"""The device tier on CUDA: a pool in device memory and copies on streams of their own.

``docs/copy_path.md`` says what moves when, and which event guards what.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvstore.block import BlockLayout
from kvstore.tiers.base import CopierStats, Rows
from kvstore.tiers.cuda_runtime import CudaRuntime, Event, TorchCudaRuntime
from kvstore.tiers.host import FreeIds
from kvstore.tiers.lane import Fence, Flight, InLane, Lane, OutLane
from kvstore.tiers.layer_groups import LayerGroups
from kvstore.tiers.page_lock import PageLock
from kvstore.tiers.ring import Gather, Ring, Scatter, Slot
from kvstore.tiers.runs import Ids, Run, batches, find_runs, in_row_order

logger = logging.getLogger(__name__)

_SMALL_BYTES = 256 << 10  # one by one, pieces below this are copied far under full speed
_MAX_CUT = 1 << 16  # blocks for which a view each is made in advance, 650 bytes apiece


class CudaPool:
    """``capacity`` blocks as one tensor ``[capacity, *layout.shape]`` in device memory."""

    def __init__(self, capacity: int, layout: BlockLayout, device: torch.device) -> None:
        self.capacity = capacity
        self.layout = layout
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

    pool             the device pool; its owner computes on its thread's current stream
    runtime          the CUDA calls, torch's when None
    gather, scatter  move blocks between the pool and a buffer, enqueued on the current stream:
                     ``gather(pool, block_ids, out)``, ``scatter(src, pool, block_ids)``
    """

    def __init__(
        self,
        pool: CudaPool,
        *,
        runtime: CudaRuntime | None = None,
        gather: Gather | None = None,
        scatter: Scatter | None = None,
    ) -> None:
        self._runtime = runtime or TorchCudaRuntime(pool.tensor.device)
        self._layout = pool.layout
        self._blocks = _Views(pool.tensor.view(pool.capacity, -1).view(torch.uint8))
        self._hosts: dict[int, _Host] = {}
        rings: list[Ring | None] = [None, None]
        if pool.layout.block_bytes < _SMALL_BYTES:
            rings = [
                Ring(pool.tensor, self._runtime, gather=gather, scatter=scatter) for _ in rings
            ]
        self._out = OutLane(self._runtime, rings[0])
        self._in = InLane(self._runtime, rings[1])

    def adopt(self, rows: Rows) -> None:
        lock = PageLock(rows, self._runtime)
        if lock.problem and not self.stats().reason:
            logger.warning(
                "host memory is not page-locked bytes=%d of=%d: %s; copies are slower "
                "(the limit on locked memory, ulimit -l, may be too low)",
                lock.pageable_bytes,
                rows.nbytes,
                lock.problem,
            )
        self._hosts[rows.ctypes.data] = _Host(lock, _Views(torch.from_numpy(rows)))

    def fence(self) -> Fence:
        stream = self._runtime.current_stream()
        return Fence(stream, self._runtime.record(stream))

    async def copy_out(
        self, block_ids: Sequence[int], rows: Rows, row_ids: Sequence[int], fence: Fence
    ) -> None:
        await self._copy(self._out, block_ids, self._host(rows), row_ids, fence)

    async def copy_in(
        self, rows: Rows, row_ids: Sequence[int], block_ids: Sequence[int], fence: Fence
    ) -> None:
        await self._copy(self._in, block_ids, self._host(rows), row_ids, fence)

    async def copy_in_groups(
        self,
        rows: Rows,
        row_ids: Sequence[int],
        block_ids: Sequence[int],
        fence: Fence,
        groups: LayerGroups,
    ) -> None:
        """Like ``copy_in``, but the layers ``groups.spans[0]`` of all blocks first, and so on.

        ``groups`` learns of each when it has been submitted, for ``wait_layer``, or of the error.
        """
        host = self._host(rows)
        layer_bytes = self._layout.block_bytes // self._layout.num_layers
        pairs = list(zip(block_ids, row_ids, strict=True))
        try:
            async with Flight(self._in) as flight:
                for span in groups.spans:
                    part = slice(span.start * layer_bytes, span.stop * layer_bytes)
                    event = fence.event
                    for batch in batches(len(pairs), part.stop - part.start):
                        runs = [Run(block, row, 1) for block, row in pairs[batch]]
                        send = partial(self._send, self._in, host, runs, fence, part)
                        event = await self._in.submit(send, fence)
                        await flight.add(event)
                    groups.arrive(event)
        except BaseException as error:
            groups.fail(error)
            raise

    def wait_layer(self, groups: LayerGroups, layer: int) -> None:
        """Owner: work submitted to the current stream from now on finds stored ``layer`` loaded."""
        self._runtime.wait_event(self._runtime.current_stream(), groups.event_of(layer))

    def copy_within(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> None:
        runs = find_runs(*in_row_order(dst_ids, src_ids))
        targets = [self._blocks.get(target, count) for target, _, count in runs]
        sources = [self._blocks.get(source, count) for _, source, count in runs]
        self._runtime.copy(self._runtime.current_stream(), targets, sources)

    def stats(self) -> CopierStats:
        locks = [host.lock for host in self._hosts.values()]
        return CopierStats(
            page_locked_bytes=sum(lock.locked_bytes for lock in locks),
            pageable_bytes=sum(lock.pageable_bytes for lock in locks),
            reason=next((lock.problem for lock in locks if lock.problem), ""),
        )

    def close(self) -> None:
        for lane in (self._in, self._out):
            lane.close()
        for memory in (self._in.ring, self._out.ring, *self._hosts.values()):
            if memory is not None:
                memory.close()

    def _host(self, rows: Rows) -> "_Host":
        return self._hosts[rows.ctypes.data]  # a KeyError: the rows were never adopted

    async def _copy(
        self,
        lane: Lane,
        block_ids: Sequence[int],
        host: "_Host",
        row_ids: Sequence[int],
        fence: Fence,
    ) -> None:
        blocks, rows = in_row_order(block_ids, row_ids)
        async with Flight(lane) as flight:
            for batch in batches(len(blocks), self._layout.block_bytes):
                await flight.add(await self._submit(lane, blocks[batch], host, rows[batch], fence))

    async def _submit(
        self, lane: Lane, blocks: Ids, host: "_Host", rows: Ids, fence: Fence
    ) -> Event:
        """Send one batch; through the ring where that saves at least half of many small pieces."""
        rows_per_piece = host.lock.rows_per_piece
        runs = find_runs(blocks, rows, rows_per_piece)
        if lane.ring and len(blocks) * self._layout.block_bytes < len(runs) * _SMALL_BYTES:
            slot_runs = find_runs(np.arange(len(blocks)), rows, rows_per_piece)
            if 2 * len(slot_runs) <= len(runs):
                async with lane.ring.slot(lane.passed) as slot:
                    send = partial(self._send_small, lane, slot, host, slot_runs, blocks, fence)
                    slot.last = await lane.submit(send, fence)
                    return slot.last
        return await lane.submit(partial(self._send, lane, host, runs, fence), fence)

    def _send(
        self, lane: Lane, host: "_Host", runs: list[Run], fence: Fence, part: slice | None = None
    ) -> None:
        on_device = [self._blocks.get(block, count, part) for block, _, count in runs]
        on_host = [host.rows.get(row, count, part) for _, row, count in runs]
        lane.send(on_device, on_host, fence)

    def _send_small(
        self, lane: Lane, slot: Slot, host: "_Host", runs: list[Run], blocks: Ids, fence: Fence
    ) -> None:
        in_slot = [slot.rows[place : place + count] for place, _, count in runs]
        on_host = [host.rows.get(row, count) for _, row, count in runs]
        lane.send_small(slot, in_slot, on_host, blocks, fence)


class _Views:
    """Contiguous views of ``blocks`` [num_blocks, block_bytes].

    A view made for a copy costs 2 µs of the interpreter, four times the copy call, so views of
    single blocks are made once.
    """

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._cut = blocks.unsqueeze(1).unbind(0) if len(blocks) <= _MAX_CUT else None

    def get(self, first: int, count: int, part: slice | None = None) -> Tensor:
        """``count`` blocks from ``first`` on, [count, bytes]; ``part``: these bytes of one."""
        if part is not None:
            assert count == 1, "parts of neighbours do not lie side by side"
            return self._blocks[first : first + 1, part]
        if count == 1 and self._cut is not None:
            return self._cut[first]
        return self._blocks[first : first + count]


@dataclass(frozen=True, slots=True)
class _Host:
    """An adopted array: its registration and its rows as a tensor."""

    lock: PageLock
    rows: _Views

    def close(self) -> None:
        self.lock.close()
