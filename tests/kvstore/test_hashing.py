import json
import struct
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.hashing import (
    chain_keys,
    chain_refs,
    chain_seed,
    encode_tokens,
    namespace_id,
    salt_digest,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "block_keys.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_keys_are_the_golden_ones(case):
    """A moved key makes every cache on disk miss: then KEY_VERSION must go up."""
    namespace = namespace_id(case["identity"])
    seed = chain_seed(namespace, case["salt"])
    keys = chain_keys(seed, encode_tokens(case["tokens"]), 4 * case["block_size"])
    assert namespace.hex() == case["namespace"]
    assert seed.hex() == case["seed"]
    assert [key.hex() for key in keys] == case["keys"]


def test_the_golden_vectors_follow_the_documented_formula():
    """Computed here from the formula alone, without the module under test."""
    for case in GOLDEN:
        salt = case["salt"].encode()
        packed = msgpack.packb(dict(sorted(case["identity"].items())), use_bin_type=True)
        parent = sha256(
            b"kvstore\0"
            + struct.pack("<I", 1)
            + sha256(packed).digest()
            + struct.pack("<I", len(salt))
            + salt
        ).digest()
        size = case["block_size"]
        for i, key in enumerate(case["keys"]):
            block = case["tokens"][i * size : (i + 1) * size]
            parent = sha256(parent + struct.pack(f"<{size}I", *block)).digest()
            assert parent.hex() == key


def test_keys_are_the_same_in_another_process_with_another_hash_seed():
    code = (
        "from kvstore.hashing import *;"
        "print(chain_keys(chain_seed(namespace_id({'b': 1, 'a': [1, 2]}), 's'),"
        "encode_tokens(range(32)), 64)[1].hex())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].strip()) == 64


def test_the_namespace_does_not_depend_on_the_order_of_fields():
    assert namespace_id({"a": 1, "b": {"x": 1, "y": 2}}) == namespace_id(
        {"b": {"y": 2, "x": 1}, "a": 1}
    )
    assert namespace_id({"a": 1}) != namespace_id({"a": 2})


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=64),
    data=st.data(),
)
def test_a_changed_token_changes_its_block_and_all_later_ones(tokens, data):
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = list(tokens)
    changed[at] ^= 1
    seed = chain_seed(namespace_id({}))
    before = chain_keys(seed, encode_tokens(tokens), 16)
    after = chain_keys(seed, encode_tokens(changed), 16)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after[at // 4 :])


def test_salts_separate_and_do_not_run_into_the_namespace():
    namespace = namespace_id({})
    seeds = {chain_seed(namespace, salt) for salt in ("", "a", "b", "ab")}
    assert len(seeds) == 4
    assert salt_digest("") == b""
    assert b"tenant" not in salt_digest("tenant")


def test_a_partial_block_has_no_key():
    seed = chain_seed(namespace_id({}))
    assert len(chain_keys(seed, encode_tokens(range(31)), 64)) == 1
    assert chain_keys(seed, encode_tokens(range(15)), 64) == []


def test_refs_name_their_parents_and_depth():
    seed = chain_seed(namespace_id({}))
    refs = chain_refs(seed, encode_tokens(range(48)), 64)
    assert [ref.depth for ref in refs] == [0, 1, 2]
    assert [ref.parent for ref in refs] == [seed, refs[0].key, refs[1].key]
    assert refs[2].tokens == encode_tokens(range(32, 48))


@pytest.mark.parametrize("tokens", [[-1], [2**32], [[1, 2]], ["a"], [2**70]])
def test_token_ids_that_do_not_fit_are_refused(tokens):
    with pytest.raises(ConfigError, match="token ids"):
        encode_tokens(tokens)
