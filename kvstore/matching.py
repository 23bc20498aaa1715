"""Matching: how much of a prefix can be reused, and from where.

Full blocks are found by their keys. For the tokens after them, the cached block that begins with
most of them gives its first positions: a radix tree's reuse with a hash table's simplicity.
Every match is confirmed by tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.block import TierName
from kvstore.costs.cost import CostModel, LoadReason
from kvstore.hashing import chain_blocks, chain_seed, num_equal_tokens, salt_digest
from kvstore.index import FAILED, LOADING, NONE, VALID
from kvstore.lease import Lookup, PartialMatch
from kvstore.memory import Memory

_MOST_SIBLINGS = 64  # newest first; a document may have thousands of questions below it
_LOADS_ALL = (
    LoadReason.ALWAYS,
    LoadReason.UNFITTED,
    LoadReason.LOAD,
    LoadReason.SMALL_GAIN,
    LoadReason.NOTHING_TO_LOAD,
)


class Matcher:
    """Reads the index and the cost model. Owner thread only.

    loading_from   source tier of each slot whose device copy is on its way
    """

    def __init__(
        self,
        memory: Memory,
        cost: CostModel,
        loading_from: dict[int, TierName],
    ) -> None:
        self._index = memory.index
        self._cost = cost
        self._loading_from = loading_from
        self._layout = memory.layout
        self._namespace = memory.namespace
        self._min_partial = memory.config.min_partial_tokens
        self._unit = memory.config.reuse_unit_blocks
        self._seeds: dict[str, tuple[bytes, bytes]] = {}

    def prefix(self, tokens: bytes, salt: str, *, is_counted: bool) -> Lookup:
        """A lookup of ``tokens``, all of which may be reused, matched against memory."""
        seed, digest = self.seed(salt)
        run_bytes = 4 * self._layout.block_size
        keys, runs = chain_blocks(seed, tokens, run_bytes)
        lookup = Lookup(keys, runs, tokens[len(keys) * run_bytes :], seed, digest, is_counted)
        self.note_sources(lookup)
        return lookup

    def seed(self, salt: str) -> tuple[bytes, bytes]:
        """What roots of this model and salt hang on, and the salt's digest."""
        if salt not in self._seeds:
            if len(self._seeds) > 1024:  # salts come from outside: forget them now and then
                self._seeds.clear()
            self._seeds[salt] = chain_seed(self._namespace, salt), salt_digest(salt)
        return self._seeds[salt]

    def note_sources(self, lookup: Lookup) -> None:
        """Write down where further blocks of the prefix are now."""
        sources = lookup.sources
        sources += [TierName.DEVICE] * (len(self._resident(lookup)) - len(sources))
        for source in self._sources(lookup, len(sources), len(lookup.keys)):
            if source is None:
                break
            sources.append(source)

    def walk(self, lookup: Lookup) -> list[int]:
        """Slots of the blocks that can be reused now, NONE for one that only disk holds."""
        self.note_sources(lookup)
        index, keys, runs, cut = self._index, lookup.keys, lookup.runs, self._cut(lookup)
        find, tokens, device, loading = index.slots.get, index.tokens, index.device, index.loading
        slots, given_up, on_disk = list(lookup.resident), lookup.given_up, lookup.on_disk
        for position in range(len(slots), len(keys)):
            key = keys[position]
            slot = find(key, NONE)
            if slot != NONE and tokens[slot] != runs[position]:
                break
            may_load = position < cut and key not in given_up
            if slot != NONE and device[slot] != NONE:
                state = loading[slot]
                if state == FAILED or (state == LOADING and not may_load):
                    break
            elif not may_load or (slot == NONE and key not in on_disk):
                break
            slots.append(slot)
        return slots[: len(slots) // self._unit * self._unit]

    def has_lost(self, lookup: Lookup) -> bool:
        """Whether the next block was found once and has left memory since, maybe for disk."""
        position = len(self.walk(lookup))
        return (
            position < len(lookup.sources)
            and lookup.keys[position] not in lookup.given_up
            and next(self._sources(lookup, position, position + 1)) is None
        )

    def _resident(self, lookup: Lookup) -> list[int]:
        """Slots of the blocks at the front that can be read on the device now.

        Nearly all of a match and of a walk, and asked for by both: the second time confirms what
        the first one found.
        """
        index, known, keys, runs = self._index, lookup.resident, lookup.keys, lookup.runs
        still = list(map(index.key.__getitem__, known)) == keys[: len(known)]
        if not (still and self._are_readable(known)):
            known.clear()
        if not known:
            # All of it, as a question about a known document finds nearly all: without a loop of
            # the interpreter.
            slots = [slot for slot in map(index.slots.get, keys) if slot is not None]
            if (
                len(slots) == len(keys)
                and self._are_readable(slots)
                and list(map(index.tokens.__getitem__, slots)) == runs
            ):
                known += slots
                return known
        tokens, device, loading = index.tokens, index.device, index.loading
        find = index.slots.get
        for position in range(len(known), len(keys)):
            slot = find(keys[position], NONE)
            if (
                slot == NONE
                or device[slot] == NONE
                or loading[slot] != VALID
                or tokens[slot] != runs[position]
            ):
                break
            known.append(slot)
        return known

    def _are_readable(self, slots: list[int]) -> bool:
        """Whether all these blocks can be read on the device now."""
        index = self._index
        return NONE not in map(index.device.__getitem__, slots) and not any(
            map(index.loading.__getitem__, slots)
        )

    def partial(self, lookup: Lookup, num_cached: int) -> PartialMatch | None:
        """The block that gives its head to the one after the first ``num_cached``."""
        is_inside = num_cached < len(lookup.keys)
        wanted = lookup.runs[num_cached] if is_inside else lookup.tail
        if len(wanted) // 4 < self._min_partial:
            return None
        assert lookup.decision is not None
        may_load = lookup.decision.reason in _LOADS_ALL and self._cost.policy != "never"
        index, parent, given_up = self._index, lookup.parent(num_cached), lookup.given_up
        best: PartialMatch | None = None
        for slot in islice(index.children(parent), _MOST_SIBLINGS):
            num_tokens = num_equal_tokens(index.tokens[slot], wanted)
            if num_tokens < self._min_partial or num_tokens == self._layout.block_size:
                continue
            if index.device[slot] != NONE and index.loading[slot] == VALID:
                tier = TierName.DEVICE
            elif index.host[slot] != NONE and may_load and index.key[slot] not in given_up:
                tier = TierName.HOST
            else:
                continue
            if best is None or (num_tokens, tier is TierName.DEVICE) > (
                best.num_tokens,
                best.tier is TierName.DEVICE,
            ):
                best = PartialMatch(index.ref(slot), slot, tier, num_tokens)
        return best or self._partial_on_disk(lookup, parent, wanted, may_load)

    def _partial_on_disk(
        self, lookup: Lookup, parent: bytes, wanted: bytes, may_load: bool
    ) -> PartialMatch | None:
        """A whole block is read for its head: worth it for half of one."""
        least = max(self._min_partial, self._layout.block_size // 2)
        refs = [
            ref
            for ref in lookup.below
            if may_load and ref.parent == parent and ref.key not in lookup.given_up
        ]
        best = max(refs, key=lambda ref: num_equal_tokens(ref.tokens, wanted), default=None)
        if best is None:
            return None
        num_tokens = num_equal_tokens(best.tokens, wanted)
        if not least <= num_tokens < self._layout.block_size:
            return None
        return PartialMatch(best, NONE, TierName.DISK, num_tokens)

    def _sources(self, lookup: Lookup, start: int, end: int) -> Iterator[TierName | None]:
        """The fastest tier that holds each block now, as far as this lookup knows."""
        index, loading_from, on_disk = self._index, self._loading_from, lookup.on_disk
        find, tokens, device, host = index.slots.get, index.tokens, index.device, index.host
        in_device, in_host, in_disk = TierName.DEVICE, TierName.HOST, TierName.DISK
        for key, run in zip(lookup.keys[start:end], lookup.runs[start:end], strict=True):
            slot = find(key, NONE)
            if slot == NONE or tokens[slot] != run:
                yield in_disk if key in on_disk else None
            elif device[slot] != NONE and index.loading[slot] != FAILED:
                yield loading_from.get(slot, in_device)
            elif host[slot] != NONE:
                yield in_host
            else:
                yield in_disk if key in on_disk else None

    def _cut(self, lookup: Lookup) -> int:
        """Blocks at the front that may be loaded; after them only what the device holds is used.

        Decided once for a lookup, and again when more is found or a probe has ended.
        """
        num_blocks = len(lookup.sources)
        if lookup.decision is None or lookup.decision.num_blocks < num_blocks:
            sources, queued = lookup.sources, {}
            if sources.count(TierName.DEVICE) < num_blocks:
                now = self._sources(lookup, 0, num_blocks)
                sources = [source or TierName.DISK for source in now]
                queued = self._queued_bytes(lookup.keys[:num_blocks])
            lookup.decision = self._cost.choose(
                sources,
                block_tokens=self._layout.block_size,
                block_bytes=self._layout.block_bytes,
                queued_bytes=queued,
                # The few blocks of a probe would be less than can be reused.
                may_probe=not lookup.has_probed and self._unit == 1,
                skips_disk=lookup.skips_disk and num_blocks < len(lookup.keys),
            )
        return lookup.decision.cut_blocks

    def _queued_bytes(self, keys: Sequence[bytes]) -> dict[TierName, int]:
        """By tier, bytes of the loads under way that are not of these blocks."""
        ours: Counter[TierName | None] = Counter()
        if self._loading_from:
            slots = map(self._index.slots.get, keys)
            ours.update(self._loading_from.get(NONE if slot is None else slot) for slot in slots)
        return {
            tier: self._cost.queued_bytes(tier) - ours[tier] * self._layout.block_bytes
            for tier in (TierName.HOST, TierName.DISK)
        }
