"""``kvstore why`` on a tiny model and a cache that is made without an engine."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from engine.model.offline import OfflineModel, document_tokens, prompt_tokens
from engine.text.tokenizer_file import read_tokenizer
from kvstore.block import BlockWrite
from kvstore.disk import DiskStore
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id, salt_digest
from tools.commands import run

TEMPLATE = ["<user> The document: ", " Question: ", " <assistant>"]
TEXT = "It was the best of times, it was the worst of times.\nIt was the age of wisdom. " * 2
KEYS = {
    "path", "read_as", "cause", "sentence", "namespace", "model", "salt", "block_size",
    "prompt_tokens", "prompt_blocks", "cached_blocks", "cached_tokens", "key", "difference",
    "elsewhere", "load", "tiers",
}  # fmt: skip
DIFFERENCE_KEYS = {
    "position", "before", "prompt", "cached", "prompt_tokens", "cached_tokens", "key",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A directory that no engine could run, but that has all that ``why`` reads."""
    path = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "dtype": "float32", "max_position_embeddings": 512}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.arange(8, dtype=np.float32)}, path / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def cache(model, tmp_path_factory) -> Path:
    """It has been asked about the document ``TEXT``, and given another prompt."""
    path = tmp_path_factory.mktemp("of caches") / "cache"
    (identity,) = OfflineModel(str(model)).candidates({})
    namespace = namespace_id(identity)
    tokenizer = read_tokenizer(model)
    with DiskStore.open(path, capacity_bytes=4 << 20) as store:
        description = {"tokenizer": str(model / "tokenizer.json"), "document_template": TEMPLATE}
        store.register_namespace(namespace, {**identity, "model": "tiny", **description})
        prompts = [
            (
                document_tokens(tokenizer, TEMPLATE, TEXT) + prompt_tokens(tokenizer, "Why? Who?"),
                "",
            ),
            (prompt_tokens(tokenizer, f"On 26 Jul 2024 it\x1b[31m was\x1b[0m {TEXT}"), ""),
            (prompt_tokens(tokenizer, f"Secret: {TEXT}"), "tenant"),
        ]
        for token_ids, salt in prompts:
            seed = chain_seed(namespace, salt)
            refs = chain_refs(seed, encode_tokens(token_ids), 64)
            digest = salt_digest(salt)
            store.put_group([BlockWrite(ref, namespace, digest, b"bytes") for ref in refs])
    return path


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def why(model, cache, tmp_path, capsys):
    """Runs the command in this process: most of the time of another one is its start."""

    def call(text: str, *options: str, directory: Path = cache) -> Result:
        (tmp_path / "prompt.txt").write_text(text)
        options = ("--model", str(model), "--prompt-file", str(tmp_path / "prompt.txt"), *options)
        status = run(["why", str(directory), *options])
        return Result(status, *capsys.readouterr())

    return call


def test_a_document_that_was_asked_about_is_found_as_one(why, cache):
    result = why(TEXT, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == 0
    assert found.keys() == KEYS
    assert (found["cause"], found["read_as"], found["path"]) == ("cached", "document", str(cache))
    assert found["cached_blocks"] == found["prompt_blocks"] > 0
    as_prompt = why(TEXT, "--json", "--read-as", "prompt")
    assert as_prompt.returncode == 1
    assert json.loads(as_prompt.stdout)["cause"] == "never_stored"


def test_a_prompt_is_explained_with_the_texts_that_differ(why):
    changed = TEXT.replace("worst", "w\x07rst")
    result = why(changed, "--json")
    found = json.loads(result.stdout)
    assert (result.returncode, found["cause"], found["read_as"]) == (1, "differs", "document")
    assert found["difference"].keys() == DIFFERENCE_KEYS
    assert found["difference"]["before"].endswith("it was the w")
    assert found["difference"]["prompt"].startswith("\x07rst of times")
    assert found["difference"]["cached"].startswith("orst of times")
    shown = why(changed)
    assert shown.returncode == 1
    assert r"\x07rst of times" in shown.stdout
    assert "\x07" not in shown.stdout


def test_a_date_is_named_and_control_characters_of_the_cache_stay_inside(why):
    result = why(f"On 27 Jul 2024 it was {TEXT}")
    assert result.returncode == 1
    assert "in a date or a time" in result.stdout
    assert r"\x1b[31m was" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_document_that_was_removed_is_still_known_as_one(why, cache, tmp_path):
    copy = Path(shutil.copytree(cache, tmp_path / "copy"))
    assert run(["evict", str(copy), "--older-than", "0s", "--yes"]) == 0
    result = why(TEXT, "--json", directory=copy)
    found = json.loads(result.stdout.partition("{")[1] + result.stdout.partition("{")[2])
    assert (found["cause"], found["read_as"]) == ("removed", "document")


@pytest.mark.parametrize(
    ("options", "cause", "said"),
    [
        (("--dtype", "bfloat16"), "other_namespace", "dtype"),
        (("--block-size", "32"), "other_namespace", "block_size"),
        (("--cache-salt", "tenant"), "other_salt", "cache_salt"),
    ],
)
def test_a_setting_that_differs_is_named(why, options, cause, said):
    result = why(TEXT, *options, "--read-as", "document", "--json")
    found = json.loads(result.stdout)
    assert (result.returncode, found["cause"], found["read_as"]) == (1, cause, "document")
    assert said in found["sentence"]
    assert found["elsewhere"][0]["cached_tokens"] >= 128


def test_prompts_come_through_a_pipe_too(cache, model):
    command = [Path(sys.executable).with_name("kvstore"), "why", cache, "--model", model]
    result = subprocess.run(
        [*command, "--prompt-file", "-", "--cache-salt", "tenant"],
        input=f"Secret: {TEXT}",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "every full block of the prompt is cached" in result.stdout


def test_a_cache_that_is_empty_explains_too(why, tmp_path):
    (tmp_path / "empty").mkdir()
    result = why("short", "--json", directory=tmp_path / "empty")
    assert (result.returncode, json.loads(result.stdout)["cause"]) == (1, "too_short")
    result = why("short", "--read-as", "document", directory=tmp_path / "empty")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "kvstore: --read-as document: no engine has used this cache with "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("missing", "--prompt-file", "-"), "missing"),
        ((".", "--prompt-file", "missing.txt"), "missing.txt"),
        ((".", "--prompt-file", "-", "--model", "./missing"), "does not exist"),
        ((".", "--prompt-file", "-", "--dtype", "int4"), "dtype: expected auto"),
        ((".", "--prompt-file", "-", "--block-size", "0"), "block_size: expected 8, 16"),
        ((".", "--prompt-file", "-", "--cache-salt", "\udcff"), "--cache-salt: not UTF-8 text"),
        ((".",), "--prompt-file"),
    ],
)
def test_a_mistake_is_one_line_and_2(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("text"))
    assert run(["why", *options]) == 2
    stdout, stderr = capsys.readouterr()
    (line,) = stderr.splitlines()
    assert (stdout, message in line) == ("", True)


def test_a_prompt_that_is_no_text_is_one_line_and_2(cache, model):
    command = [Path(sys.executable).with_name("kvstore"), "why", cache, "--model", model]
    result = subprocess.run(
        [*command, "--prompt-file", "-"], input=b"\xff\xfe", capture_output=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"kvstore: prompt -: not UTF-8 text; convert it to UTF-8\n"


def test_neither_torch_nor_transformers_is_imported(cache, model):
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['triton'] = None\n"
        "from tools.commands import run\n"
        "status = run(sys.argv[1:])\n"
        "sys.exit('transformers is there' if 'transformers' in sys.modules else status)\n"
    )
    arguments = ["why", str(cache), "--model", str(model), "--prompt-file", "-", "--json"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=TEXT,
        capture_output=True,
        text=True,
        env={**os.environ, "KVSTORE_HOME": str(model)},
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["cause"] == "cached"
