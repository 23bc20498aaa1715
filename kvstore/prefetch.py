"""Prefetching: cached blocks move to the device before somebody asks for them.

A prefix is named by its tokens, or by the keys of its blocks, as events and lookups carry them.
Keys alone are as good as tokens: the tokens are taken from where a block is known, and its key has
to follow from them and from the block before, from the seed of model and salt on.
"""

from collections.abc import Sequence

from kvstore.backing import Backing
from kvstore.block import BlockRef
from kvstore.errors import KVStoreError, OutOfBlocksError
from kvstore.finding import Finder
from kvstore.index import NONE
from kvstore.lease import Lease, Lookup
from kvstore.leasing import Leasing
from kvstore.matching import Matcher
from kvstore.memory import Memory
from kvstore.transfer import TransferLoop


class Prefetcher:
    """Takes free and evictable blocks only, and gives up where they are too few. Owner thread."""

    def __init__(
        self,
        memory: Memory,
        backing: Backing,
        matcher: Matcher,
        finder: Finder,
        leasing: Leasing,
        transfer: TransferLoop,
    ) -> None:
        self._index = memory.index
        self._backing = backing
        self._matcher = matcher
        self._finder = finder
        self._leasing = leasing
        self._transfer = transfer
        self._going: list[tuple[Lookup, Lease | None]] = []

    def add_tokens(self, tokens: bytes, salt: str) -> None:
        """Bring the whole blocks of ``tokens``."""
        most = len(tokens) // 4
        self._add(self._finder.begin(tokens, salt, num_reusable=most, is_counted=False))

    def add_keys(self, keys: Sequence[bytes], salt: str) -> None:
        """Bring the blocks of a sequence, given from its root on, as far as they are known."""
        parent, digest = self._matcher.seed(salt)
        in_memory: list[BlockRef] = []
        for key in keys:
            slot = self._index.slots.get(key, NONE)
            if slot == NONE or self._index.parent_key[slot] != parent:
                break
            in_memory.append(self._index.ref(slot))
            parent = key
        rest = keys[len(in_memory) :]

        def begin(on_disk: list[BlockRef] | KVStoreError) -> None:
            refs = in_memory + (on_disk if isinstance(on_disk, list) else [])
            if refs:
                self._add(self._lookup(refs, digest, {ref.key for ref in refs[len(in_memory) :]}))

        if rest and self._backing.is_searched:
            self._transfer.find(parent, rest, begin)
        else:
            begin([])

    def pump(self) -> None:
        """Reserve for prefixes that are known now; release those that have arrived."""
        going, self._going = self._going, []
        for lookup, lease in going:
            if lease is None and lookup.is_ready:
                try:
                    lease = self._leasing.reserve(lookup, 0, None)
                except OutOfBlocksError as error:
                    # Victims are being copied, or the room is there once others have arrived.
                    is_coming = error.available_blocks >= error.needed_blocks
                    if not (is_coming and self._transfer.num_pending):
                        continue
            if lease is not None and lease.is_ready:
                self._leasing.release(lease)
            else:
                self._going.append((lookup, lease))

    def _add(self, lookup: Lookup) -> None:
        """Bring what a lookup has found, or will have."""
        self._going.append((lookup, None))

    def _lookup(self, refs: list[BlockRef], salt: bytes, on_disk: set[bytes]) -> Lookup:
        keys, runs = [ref.key for ref in refs], [ref.tokens for ref in refs]
        lookup = Lookup(keys, runs, b"", refs[0].parent, salt, is_counted=False, on_disk=on_disk)
        self._matcher.note_sources(lookup)
        return lookup
