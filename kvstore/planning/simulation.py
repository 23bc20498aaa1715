"""One cache after another run through a trace: for what the one-pass curve cannot say.

Each request goes through a real ``BlockStore``: lookup, reserve, commit, release, and the polls in
between, at the times of the trace. Blocks are one token long and a few bytes large, so that the
store's own arithmetic counts blocks. Requests follow each other; they do not overlap.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kvstore.block import BlockLayout, TierName
from kvstore.config import StoreConfig
from kvstore.errors import CapacityError, ConfigError, OutOfBlocksError
from kvstore.planning.request_batch import Ints, RequestBatch
from kvstore.planning.simulated_tiers import InstantTransfer, SimulatedDisk
from kvstore.store import BlockStore
from kvstore.tiers.host import HostPool

_LAYOUT = BlockLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=1, dtype="float16")
_MOST_POLLS = 10_000  # for the room of one request; each ends transfers or starts some
_TIERS = (TierName.DEVICE, TierName.HOST, TierName.DISK)


@dataclass(frozen=True, slots=True)
class CacheSetup:
    """What is simulated: tier sizes in blocks, 0 for no tier, and the store's settings."""

    device_blocks: int
    host_blocks: int = 0
    disk_blocks: int = 0
    policy: str = "lru"
    write_policy: str = "write_behind"

    def __post_init__(self) -> None:
        if self.device_blocks < 1 or min(self.host_blocks, self.disk_blocks) < 0:
            raise ConfigError(
                "a simulated cache has at least one device block, and no tier below 0"
            )
        self.config()

    def config(self) -> StoreConfig:
        """Settings of the store. Raises ``ConfigError`` for a policy that there is not."""
        policies: dict[str, Any] = {"policy": self.policy, "write_policy": self.write_policy}
        return StoreConfig(load_policy="always", **policies)

    def scaled(self, rate: float) -> "CacheSetup":
        """The same for a sample of the blocks; a tier that is there stays there."""

        def scale(num_blocks: int) -> int:
            return max(1, round(num_blocks * rate)) if num_blocks else 0

        return CacheSetup(
            scale(self.device_blocks),
            scale(self.host_blocks),
            scale(self.disk_blocks),
            self.policy,
            self.write_policy,
        )


@dataclass(frozen=True, slots=True)
class Replayed:
    """Hits of a batch's requests: [r] blocks and tokens by the tier that held them."""

    blocks: dict[TierName, Ints]
    tokens: dict[TierName, Ints]


class Simulation:
    """A store that requests are put through. Close it, or use it in a ``with`` block.

    A request longer than the device tier uses and leaves its first blocks there, as in the curve.
    """

    def __init__(self, setup: CacheSetup) -> None:
        self.setup = setup
        config = setup.config()
        self._disk = SimulatedDisk(setup.disk_blocks, config) if setup.disk_blocks else None
        self._now_s = 0.0
        self.store = BlockStore(
            _LAYOUT,
            bytes(32),
            HostPool(setup.device_blocks, _LAYOUT.block_bytes),
            host_blocks=setup.host_blocks,
            disk=self._disk,
            config=config,
            clock=lambda: self._now_s,
            transfer_loop=InstantTransfer,
        )
        self.store.publisher.stop()  # nobody watches

    @property
    def written_blocks(self) -> int:
        """Blocks written to disk so far, ones written again counted again."""
        return self._disk.num_written if self._disk else 0

    def replay(self, batch: RequestBatch, tokens_of_block: Ints) -> Replayed:
        """Put a batch's requests through. ``blocks`` are below 2**32; tokens [n] are what each
        block reference counts."""
        hits = {tier: np.zeros(len(batch), np.int64) for tier in _TIERS}
        tokens = {tier: np.zeros(len(batch), np.int64) for tier in _TIERS}
        for i, (blocks, _, arrival_s) in enumerate(batch.prompts()):
            start, num_found = int(batch.offsets[i]), 0
            for tier, count in self.request(blocks.astype("<u4").tobytes(), arrival_s):
                first = start + num_found
                hits[tier][i] += count
                tokens[tier][i] += tokens_of_block[first : first + count].sum()
                num_found += count
        return Replayed(hits, tokens)

    def request(self, blocks: bytes, arrival_s: float) -> list[tuple[TierName, int]]:
        """One request, uint32 a block. Returns its hits in order: so many from that tier, then …"""
        store, most = self.store, 4 * self.setup.device_blocks
        self._now_s = max(self._now_s, arrival_s)
        self._settle()
        blocks = blocks[:most]
        num_blocks = len(blocks) // 4
        if not num_blocks:
            return []
        lookup = store.lookup(blocks, num_reusable=num_blocks)
        while not lookup.is_ready:
            store.poll()
        found = [(tier, len(list(run))) for tier, run in groupby(lookup.sources)]
        for _ in range(_MOST_POLLS):
            try:
                lease = store.reserve(lookup, num_blocks)
                break
            except OutOfBlocksError:
                store.poll()
        else:
            raise CapacityError(
                f"the simulated device of {self.setup.device_blocks} blocks finds no room; "
                "use a larger one"
            )
        while not lease.is_ready:
            store.poll()
        store.commit(lease, blocks, num_blocks)
        store.release(lease)
        store.poll()
        return found

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Do what became due since the last request."""
        store = self.store
        while store.num_pending or store.next_deadline() <= self._now_s:
            store.poll()
