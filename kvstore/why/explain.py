"""Why a prompt is found, or not: where the match ends, and the reason.

Compares the blocks a prompt would have with what a cache holds under its own namespace and salt,
then with what other namespaces and salts hold, and says the most telling difference. Reads keys,
tokens and what is known of blocks that left; never payloads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvstore.costs.cost import LoadDecision, LoadReason
from kvstore.disk.offline.browse import Browser
from kvstore.hashing import (
    chain_blocks,
    chain_seed,
    encode_tokens,
    namespace_id,
    num_equal_tokens,
    salt_digest,
)
from kvstore.lease import OtherSalt
from kvstore.why.dates import find_dates
from kvstore.why.explanation import DEPARTED, Asked, Cause, Difference, Elsewhere, Explanation

Decode = Callable[[Sequence[int]], str]

_MOST_SIBLINGS = 20_000  # questions below one document that are compared
_LEAST_PARTIAL_TOKENS = 8  # for which a block is read for its head, as an engine does it
_SHOWN_TOKENS = 24  # before and after the first difference


def explain(
    browser: Browser,
    asked: Asked,
    *,
    decode: Decode | None = None,
    decision: LoadDecision | None = None,
    tiers: Mapping[str, int | None] | None = None,
) -> Explanation:
    """Explain one prompt. ``decode`` makes texts of token ids; ``decision`` is what an engine
    decided about loading; ``tiers`` are tokens by tier, where that is known."""
    match = _Match(browser, asked)
    difference = None
    others: list[Elsewhere] = []
    if match.num_found < len(match.keys):
        others = _elsewhere(browser, asked, match)
        sibling = match.nearest()
        if sibling is not None and (match.num_found or sibling[2]):
            difference = _difference(browser, match, sibling, decode)
    cause = _cause(browser, match, difference, others, decision)
    key = match.keys[match.num_found].hex() if match.num_found < len(match.keys) else None
    if tiers is None:
        tiers = {"device": None, "host": None, "disk": match.num_found * match.block_size}
    return Explanation(
        cause=cause,
        sentence=_sentence(cause, match, difference, others, decision),
        namespace=match.namespace.hex(),
        model=asked.model,
        salt=salt_digest(asked.salt).hex(),
        block_size=match.block_size,
        prompt_tokens=len(asked.token_ids),
        prompt_blocks=len(match.keys),
        cached_blocks=match.num_found,
        cached_tokens=match.num_cached_tokens(),
        key=key,
        difference=difference,
        elsewhere=others,
        load=None if decision is None else asdict(decision),
        tiers=tiers,
    )


class _Match:
    """A prompt's blocks, and how many of them are there."""

    def __init__(self, browser: Browser, asked: Asked) -> None:
        self.block_size: int = asked.identity["block_size"]
        self.namespace = namespace_id(asked.identity)
        tokens = encode_tokens(asked.token_ids)
        self.all_tokens = tokens
        unit = _reuse_unit(asked.identity)
        reusable = tokens[: max(len(tokens) // 4 - 1, 0) // unit * unit * 4]
        self.seed = chain_seed(self.namespace, asked.salt)
        self.keys, self.runs = chain_blocks(self.seed, reusable, 4 * self.block_size)
        self._tail = reusable[len(self.keys) * 4 * self.block_size :]
        known = min(asked.num_known, len(self.keys))
        followed = browser.follow(self.keys, self.runs, known)
        self.num_found, self.is_next_bad = followed.num_found, followed.is_next_bad
        self._browser = browser
        self._siblings = asked.siblings if followed.num_found == known else ()
        self._nearest: tuple[bytes, bytes, int] | None = None
        self._has_looked = False

    @property
    def parent(self) -> bytes:
        return self.keys[self.num_found - 1] if self.num_found else self.seed

    def nearest(self) -> tuple[bytes, bytes, int] | None:
        """Key, tokens, and number of equal tokens, of the block that continues the match most
        like the prompt does."""
        if not self._has_looked:
            self._has_looked = True
            start = self.num_found * 4 * self.block_size
            wanted = self.all_tokens[start : start + 4 * self.block_size]
            on_disk = self._browser.children(self.parent, _MOST_SIBLINGS)
            candidates = [*self._siblings, *((key, record.tokens) for key, record in on_disk)]
            for key, tokens in candidates:
                equal = num_equal_tokens(tokens, wanted)
                if self._nearest is None or equal > self._nearest[2]:
                    self._nearest = key, tokens, equal
        return self._nearest

    def num_cached_tokens(self) -> int:
        nearest = self.nearest()
        most = self.block_size if self.num_found < len(self.keys) else len(self._tail) // 4
        inside = min(nearest[2] if nearest is not None else 0, most)
        least = max(_LEAST_PARTIAL_TOKENS, self.block_size // 2)
        return self.num_found * self.block_size + (inside if inside >= least else 0)


def _reuse_unit(identity: Mapping[str, Any]) -> int:
    """Tokens that are reused together or not at all: whole chunks in deterministic mode."""
    run = identity.get("deterministic")
    unit = run.get("chunk_tokens", 1) if isinstance(run, Mapping) else 1
    return unit if isinstance(unit, int) and unit > 0 else 1


# ---- the first difference ----------------------------------------------------------------------


def _difference(
    browser: Browser, match: _Match, sibling: tuple[bytes, bytes, int], decode: Decode | None
) -> Difference:
    key, tokens, equal = sibling
    position = match.num_found * match.block_size + equal
    after = tokens[4 * equal :]
    below = key
    while len(after) < 4 * _SHOWN_TOKENS:  # the block may end soon: go on into what continues it
        following = next(browser.children(below, 1), None)
        if following is None:
            break
        below, after = following[0], after + following[1].tokens
    prompt = np.frombuffer(match.all_tokens, "<u4").tolist()
    before = prompt[max(position - _SHOWN_TOKENS, 0) : position]
    ours = prompt[position : position + _SHOWN_TOKENS]
    theirs = np.frombuffer(after, "<u4")[:_SHOWN_TOKENS].tolist()
    texts: dict[str, str] = {}
    if decode is not None:
        # Decoded together with what is before: a token of a word's inside has no text of its own.
        common = decode(before)
        one, other = (decode(before + each)[len(common) :] for each in (ours, theirs))
        texts = {"before": common, "prompt": one, "cached": other}
    return Difference(position, ours, theirs, key.hex(), **texts)


def is_in_date(before: str, one: str, other: str) -> bool:
    """Whether two texts that both follow ``before`` part inside of a date or a time of day."""
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    at = len(before) + equal
    return all(
        any(start <= at < end for start, end in find_dates(before + text)) for text in (one, other)
    )


# ---- other places ------------------------------------------------------------------------------


def _elsewhere(browser: Browser, asked: Asked, match: _Match) -> list[Elsewhere]:
    """Where more of the prompt is than here, most first."""
    here = match.num_found * match.block_size
    found = [
        *_other_namespaces(browser, asked, match),
        *_other_salts(browser, asked, match),
    ]
    better = [each for each in found if each.cached_tokens > here]
    return sorted(better, key=lambda each: -each.cached_tokens)


def _other_namespaces(browser: Browser, asked: Asked, match: _Match) -> Iterable[Elsewhere]:
    tokens = encode_tokens(asked.token_ids)
    for namespace, description in browser.namespaces().items():
        block_size = description.get("block_size")
        if namespace == match.namespace or not isinstance(block_size, int) or block_size < 1:
            continue
        keys, runs = chain_blocks(chain_seed(namespace, asked.salt), tokens, 4 * block_size)
        num_found = browser.follow(keys, runs).num_found
        if num_found:
            yield Elsewhere(
                namespace=namespace.hex(),
                model=description.get("model"),
                salt=salt_digest(asked.salt).hex(),
                fields=differing_fields(description, asked.identity),
                cached_tokens=num_found * block_size,
            )


def differing_fields(
    cached: Mapping[str, Any], asked: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Fields of an identity that a registered description has otherwise. What an older version
    did not register is unknown, not different."""
    return {
        name: {"cached": cached[name], "asked": value}
        for name, value in asked.items()
        if name in cached and cached[name] != value
    }


def _other_salts(browser: Browser, asked: Asked, match: _Match) -> Iterable[Elsewhere]:
    ours = salt_digest(asked.salt)
    others = {other.salt: other for other in asked.other_salts}
    if match.runs and browser.salts(match.namespace) - {ours, *others}:
        for record in browser.beginnings(match.namespace, match.runs[0]):
            if record.salt != ours:
                others.setdefault(record.salt, OtherSalt(record.salt, record.parent))
    for other in others.values():
        tokens = b"".join(match.runs)
        keys, runs = chain_blocks(other.seed, tokens, 4 * match.block_size)
        num_found = browser.follow(keys, runs, other.num_blocks).num_found
        yield Elsewhere(
            namespace=match.namespace.hex(),
            model=asked.model,
            salt=other.salt.hex(),
            fields={},
            cached_tokens=num_found * match.block_size,
        )


# ---- the verdict -------------------------------------------------------------------------------


def _cause(
    browser: Browser,
    match: _Match,
    difference: Difference | None,
    others: list[Elsewhere],
    decision: LoadDecision | None,
) -> Cause:
    if decision is not None and decision.cut_blocks < decision.num_blocks:
        is_policy = decision.reason is LoadReason.NEVER
        return Cause.LOAD_POLICY if is_policy else Cause.LOAD_IS_SLOWER
    if not match.keys:
        return Cause.TOO_SHORT
    if match.num_found == len(match.keys):
        return Cause.CACHED
    if match.is_next_bad:
        return Cause.CORRUPT
    departure = browser.departure(match.keys[match.num_found])
    if departure is not None:
        return DEPARTED[departure]
    if others:
        is_salt = others[0].namespace == match.namespace.hex()
        return Cause.OTHER_SALT if is_salt else Cause.OTHER_NAMESPACE
    if difference is not None:
        before, one, other = difference.before, difference.prompt, difference.cached
        if before is not None and one is not None and other is not None:
            return Cause.DATE if is_in_date(before, one, other) else Cause.DIFFERS
        return Cause.DIFFERS
    return Cause.NEVER_STORED if browser.knows_departures() else Cause.UNKNOWN


def _sentence(
    cause: Cause,
    match: _Match,
    difference: Difference | None,
    others: list[Elsewhere],
    decision: LoadDecision | None,
) -> str:
    size, found = match.block_size, match.num_found
    at = f"block {found} (tokens {found * size:,} to {(found + 1) * size - 1:,})"
    where = f"at token {difference.position:,}" if difference else ""
    match cause:
        case Cause.CACHED:
            return f"every full block of the prompt is cached ({len(match.keys):,})"
        case Cause.TOO_SHORT:
            return (
                f"the prompt is shorter than one block of {size} tokens and the token after it, "
                "so there is no block to find"
            )
        case Cause.LOAD_IS_SLOWER:
            assert decision is not None
            return (
                "cached but not loaded: "
                f"{decision.num_blocks - decision.cut_blocks:,} of {decision.num_blocks:,} blocks; "
                f"computing them takes an estimated {decision.compute_s:.3f} s, loading all "
                f"{decision.load_all_s:.3f} s"
            )
        case Cause.LOAD_POLICY:
            return "the prompt is cached but not loaded: load_policy is never"
        case Cause.DIFFERS:
            return f"the prompt differs from the cached one most like it {where}"
        case Cause.DATE:
            return (
                f"the prompt differs from a cached one in a date or a time {where}: whatever "
                "prints it makes every prompt a new one; print a fixed one, or print it later"
            )
        case Cause.OTHER_NAMESPACE:
            names = ", ".join(others[0].fields) or "its identity"
            return (
                f"the prompt is cached for another model identity, which differs in {names} "
                f"(tokens there: {others[0].cached_tokens:,})"
            )
        case Cause.OTHER_SALT:
            return (
                "the prompt is cached under another cache_salt (tokens there: "
                f"{others[0].cached_tokens:,}): different salts never share blocks"
            )
        case Cause.EVICTED:
            return f"{at} was evicted to make room"
        case Cause.REMOVED:
            return f"{at} was removed by a command, or the prefix cache was reset"
        case Cause.CORRUPT:
            return f"{at} was damaged; it is computed anew when it is asked for"
        case Cause.NEVER_STORED:
            return f"{at} was never stored"
        case Cause.UNKNOWN:
            return f"{at} was evicted long ago or never stored"
