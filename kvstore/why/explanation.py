"""What is asked of a cache, and what is answered: the records of ``kvstore.why.explain``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvstore.disk.departures import Departure
from kvstore.lease import OtherSalt


class Cause(StrEnum):
    """What is reported, from good to bad."""

    CACHED = "cached"  # every full block is there
    TOO_SHORT = "too_short"  # there is no full block to be found
    LOAD_IS_SLOWER = "load_is_slower"  # found, and by measurement faster computed than loaded
    LOAD_POLICY = "load_policy"  # found, and load_policy says never
    DIFFERS = "differs"  # another prompt with the same beginning is there
    DATE = "date"  # it differs in a date or time, as templates print them
    OTHER_NAMESPACE = "other_namespace"  # cached for another model, dtype, rope, block size, …
    OTHER_SALT = "other_salt"
    EVICTED = "evicted"
    REMOVED = "removed"  # by a command, or reset
    CORRUPT = "corrupt"  # was damaged, and waits to be written anew
    NEVER_STORED = "never_stored"
    UNKNOWN = "evicted_or_never_stored"  # so long ago that nothing is known of it


DEPARTED = {
    Departure.EVICTED: Cause.EVICTED,
    Departure.REMOVED: Cause.REMOVED,
    Departure.CORRUPT: Cause.CORRUPT,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is looked for.

    token_ids    of the whole prompt
    identity     of the model (``engine.model.identity``); its digest is the namespace
    model        what the user calls it
    salt         as the request gives it
    num_known    blocks at the front that are known to be there, because memory holds them
    siblings     (key, tokens) of blocks that continue the last of them in memory
    other_salts  under which memory holds the beginning of the prompt
    """

    token_ids: Sequence[int]
    identity: Mapping[str, Any]
    model: str | None = None
    salt: str = ""
    num_known: int = 0
    siblings: Sequence[tuple[bytes, bytes]] = ()
    other_salts: Sequence[OtherSalt] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which the prompt differs from the cached one most like it.

    position         of the token in the prompt
    prompt_tokens    from there on
    cached_tokens    the same of the cached one
    key              of the cached block, hex
    before           text of the tokens before, which are the same; None without a tokenizer
    prompt, cached   texts from there on
    """

    position: int
    prompt_tokens: list[int]
    cached_tokens: list[int]
    key: str
    before: str | None = None
    prompt: str | None = None
    cached: str | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The same prompt in another namespace or under another salt.

    fields   of the identity that differ: name to {"cached", "asked"}
    """

    namespace: str
    model: str | None
    salt: str
    fields: Mapping[str, Mapping[str, Any]]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Of one prompt. ``as_dict`` is what ``kvstore why --json`` prints; unknown is None.

    prompt_blocks    full blocks of the prompt that a request could find: its last token is computed
    cached_blocks    of them, those that are there, from the first on
    cached_tokens    in these blocks and in the part of one that a question would reuse
    key              of the first block that is not there, hex
    load             what was decided about loading, with its estimates (``kvstore.costs.cost``)
    """

    cause: Cause
    sentence: str
    namespace: str
    model: str | None
    salt: str
    block_size: int
    prompt_tokens: int
    prompt_blocks: int
    cached_blocks: int
    cached_tokens: int
    key: str | None = None
    difference: Difference | None = None
    elsewhere: list[Elsewhere] = field(default_factory=list)
    load: Mapping[str, Any] | None = None
    tiers: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def is_cached(self) -> bool:
        """Whether there is nothing to explain: all that can be found is found."""
        return self.cause is Cause.CACHED

    @property
    def was_there(self) -> bool:
        """Whether the first block that is missing is known to have been there."""
        return self.cause in DEPARTED.values()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
