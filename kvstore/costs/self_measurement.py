"""What loads cost, measured with blocks that nobody waits for: where estimates start from.

One block and then several are moved along the way that real loads take. That is a job of the
transfer thread, of a few milliseconds, beside whatever else goes on: nobody waits for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvstore.backing import Backing
from kvstore.block import TierName
from kvstore.costs.cost import CostModel, LoadEstimate
from kvstore.errors import KVStoreError
from kvstore.hashing import chain_seed
from kvstore.memory import Memory
from kvstore.tiers.base import BlockCopier, BlockRead, DiskTier, Rows
from kvstore.transfer import TransferLoop

_MOST_BYTES = 4 << 20  # a millisecond or two of copying
_MOST_BLOCKS = 16


class SelfMeasurement:
    """Measures each tier once. Owner thread only.

    block_ids, host_ids   what it uses of device and host while it runs
    """

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        transfer: TransferLoop,
        copier: BlockCopier,
        cost: CostModel,
    ) -> None:
        self._backing = backing
        self._seed = chain_seed(memory.namespace)
        self._transfer = transfer
        self._copier = copier
        self._device = memory.device
        self._host = memory.host
        self._cost = cost
        self._block_bytes = memory.layout.block_bytes
        self._clock = memory.clock
        self._most = max(2, min(_MOST_BLOCKS, _MOST_BYTES // memory.layout.block_bytes))
        self._left = {TierName.DISK} if memory.host is None else {TierName.HOST, TierName.DISK}
        self.block_ids: list[int] = []
        self.host_ids: list[int] = []

    def start(self) -> None:
        """Measure what has not been measured yet: host, and disk by blocks that begin a sequence
        without a salt. One that cannot be measured now is left for the next call."""
        disk = self._backing.tier
        if TierName.HOST in self._left:
            self._start_host()
        if TierName.DISK in self._left and disk is not None:
            self._left.remove(TierName.DISK)
            job = measure_disk(disk, self._seed, self._block_bytes, self._most, self._clock)
            self._transfer.run(job, lambda outcome: self._end(TierName.DISK, outcome))

    def _start_host(self) -> None:
        assert self._host is not None
        count = min(self._most, self._device.num_free, self._host.num_free)
        if count < 2:
            return
        self._left.remove(TierName.HOST)
        self.block_ids, self.host_ids = self._device.allocate(count), self._host.allocate(count)
        job = measure_host(
            self._copier,
            self._host.rows,
            self.host_ids,
            self.block_ids,
            self._copier.fence(),
            self._clock,
        )
        self._transfer.run(job, self._end_host)

    def _end_host(self, outcome: LoadEstimate | KVStoreError | None) -> None:
        assert self._host is not None
        for block_id, host_id in zip(self.block_ids, self.host_ids, strict=True):
            self._device.free(block_id)
            self._host.free(host_id)
        self.block_ids, self.host_ids = [], []
        self._end(TierName.HOST, outcome)

    def _end(self, tier: TierName, outcome: LoadEstimate | KVStoreError | None) -> None:
        if isinstance(outcome, LoadEstimate):
            self._cost.start_from(tier, outcome)
        else:
            self._left.add(tier)


async def measure_host(
    copier: BlockCopier,
    rows: Rows,
    row_ids: Sequence[int],
    block_ids: Sequence[int],
    fence: Any,
    clock: Callable[[], float],
) -> LoadEstimate | None:
    """Host rows into device blocks, both of which are the measurement's until it returns."""

    async def load(ids: slice) -> None:
        await copier.copy_in(rows, row_ids[ids], block_ids[ids], fence)

    await load(slice(None))  # memory that was never touched costs more than copying it
    return await _measure(load, len(block_ids), rows.shape[1], clock)


async def measure_disk(
    disk: DiskTier, seed: bytes, block_bytes: int, most: int, clock: Callable[[], float]
) -> LoadEstimate | None:
    """At most ``most`` blocks under ``seed``; None when disk does not hold and give back two."""
    refs = (await disk.children(seed))[:most]
    if len(refs) < 2:
        return None
    reads = [BlockRead(ref, memoryview(bytearray(block_bytes))) for ref in refs]
    outcomes: list[KVStoreError | None] = []

    async def load(ids: slice) -> None:
        outcomes.extend(await disk.read(reads[ids]))

    estimate = await _measure(load, len(reads), block_bytes, clock)
    return estimate if all(outcome is None for outcome in outcomes) else None


async def _measure(
    load: Callable[[slice], Awaitable[None]],
    count: int,
    block_bytes: int,
    clock: Callable[[], float],
) -> LoadEstimate:
    """Load the first of ``count`` blocks, then the others: what each costs, and what is left."""
    start = clock()
    await load(slice(0, 1))
    middle = clock()
    await load(slice(1, count))
    first_s, others_s = middle - start, clock() - middle
    # The others are count - 2 blocks more than the first; noise must not make a block cost nothing.
    more_s = (others_s - first_s) / max(1, count - 2)
    block_s = max(more_s, others_s / (count - 1) / 10, 1e-9)
    return LoadEstimate(max(first_s - block_s, 1e-6), block_bytes / block_s)
