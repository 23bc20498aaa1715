"""Finding: a prefix is matched in memory at once, on disk by a probe, and what is found counted."""

from collections import Counter
from itertools import islice

from kvstore.backing import Backing
from kvstore.block import TierName
from kvstore.costs.cost import LoadDecision
from kvstore.errors import KVStoreError
from kvstore.hashing import chain_blocks
from kvstore.lease import Lookup, LookupState, OtherSalt
from kvstore.matching import Matcher
from kvstore.memory import Memory
from kvstore.transfer import Probed, TransferLoop

_MOST_SHOWN = 1000  # blocks that continue another, of which the one most like a prompt is told


class Finder:
    """Owner thread only.

    looked_up_blocks  full blocks that requests asked for
    hits, misses      of them, by tier: found there, and asked there in vain
    """

    def __init__(
        self, memory: Memory, backing: Backing, matcher: Matcher, transfer: TransferLoop
    ) -> None:
        self._index = memory.index
        self._backing = backing
        self._matcher = matcher
        self._transfer = transfer
        self._events = memory.events
        self._has_host = memory.host is not None
        self._probes_below = memory.config.min_partial_tokens < memory.layout.block_size
        self.looked_up_blocks = 0
        self.hits: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()

    def begin(
        self, tokens: bytes, salt: str, *, num_reusable: int | None, is_counted: bool
    ) -> Lookup:
        """See ``BlockStore.lookup``."""
        num_tokens = len(tokens) // 4
        most = num_tokens - 1 if num_reusable is None else num_reusable
        lookup = self._matcher.prefix(tokens[: max(0, most) * 4], salt, is_counted=is_counted)
        lookup.num_tokens = num_tokens
        start, end = len(lookup.sources), len(lookup.keys)
        has_disk = self._backing.tier is not None
        # Whoever only looks wants to know all; a request that loads nothing need not wait.
        lookup.skips_disk = has_disk and is_counted and not self._backing.is_searched
        if start < end and has_disk and not lookup.skips_disk:
            lookup.state = LookupState.PROBING
            refs = [lookup.ref(i) for i in range(start, end)]
            self._transfer.probe(
                refs, self._probes_below, lambda found: self._end_probe(lookup, found)
            )
        else:
            self._count(lookup)
        return lookup

    def stop_probing(self, lookup: Lookup) -> None:
        """See ``BlockStore.stop_probing``."""
        if not lookup.is_ready:
            self._end(lookup)

    def weigh(self, lookup: Lookup) -> LoadDecision | None:
        """See ``BlockStore.weigh``."""
        lookup.has_probed = True
        self._matcher.walk(lookup)
        return lookup.decision

    def continuations(self, lookup: Lookup) -> list[tuple[bytes, bytes]]:
        """See ``BlockStore.continuations``."""
        index = self._index
        children = index.children(lookup.parent(len(lookup.sources)))
        return [(index.key[slot], index.tokens[slot]) for slot in islice(children, _MOST_SHOWN)]

    def under_other_salts(self, lookup: Lookup) -> list[OtherSalt]:
        """See ``BlockStore.under_other_salts``."""
        if not lookup.runs:
            return []
        index, first = self._index, lookup.runs[0]
        found = []
        for slot in [slot for slot in index.used_slots() if index.tokens[slot] == first]:
            if index.depth[slot] == 0 and index.salt[slot] != lookup.salt:
                seed = index.parent_key[slot]
                keys, runs = chain_blocks(seed, b"".join(lookup.runs), len(first))
                found.append(OtherSalt(index.salt[slot], seed, len(index.match(keys, runs))))
        return found

    def _end_probe(self, lookup: Lookup, found: Probed | KVStoreError) -> None:
        if isinstance(found, KVStoreError):
            self._backing.lose(found)
        elif not lookup.is_ready:
            lookup.on_disk = {entry.key for entry in found.entries}
            lookup.below = found.below
        if not lookup.is_ready:
            self._end(lookup)

    def _end(self, lookup: Lookup) -> None:
        self._matcher.note_sources(lookup)
        self._count(lookup)
        lookup.state = LookupState.READY

    def _count(self, lookup: Lookup) -> None:
        if not lookup.is_counted:
            return
        missing = len(lookup.keys)
        self.looked_up_blocks += missing
        has_disk = self._backing.tier is not None
        tiers = {TierName.DEVICE: True, TierName.HOST: self._has_host, TierName.DISK: has_disk}
        for tier, is_on in tiers.items():
            num_found = lookup.sources.count(tier) if missing else 0
            self.hits[tier] += num_found
            missing -= num_found
            if is_on:
                self.misses[tier] += missing
        self._events.matched(
            lookup.keys, lookup.sources, num_tokens=lookup.num_tokens, salt=lookup.salt
        )
