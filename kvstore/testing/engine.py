"""An engine without a model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import OutOfBlocksError
from kvstore.hashing import encode_tokens
from kvstore.lease import Lease, Lookup
from kvstore.store import BlockStore
from kvstore.tiers.host import HostPool


class FakeEngine:
    """Plays the engine's part on a store: no model, but bytes that can be checked.

    Each position of a block holds a digest of all tokens up to it, as K and V depend on them, and
    of the salt, for what one tenant has cached is no other's. Every position that a lease claims to
    have cached is compared with that.

    rows    the device's blocks as bytes [num_blocks, block_bytes], where that is no host pool
    submit  has the device write or compare a block when it gets there; by default it is there
    """

    def __init__(
        self,
        store: BlockStore,
        rows: npt.NDArray[np.uint8] | None = None,
        submit: Callable[[Callable[[], object]], object] = lambda work: work(),
    ) -> None:
        if rows is None:
            assert isinstance(store.device, HostPool)
            rows = store.device.rows
        self.store = store
        self._submit = submit
        self._block_size = store.layout.block_size
        runs = store.layout.num_layers * 2
        # [num_blocks, layers and K or V, position, bytes]
        self._rows = rows.reshape(store.device.capacity, runs, self._block_size, -1)

    def start(self, token_ids: Sequence[int], salt: str = "") -> Lease:
        """Look up and reserve until the lease is ready; waits for transfers.

        Raises ``OutOfBlocksError`` when waiting does not help.
        """
        lookup = self.look_up(token_ids, salt)
        while True:
            lease = self.reserve(lookup, len(token_ids))
            while not lease.is_ready:
                self.store.run_until_idle(1.0)
            if not lease.is_provisional:
                self.check_cached(lease, token_ids)
                return lease
            self.store.release(lease)

    def look_up(self, token_ids: Sequence[int], salt: str = "", **options: Any) -> Lookup:
        lookup = self.store.lookup(encode_tokens(token_ids), salt, **options)
        while not lookup.is_ready:
            self.store.run_until_idle(1.0)
        return lookup

    def look_up_memory(self, token_ids: Sequence[int]) -> Lookup:
        """A lookup that takes an unanswered probe for a miss."""
        lookup = self.store.lookup(encode_tokens(token_ids))
        self.store.stop_probing(lookup)
        return lookup

    def reserve(self, lookup: Lookup, num_tokens: int) -> Lease:
        while True:
            try:
                return self.store.reserve(lookup, num_tokens)
            except OutOfBlocksError as error:
                if error.available_blocks < error.needed_blocks:
                    raise
                self.store.run_until_idle(1.0)
                self.store.flush(1.0)

    def compute(
        self,
        lease: Lease,
        token_ids: Sequence[int],
        start: int | None = None,
        *,
        commits: bool = True,
    ) -> None:
        """Fill the positions from ``start`` on, by default those the lease has not cached, and
        commit."""
        if start is None:
            start = lease.num_cached_tokens(self._block_size)
        for at in range(start, len(token_ids)):
            content = self._content(lease.lookup.salt, token_ids, at)
            self._submit(partial(np.copyto, self._position(lease, at), content))
        if commits:
            self.store.commit(lease, encode_tokens(token_ids), len(token_ids))

    def run(self, token_ids: Sequence[int], salt: str = "") -> Lookup:
        """One whole request; returns its lookup, whose sources tell what was cached where."""
        lease = self.start(token_ids, salt)
        self.compute(lease, token_ids)
        self.store.release(lease)
        return lease.lookup

    def check_cached(self, lease: Lease, token_ids: Sequence[int]) -> None:
        self.check_content(lease, token_ids[: lease.num_cached_tokens(self._block_size)])

    def check_content(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """The lease's first positions hold what belongs to these tokens."""
        for at in range(len(token_ids)):
            content = self._content(lease.lookup.salt, token_ids, at)
            self._submit(partial(_compare, self._position(lease, at), content))

    def payload(self, salt: bytes, token_ids: Sequence[int]) -> bytes:
        """The bytes of the block that these tokens end with, wherever it lies.

        salt  digest of the salt
        """
        ends = range(len(token_ids) - self._block_size, len(token_ids))
        runs = [self._content(salt, token_ids, at) for at in ends]
        return np.broadcast_to(np.stack(runs), self._rows.shape[1:]).tobytes()

    def check_blocks(self, blocks: Mapping[int, bytes]) -> None:
        """Blocks of the device, by id, hold these bytes."""

        def compare() -> None:
            for block_id, payload in blocks.items():
                content = np.frombuffer(payload, np.uint8).reshape(self._rows.shape[1:])
                _compare(self._rows[block_id], content)

        self._submit(compare)

    def _position(self, lease: Lease, at: int) -> npt.NDArray[np.uint8]:
        """The bytes of one position, in all layers."""
        block, offset = divmod(at, self._block_size)
        return self._rows[lease.block_ids[block], :, offset]

    def _content(self, salt: bytes, token_ids: Sequence[int], at: int) -> npt.NDArray[np.uint8]:
        digest = sha256(salt + encode_tokens(token_ids[: at + 1])).digest()
        return np.resize(np.frombuffer(digest, np.uint8), self._rows.shape[-1])


def _compare(served: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]) -> None:
    assert (served == content).all(), "a wrong block was served"
