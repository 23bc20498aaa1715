"""Every reason for a miss, on caches that are made to have it."""

import struct

import pytest

from kvstore.block import BlockWrite
from kvstore.costs.cost import LoadDecision, LoadReason
from kvstore.disk import DiskStore
from kvstore.disk.offline.browse import Browser
from kvstore.disk.slices import reading
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id, salt_digest
from kvstore.why.dates import find_dates
from kvstore.why.explain import explain, is_in_date
from kvstore.why.explanation import Asked, Cause

IDENTITY = {"block_size": 4, "dtype": "float32", "weights": "w", "rope": {"theta": 1.0}}
TEXT = "It was a dark and stormy night"


class Cache:
    """A cache whose tokens are characters; four make a block."""

    def __init__(self, path) -> None:
        self.path = path
        self.store = DiskStore.open(path, capacity_bytes=1 << 20)

    def put(self, text: str, salt: str = "", payload_bytes: int = 100, **change) -> list[bytes]:
        """Store a text's blocks; their keys."""
        identity = IDENTITY | change
        namespace = namespace_id(identity)
        self.store.register_namespace(namespace, {"model": "m", "num_layers": 2, **identity})
        tokens = encode_tokens(list(map(ord, text)))
        refs = chain_refs(chain_seed(namespace, salt), tokens, 4 * identity["block_size"])
        payload = bytes(payload_bytes)
        self.store.put_group(
            [BlockWrite(ref, namespace, salt_digest(salt), payload) for ref in refs]
        )
        return [ref.key for ref in refs]

    def why(self, text: str, decision=None, **change):
        asked = {"salt": change.pop("salt", ""), "num_known": change.pop("num_known", 0)}
        asked["siblings"] = change.pop("siblings", ())
        with reading(self.path) as env:
            return explain(
                Browser(env),
                Asked(list(map(ord, text)), IDENTITY | change, "m", **asked),
                decode=lambda ids: "".join(map(chr, ids)),
                decision=decision,
            )


@pytest.fixture
def cache(tmp_path):
    cache = Cache(tmp_path / "cache")
    yield cache
    cache.store.close()


def test_a_cached_prompt_needs_no_reason(cache):
    cache.put(TEXT)
    found = cache.why(TEXT)
    assert (found.cause, found.is_cached) == (Cause.CACHED, True)
    assert (found.prompt_blocks, found.cached_blocks, found.cached_tokens) == (7, 7, 28)
    assert (found.key, found.difference, found.elsewhere) == (None, None, [])
    assert found.tiers == {"device": None, "host": None, "disk": 28}


def test_the_last_token_is_computed_whatever_is_cached(cache):
    cache.put(TEXT[:8])
    found = cache.why(TEXT[:8])
    assert (found.cause, found.prompt_blocks, found.cached_tokens) == (Cause.CACHED, 1, 4)


def test_a_prompt_without_a_full_block_is_too_short(cache):
    cache.put(TEXT)
    found = cache.why(TEXT[:4])
    assert (found.cause, found.is_cached, found.cached_tokens) == (Cause.TOO_SHORT, False, 0)


def test_the_first_difference_is_shown_with_the_text_around_it(cache):
    keys = cache.put(TEXT)
    cache.put(TEXT[:16] + "xyz…" * 3)
    found = cache.why(TEXT[:18] + "quiet evening")
    assert found.cause is Cause.DIFFERS
    assert (found.cached_blocks, found.cached_tokens) == (4, 16)
    difference = found.difference
    assert (difference.position, difference.before) == (18, TEXT[:18])
    assert (difference.prompt, difference.cached) == ("quiet evening", TEXT[18:28])
    assert "".join(map(chr, difference.prompt_tokens)) == difference.prompt
    assert difference.key == keys[4].hex()
    assert "token 18" in found.sentence


def test_the_head_of_a_block_counts_where_an_engine_would_copy_it(cache):
    cache.put(2 * TEXT, block_size=16)
    for num_equal, num_copied in ((23, 0), (24, 8), (27, 11)):
        found = cache.why(TEXT[:num_equal] + "?" * 20, block_size=16)
        assert found.difference.position == num_equal
        assert found.cached_tokens == 16 + num_copied


def test_in_deterministic_mode_whole_chunks_are_looked_for(cache):
    run = {"chunk_tokens": 8}
    cache.put(TEXT[:24], deterministic=run)
    found = cache.why(TEXT, deterministic=run)
    assert (found.cause, found.prompt_blocks, found.cached_tokens) == (Cause.CACHED, 6, 24)


def test_a_continuation_that_was_never_stored_is_told_from_one_long_gone(cache, monkeypatch):
    cache.put(TEXT[:8])
    assert cache.why(TEXT).cause is Cause.NEVER_STORED
    monkeypatch.setattr(Browser, "knows_departures", lambda browser: False)
    assert cache.why(TEXT).cause is Cause.UNKNOWN


def test_a_cache_that_is_empty_never_stored_anything(tmp_path):
    (tmp_path / "empty").mkdir()
    with reading(tmp_path / "empty") as env:
        found = explain(Browser(env), Asked(list(range(9)), IDENTITY))
    assert found.cause is Cause.NEVER_STORED


def test_an_evicted_block_is_named(cache):
    keys = cache.put(TEXT, payload_bytes=20_000)
    for number in range(40):
        cache.put(f"{number:04}" * 4, payload_bytes=20_000)
    found = cache.why(TEXT)
    assert found.cause is Cause.EVICTED
    assert found.key == keys[found.cached_blocks].hex()


def test_a_removed_block_is_named(cache):
    keys = cache.put(TEXT)
    cache.store.remove(keys[5:])
    found = cache.why(TEXT)
    assert (found.cause, found.cached_blocks) == (Cause.REMOVED, 5)


def test_a_block_stored_again_after_it_left_is_there(cache):
    keys = cache.put(TEXT)
    cache.store.remove(keys[2:])
    cache.put(TEXT)
    assert cache.why(TEXT).cause is Cause.CACHED


@pytest.mark.parametrize("at", [2, 6])  # with blocks that continue it, and without
def test_a_damaged_block_is_named(cache, at):
    keys = cache.put(TEXT)
    refs = chain_refs(chain_seed(namespace_id(IDENTITY)), encode_tokens(list(map(ord, TEXT))), 16)
    with cache.store._env.read() as txn:
        from kvstore.disk import schema

        record = schema.decode_record(keys[at], txn.get(keys[at], db=cache.store._env.index))
    cache.store.repair([(refs[at], record)], rebuild=False)
    found = cache.why(TEXT)
    assert (found.cause, found.cached_blocks) == (Cause.CORRUPT, at)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("weights", "others"),
        ("rope", {"theta": 2.0}),
        ("block_size", 8),
    ],
)
def test_another_namespace_is_named_with_the_field_that_differs(cache, field, value):
    cache.put(TEXT, **{field: value})
    cache.put("It w as the best of times")  # what is here in our own is less
    found = cache.why(TEXT)
    assert found.cause is Cause.OTHER_NAMESPACE
    (other,) = found.elsewhere
    assert other.fields == {field: {"cached": value, "asked": IDENTITY[field]}}
    assert other.cached_tokens == len(TEXT) // (8 if field == "block_size" else 4) * (
        8 if field == "block_size" else 4
    )
    assert other.namespace == namespace_id(IDENTITY | {field: value}).hex()
    assert field in found.sentence


def test_another_namespace_with_less_of_the_prompt_is_no_reason(cache):
    cache.put(TEXT[:12])
    cache.put(TEXT[:8], dtype="bfloat16")
    assert cache.why(TEXT).cause is Cause.NEVER_STORED


@pytest.mark.parametrize(("stored", "asked"), [("tenant", ""), ("", "tenant"), ("one", "two")])
def test_another_salt_is_found_although_salts_are_stored_as_digests(cache, stored, asked):
    cache.put(TEXT, salt=stored)
    found = cache.why(TEXT, salt=asked)
    assert found.cause is Cause.OTHER_SALT
    (other,) = found.elsewhere
    assert (other.salt, other.cached_tokens) == (salt_digest(stored).hex(), 28)


@pytest.mark.parametrize(
    ("cached", "asked"),
    [
        ("Today Date: 26 Jul 2024. Hello!", "Today Date: 27 Jul 2024. Hello!"),
        ("Today Date: 26 Jul 2024. Hello!", "Today Date: 26 Aug 2024. Hello!"),
        ("It is 2024-07-26T09:30:00Z now.", "It is 2025-07-26T09:30:00Z now."),
        ("The time is 09:30. What is new?", "The time is 09:31. What is new?"),
        ("It is Monday. What is the plan?", "It is Friday. What is the plan?"),
    ],
)
def test_a_date_that_changed_is_named(cache, cached, asked):
    cache.put(cached)
    assert cache.why(asked).cause is Cause.DATE
    assert cache.why(cached[:12] + "no such text here").cause is Cause.DIFFERS


def test_a_number_that_changed_is_no_date():
    assert not is_in_date("Chapter ", "12 of 40", "13 of 40")
    assert not is_in_date("On 26 Jul 2024 we met ", "Anna", "Otto")
    assert find_dates("version 1.2.3, in May, at 10:75") == []


def test_what_memory_holds_counts_also_where_disk_does_not(cache):
    sibling = struct.pack("<4I", *map(ord, TEXT[8:11] + "!"))
    found = cache.why(TEXT, num_known=2, siblings=[(b"k" * 32, sibling)])
    assert (found.cause, found.cached_blocks, found.cached_tokens) == (Cause.DIFFERS, 2, 8)
    assert found.difference.position == 11


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (LoadReason.COMPUTE, Cause.LOAD_IS_SLOWER),
        (LoadReason.PARTIAL, Cause.LOAD_IS_SLOWER),
        (LoadReason.NEVER, Cause.LOAD_POLICY),
    ],
)
def test_what_is_cached_and_not_loaded_says_so(cache, reason, cause):
    cache.put(TEXT)
    decision = LoadDecision(2, 7, reason, 0.5, 0.25, 2.0)
    found = cache.why(TEXT, decision=decision)
    assert found.cause is cause
    assert found.load["load_all_s"] == 2.0
    loads_all = LoadDecision(7, 7, LoadReason.LOAD, 0.5, 0.0, 0.5)
    assert cache.why(TEXT, decision=loads_all).cause is Cause.CACHED
