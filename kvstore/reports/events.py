"""What happens to blocks, as a stream of events with the fields of vLLM's.

    BlockStored        a tier holds these blocks now; they follow each other in one sequence
    BlockRemoved       a tier does not hold them any more
    AllBlocksCleared   a tier has none left, of one salt or of all
    RequestMatched     what a request asked for and where it was; enough to replay it

A block gives one ``stored`` for each tier that comes to hold it and one ``removed`` when it leaves,
so stored minus removed is what is there. Of a shared disk a process reports what it writes and
evicts itself: the others have streams of their own.

An event belongs to one namespace (model) and one salt (tenant) and carries their digests. It holds
tokens in clear: whoever may read the stream may read the prompts. Nothing is built while nobody
listens.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.block import TierName
from kvstore.index import BlockIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """ts: seconds since 1970, when the event was delivered. namespace: 32 bytes. salt: digest."""

    ts: float
    namespace: bytes
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored(Event):
    """A run of blocks of one sequence; ``block_hashes`` are block keys.

    parent_block_hash  key of the block before the first one, None for a root
    token_ids          of all the blocks, ``block_size`` each
    medium             name of the tier
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved(Event):
    """Blocks in any order."""

    block_hashes: list[bytes]
    medium: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared(Event):
    """Follows the ``BlockRemoved`` of a reset that left nothing, or a tier that broke.

    is_one_salt   only blocks of ``salt`` are meant; otherwise those of all salts
    """

    medium: str
    is_one_salt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMatched(Event):
    """A request's prompt was looked up.

    block_hashes   keys of the full blocks it could reuse, found or not
    num_tokens     of the whole prompt, the part after those blocks included
    found_blocks   leading blocks that were found, by tier
    """

    block_hashes: list[bytes]
    num_tokens: int
    block_size: int
    found_blocks: Mapping[str, int]


Sink = Callable[[Sequence[Event]], None]


@dataclass(slots=True)
class _Run:
    """Blocks that will be one event: stored, where there are tokens, otherwise removed."""

    medium: TierName
    salt: bytes
    is_stored: bool
    parent: bytes | None
    keys: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)


class EventLog:
    """Collects a store's events and hands them to sinks in ``flush``. Owner thread only.

    stored_blocks, removed_blocks   per tier since the store was opened; counted without sinks, too
    """

    def __init__(
        self,
        index: BlockIndex,
        *,
        namespace: bytes,
        block_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._namespace = namespace
        self._block_size = block_size
        self._clock = clock
        self._sinks: list[Sink] = []
        self._events: list[Event] = []
        self._run: _Run | None = None
        self.stored_blocks: Counter[str] = Counter()
        self.removed_blocks: Counter[str] = Counter()

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Hand ``sink`` all events from now on, in batches; returns what ends that.

        It is called by the owner thread and must not wait. One that raises is dropped, with a line
        in the log: the cache goes on.
        """
        self.flush()
        self._sinks.append(sink)
        return lambda: self._drop(sink)

    def stored(self, tier: TierName, slot: int) -> None:
        """A tier has got a copy of a known block."""
        self.stored_blocks[tier] += 1
        if not self._sinks:
            return
        index, run = self._index, self._run
        salt, parent = index.salt[slot], index.parent_key[slot]
        if (
            run is None
            or not run.is_stored
            or run.medium is not tier
            or run.salt != salt
            or run.keys[-1] != parent
        ):
            run = self._begin(
                tier, salt, is_stored=True, parent=parent if index.depth[slot] else None
            )
        run.keys.append(index.key[slot])
        run.tokens.append(index.tokens[slot])

    def removed(self, tier: TierName, slot: int) -> None:
        """A tier gives up its copy of a block that is still known."""
        self.removed_blocks[tier] += 1
        if self._sinks:
            self._remove(tier, self._index.key[slot], self._index.salt[slot])

    def removed_key(self, tier: TierName, key: bytes, salt: bytes) -> None:
        """A tier has given up a block that may not be known in memory."""
        self.removed_blocks[tier] += 1
        if self._sinks:
            self._remove(tier, key, salt)

    def cleared(self, tier: TierName, salt: bytes | None = None) -> None:
        """A tier has no block of ``salt``, or none at all, any more."""
        self._add(
            AllBlocksCleared, salt=salt or b"", medium=tier.value, is_one_salt=salt is not None
        )

    def matched(
        self, keys: Sequence[bytes], sources: Sequence[TierName], *, num_tokens: int, salt: bytes
    ) -> None:
        """A request has been looked up."""
        if self._sinks:
            self._add(
                RequestMatched,
                salt=salt,
                block_hashes=list(keys),
                num_tokens=num_tokens,
                block_size=self._block_size,
                found_blocks={tier.value: n for tier, n in Counter(sources).items()},
            )

    def flush(self) -> None:
        """Hand over what has happened since the last call."""
        self._end_run()
        if not self._events:
            return
        events, self._events = self._events, []
        for sink in list(self._sinks):
            try:
                sink(events)
            except Exception:
                logger.exception("an event sink failed and gets no more events")
                self._drop(sink)

    def _drop(self, sink: Sink) -> None:
        if sink in self._sinks:
            self._sinks.remove(sink)

    def _remove(self, tier: TierName, key: bytes, salt: bytes) -> None:
        run = self._run
        if run is None or run.is_stored or run.medium is not tier or run.salt != salt:
            run = self._begin(tier, salt, is_stored=False, parent=None)
        run.keys.append(key)

    def _begin(self, tier: TierName, salt: bytes, *, is_stored: bool, parent: bytes | None) -> _Run:
        self._end_run()
        self._run = _Run(tier, salt, is_stored, parent)
        return self._run

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        if run.is_stored:
            self._add(
                BlockStored,
                salt=run.salt,
                block_hashes=run.keys,
                parent_block_hash=run.parent,
                token_ids=np.frombuffer(b"".join(run.tokens), "<u4").tolist(),
                block_size=self._block_size,
                medium=run.medium.value,
            )
        else:
            self._add(BlockRemoved, salt=run.salt, block_hashes=run.keys, medium=run.medium.value)

    def _add(self, kind: type[Event], **values: Any) -> None:
        self._end_run()
        if self._sinks:
            self._events.append(kind(ts=self._clock(), namespace=self._namespace, **values))
