"""``kvstore inspect`` and its views. Mostly in this process: most of another one is its start."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pexpect
import pytest
import tokenizers

from kvstore.block import BlockWrite
from kvstore.disk import DiskStore
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id
from tools.commands import run

BRANCH_KEYS = {
    "key", "last_key", "level", "depth", "namespace", "model", "salt", "blocks", "tokens", "bytes",
    "bad_blocks", "pinned_blocks", "hits", "touched", "children", "token_ids", "text",
}  # fmt: skip
DOCUMENT_KEYS = {
    "key", "namespace", "model", "salt", "blocks", "tokens", "bytes", "own_blocks",
    "pinned_blocks", "hits", "touched", "token_ids", "own_token_ids", "text", "own_text",
}  # fmt: skip
BLOCK_KEYS = {
    "path", "key", "parent", "children", "num_children", "depth", "namespace", "model", "salt",
    "tokens", "token_ids", "nbytes", "payload_bytes", "codec", "checksum", "is_intact", "created",
    "touched", "hits", "is_bad", "num_pins", "has_pin", "pinned_until", "text", "tier",
}  # fmt: skip
TRUNK = "Once upon a time there was a \x1b[31mking\x07 "


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    """A token a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory, tokenizer) -> Path:
    """Two prompts with a beginning in common, of a model with a tokenizer; one of another model,
    without. Blocks of four tokens."""
    path = tmp_path_factory.mktemp("of caches") / "cache"
    encode = tokenizers.Tokenizer.from_file(tokenizer).encode
    two_days_ago = time.time() - 2.2 * 86400  # whatever is said of it stays so while tests run
    with DiskStore.open(path, capacity_bytes=4 << 20, clock=lambda: two_days_ago) as store:
        for model, texts in (
            ("tiny", (TRUNK + "who had two daughters", TRUNK + "without any children")),
            ("ot\x1bher", ("A text",)),
        ):
            identity = {"model": model, "dtype": "float32", "block_size": 4}
            identity |= {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8}
            identity |= {"tokenizer": tokenizer} if model == "tiny" else {}
            namespace = namespace_id(identity)
            store.register_namespace(namespace, identity)
            for text in texts:
                seed = chain_seed(namespace)
                refs = chain_refs(seed, encode_tokens(encode(text).ids), 16)
                store.put_group([BlockWrite(ref, namespace, b"", b"bytes") for ref in refs])
    return path


@pytest.fixture
def inspect(cache, capsys):
    def call(*options: object, directory: Path = cache) -> Result:
        status = run(["inspect", str(directory), *map(str, options)])
        return Result(status, *capsys.readouterr())

    return call


def test_the_summary_has_pages_uses_and_codecs(inspect):
    result = inspect()
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r"^pages +\d+% live, \d+% free \(", result.stdout, re.MULTILINE)
    assert "codecs    raw" in result.stdout
    assert "0 recorded; the latest 2 days ago" in result.stdout
    assert "attached" not in result.stdout
    assert r"ot\x1bher" in result.stdout
    found = json.loads(inspect("--json").stdout)
    assert found["surveyed_blocks"] == found["blocks"]
    assert found["pages"].keys() == {"live", "free", "page_bytes"}
    (tiny,) = (row for row in found["namespaces"] if row["model"] == "tiny")
    assert tiny["codecs"] == {"raw": tiny["blocks"]}
    assert tiny["oldest_use"] <= tiny["newest_use"]


def test_who_is_attached_is_named(cache):
    with DiskStore.open(cache):
        command = [Path(sys.executable).with_name("kvstore"), "inspect", cache, "--json"]
        found = json.loads(subprocess.check_output(command))
    (holder,) = found["attached"]
    assert holder.keys() == {"pid", "role", "since", "holder"}
    assert holder["role"] == "engine"


def test_the_tree_is_a_line_a_branch_with_the_text_it_begins_with(inspect):
    lines = inspect("--tree", "--namespace", "tiny").stdout.splitlines()
    assert re.fullmatch(r"tiny \([0-9a-f]{12}\)", lines[0])
    assert re.fullmatch(
        r'  [0-9a-f]{12}  \d+ tokens  \d+ blocks  .* hits  .* ago  "Once upon a time .*"', lines[1]
    )
    assert len(lines) == 4
    assert {line.partition('"')[2].strip('"')[:8] for line in lines[2:]} == {"who had ", "without "}
    assert all(line.startswith("    ") for line in lines[2:])


def test_no_control_character_of_a_prompt_or_a_name_comes_out(inspect):
    for options in ((), ("--tree",), ("--documents",)):
        stdout = inspect(*options).stdout
        assert stdout.replace("\n", "").isprintable()
    assert r"\x1b[31mking\x07" in inspect("--tree").stdout


def test_rows_without_a_tokenizer_show_token_ids_and_with_a_given_one_texts(inspect, tokenizer):
    shown = inspect("--tree", "--namespace", r"ot" + "\x1b" + "her").stdout
    assert "tokens " in shown.splitlines()[1].partition("ago")[2]
    shown = inspect("--tree", "--tokenizer", tokenizer).stdout
    assert '"A te"' in shown
    wrong = inspect("--tree", "--tokenizer", "missing")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_documents_are_a_line_each_with_the_text_that_is_their_own(inspect):
    lines = inspect("--documents", "--namespace", "tiny").stdout.splitlines()
    assert len(lines) == 3
    assert all(re.search(r"blocks \(\d its own\)", line) for line in lines[1:])
    assert '"without any children"' in lines[1] + lines[2]


@pytest.mark.parametrize(
    ("view", "name", "keys"),
    [("--tree", "branches", BRANCH_KEYS), ("--documents", "documents", DOCUMENT_KEYS)],
)
def test_rows_as_json(inspect, cache, view, name, keys, tmp_path):
    found = json.loads(inspect(view, "--json").stdout)
    assert found["path"] == str(cache)
    assert len(found[name]) == {"--tree": 4, "--documents": 3}[view]
    for row in found[name]:
        assert row.keys() == keys
    assert {row["model"] for row in found[name]} == {"tiny", "ot\x1bher"}
    (tmp_path / "empty").mkdir()
    empty = inspect(view, "--json", directory=tmp_path / "empty")
    assert json.loads(empty.stdout)[name] == []
    assert inspect(view, directory=tmp_path / "empty").stdout == ""


def test_one_block_in_full(inspect):
    row = json.loads(inspect("--tree", "--json", "--namespace", "tiny").stdout)["branches"][0]
    found = json.loads(inspect("--block", row["key"][:10], "--json").stdout)
    assert found.keys() == BLOCK_KEYS
    assert (found["key"], found["text"], found["tier"]) == (row["key"], "Once", "disk")
    shown = inspect("--block", row["key"]).stdout
    assert 'text        "Once"' in shown
    assert "checksum    right" in shown
    missing = inspect("--block", "no hex")
    assert (missing.returncode, missing.stdout) == (2, "")


def test_a_damaged_payload_is_shown_as_such(tmp_path, inspect):
    refs = chain_refs(chain_seed(b"n" * 32), encode_tokens(range(4)), 16)
    with DiskStore.open(tmp_path / "cache", capacity_bytes=1 << 20) as store:
        store.put_group([BlockWrite(refs[0], b"n" * 32, b"", b"the payload's bytes")])
        with store._env.write(1.0) as txn:
            txn.put(refs[0].key, b"the payload's b_tes", db=store._env.payload)
    found = inspect("--block", refs[0].key.hex(), "--json", directory=tmp_path / "cache")
    assert json.loads(found.stdout)["is_intact"] is False


@pytest.mark.parametrize(
    "options",
    [
        ("--tree", "--documents"),
        ("--count", "3"),
        ("--watch", "--interval", "0"),
        ("--watch", "--interval", "nan"),
        ("--watch", "--interval", "1e300"),
        ("--namespace", "tiny"),
    ],
)
def test_views_do_not_mix(inspect, options):
    result = inspect(*options)
    assert (result.returncode, result.stdout) == (2, "")


# ---- --watch -----------------------------------------------------------------------------------


def snapshot(namespace: str, asked: int, hits: int) -> dict:
    tier = {
        "state": "ok", "used_bytes": 512, "capacity_bytes": 1024, "used_blocks": 2, "hits": hits,
        "misses": 0, "stored_blocks": 2, "evicted_blocks": 0,
    }  # fmt: skip
    return {
        "namespace": namespace,
        "tiers": dict.fromkeys(("device", "host", "disk"), tier),
        "looked_up_blocks": asked,
        "promoted_blocks": {"disk": hits},
        "demoted_blocks": 0,
        "dirty_blocks": 7,
        "oldest_dirty_age_s": 1.5,
        "pending_transfers": 3,
        "block_bytes": 256,
        "written_bytes": 0,
        "running": 1,
        "waiting": 2,
    }


@pytest.fixture
def engine(cache):
    """What a running engine would publish, under the test's control."""
    with DiskStore.open(cache) as store:
        (namespace,) = (key for key, each in store.namespaces().items() if each["model"] == "tiny")

        def publish(asked: int, hits: int) -> None:
            store.publish(snapshot(namespace.hex(), asked, hits))

        yield publish


def test_watching_gives_rates_between_two_looks(inspect, engine, monkeypatch):
    looks = iter([(100, 10), (140, 40)])
    monkeypatch.setattr("time.sleep", lambda seconds: engine(*next(looks)))
    engine(*next(looks))
    result = inspect("--watch", "--count", "2", "--json")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first.keys() == {"at", "engines"}
    assert first["engines"][0]["rates"] is None
    (found,) = second["engines"]
    assert (found["model"], found["dirty_blocks"], found["waiting"]) == ("tiny", 7, 2)
    rates = found["rates"]
    assert rates["hit_ratio"]["disk"] == 0.75
    assert rates["asked_blocks"] * rates["seconds"] == pytest.approx(40)
    assert rates["promoted_bytes"]["disk"] * rates["seconds"] == pytest.approx(30 * 256)


def test_watching_off_a_terminal_is_a_line_a_look(inspect, engine):
    engine(100, 10)
    result = inspect("--watch", "--count", "2", "--interval", "0.1")
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    assert re.match(r"\d\d:\d\d:\d\d  tiny \(pid \d+\); 100 blocks asked for so far; ", lines[0])
    assert "7 dirty blocks (the oldest for 1.5 s), 3 transfers; sequences: 1 run" in lines[1]


def test_watching_on_a_terminal_is_a_screen(cache, engine):
    engine(100, 10)
    command = str(Path(sys.executable).with_name("kvstore"))
    arguments = ["inspect", str(cache), "--watch", "--count", "2", "--interval", "0.1"]
    process = pexpect.spawn(command, arguments, encoding="utf-8", timeout=60, dimensions=(24, 90))
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0
    assert re.search(r"disk +ok +512 B +1.0 KiB +2 +- +10%", process.before)


def test_watching_where_nobody_is_says_so(inspect, tmp_path):
    (tmp_path / "empty").mkdir()
    result = inspect("--watch", "--count", "1", directory=tmp_path / "empty")
    assert "no engine is attached" in result.stdout
    assert list((tmp_path / "empty").iterdir()) == []
