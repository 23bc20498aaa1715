"""``kvstore ask`` on a tiny model, and everything that a user may get wrong."""

import json
import os
import re
from pathlib import Path

import lmdb
import pytest
from command_case import run_here
from tiny_models import save_text_model

from kvstore.config import StoreConfig

PEOPLE = Path(__file__).parents[2] / "examples" / "people.md"
DOCUMENT = "The lighthouse of Aldermere was built in 1871. Its keeper is Marta.\n" * 4
ANSWER_TYPES = {
    "question": str,
    "text": str,
    "token_ids": list,
    "prompt_tokens": int,
    "cached_tokens": dict,
    "computed_tokens": int,
    "ttft_s": float,
    "total_s": float,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A user's cache directory, with a document in it."""
    home = tmp_path_factory.mktemp("home with a space")
    (home / "document.txt").write_text(DOCUMENT)
    return home


@pytest.fixture(scope="module")
def two_runs(model, home) -> list[dict]:
    """Two questions, and in a new engine another one, with the default cache directory."""
    options = ["--model", model, "--json", "--load-policy", "always", "--max-tokens", "4"]
    document = home / "document.txt"
    first = run_here("ask", document, "-q", "When?", "-q", "Who?", *options, KVSTORE_HOME=str(home))
    second = run_here("ask", document, "-q", "Where?", *options, KVSTORE_HOME=str(home))
    assert [(run.returncode, run.stderr) for run in (first, second)] == [(0, "")] * 2
    return [json.loads(first.stdout), json.loads(second.stdout)]


def test_ask_prints_the_object_of_the_contract(two_runs, model):
    first, second = two_runs
    assert first.keys() == {"model", "document", "answers"}
    assert first["model"] == str(model)
    assert first["document"]["tokens"] == second["document"]["tokens"] > len(DOCUMENT)
    assert [answer["question"] for answer in first["answers"]] == ["When?", "Who?"]
    for answer in [*first["answers"], *second["answers"]]:
        for name, kind in ANSWER_TYPES.items():
            assert isinstance(answer[name], kind), name
        cached = answer["cached_tokens"]
        assert cached.keys() == {"device", "host", "disk", "remote"}
        assert sum(cached.values()) + answer["computed_tokens"] == answer["prompt_tokens"]
        assert answer["prompt_tokens"] > first["document"]["tokens"]
        assert 0 < len(answer["token_ids"]) <= 4
        assert 0 < answer["ttft_s"] <= answer["total_s"]


def test_a_document_is_read_once_then_found_on_the_device_then_on_disk(two_runs):
    first, second = two_runs
    document = first["document"]["tokens"] // 16 * 16
    cold, warm = (answer["cached_tokens"] for answer in first["answers"])
    assert set(cold.values()) == {0}
    assert warm["device"] >= document
    (after_restart,) = (answer["cached_tokens"] for answer in second["answers"])
    assert after_restart["disk"] >= document


def test_the_default_cache_directory_is_below_the_users(two_runs, run, home, model):
    summary = json.loads(run("inspect", home / "cache", "--json").stdout)
    assert summary["tokens"] >= two_runs[0]["document"]["tokens"] // 16 * 16
    assert [namespace["model"] for namespace in summary["namespaces"]] == [str(model)]
    assert run("verify", home / "cache").returncode == 0


def test_what_an_engine_cached_can_be_carried_away(two_runs, run, home, tmp_path):
    assert run("export", home / "cache", tmp_path / "file.kv").returncode == 0
    assert run("import", tmp_path / "target", tmp_path / "file.kv").returncode == 0
    summaries = [run("inspect", each, "--json") for each in (home / "cache", tmp_path / "target")]
    before, after = (json.loads(summary.stdout)["namespaces"] for summary in summaries)
    assert [each["id"] for each in after] == [each["id"] for each in before]
    assert [each["tokens"] for each in after] == [each["tokens"] for each in before]


def test_people_get_answers_on_stdout_and_the_rest_on_stderr(kvstore, model, home, tmp_path):
    options = ["--cache-dir", tmp_path / "cache", "--max-tokens", "4", "--model", model]
    result = kvstore("ask", home / "document.txt", "-q", "When?", *options)
    assert result.returncode == 0
    assert result.stdout.strip()
    assert "prompt tokens" not in result.stdout
    assert re.match(r"kvstore: \d+ prompt tokens: \d+ computed; first token", result.stderr)


def test_the_model_is_the_demo_unless_another_is_named(run):
    assert re.search(r"--model TEXT.*\[default: +demo\]", run("ask", "-h").stdout, re.DOTALL)


def test_what_was_asked_with_a_salt_is_found_with_that_salt_only(run, two_runs, model, home):
    options = ["--model", model, "--cache-dir", home / "cache", "--max-tokens", "1", "--json"]
    salted = run("ask", home / "document.txt", "-q", "When?", *options, "--cache-salt", "mine")
    (answer,) = json.loads(salted.stdout)["answers"]
    assert answer["computed_tokens"] == answer["prompt_tokens"]
    rows = json.loads(run("inspect", home / "cache", "--documents", "--json").stdout)["documents"]
    assert {bool(row["salt"]) for row in rows} == {False, True}


@pytest.mark.parametrize("option", ["-q", "--cache-salt"])
def test_bytes_that_are_no_text_are_refused_by_name(run, option):
    result = run("ask", PEOPLE, "-q", "When?", option, os.fsdecode(b"\xff"))
    _fails(result, f"{option}: not UTF-8 text")


def test_a_wrong_name_in_store_config_lists_those_that_have_no_option_of_their_own(run):
    result = run("ask", PEOPLE, "-q", "?", "--store-config", "no_such=1")
    _fails(result, "no setting no_such; there are codec, ")
    listed = result.stderr.rpartition("there are ")[2].strip().split(", ")
    options = run("ask", "-h").stdout
    for name in listed:
        assert name in StoreConfig.__dataclass_fields__
        assert f"--{name.replace('_', '-')}" not in options.split()


def test_samples_are_numbered_and_logprobs_stand_below_each(run, two_runs, model, home):
    options = ["--n", "2", "--logprobs", "2", "--temperature", "1", "--seed", "3"]
    common = ["--model", model, "--max-tokens", "3", "--cache-dir", home / "cache", *options]
    result = run("ask", home / "document.txt", "-q", "When?", *common)
    assert result.returncode == 0
    assert re.findall(r"^\[(\d)\] ", result.stdout, re.MULTILINE) == ["1", "2"]
    assert len(re.findall(r"^    -\d+\.\d{3} '.*' +of", result.stdout, re.MULTILINE)) >= 2

    answer = json.loads(run("ask", home / "document.txt", "-q", "When?", *common, "--json").stdout)
    (answer,) = answer["answers"]
    assert answer["token_ids"] == answer["samples"][0]["token_ids"]
    for sample in answer["samples"]:
        assert [row["token_id"] for row in sample["logprobs"]] == sample["token_ids"]
        for row in sample["logprobs"]:
            best = [each["logprob"] for each in row["top"]]
            assert best == sorted(best, reverse=True)
            assert row["logprob"] <= best[0] <= 0


def _fails(result, *parts: str) -> None:
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    for part in parts:
        assert part in line


def test_a_missing_document_is_named(run, tmp_path):
    _fails(run("ask", tmp_path / "none", "-q", "?"), f"document {tmp_path / 'none'}: No such")


def test_a_directory_is_no_document(run, tmp_path):
    _fails(run("ask", tmp_path, "-q", "?"), str(tmp_path), "directory", "text file")


@pytest.mark.parametrize("content", ["", " \n\t"])
def test_an_empty_document_is_named(run, tmp_path, content):
    (tmp_path / "doc").write_text(content)
    _fails(run("ask", tmp_path / "doc", "-q", "?"), f"document {tmp_path / 'doc'}", "empty")


def test_a_document_that_is_not_text_is_named(run, tmp_path):
    (tmp_path / "doc").write_bytes(b"\xff\xfe\x00")
    _fails(run("ask", tmp_path / "doc", "-q", "?"), f"document {tmp_path / 'doc'}", "UTF-8")


def test_an_empty_question_is_refused(run):
    _fails(run("ask", PEOPLE, "-q", "  "), "-q", "empty")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--disk-cache-size", "lots", '"512MiB"'),
        ("--device-cache", "-5", '"512MiB"'),
        ("--host-cache", "1 parsec", '"512MiB"'),
        ("--block-size", "17", "16"),
        ("--max-tokens", "0", "at least 1"),
        ("--temperature", "-1", "at least 0"),
        ("--load-policy", "sometimes", "always"),
        ("--store-config", "dirty_max_age_s", "NAME=VALUE"),
        ("--store-config", "no_such=1", "dirty_max_age_s"),
        ("--max-num-batched-tokens", "8", "--max-num-seqs"),
    ],
)
def test_a_nonsensical_setting_is_named_as_typed_with_what_would_do(run, option, value, remedy):
    name = value.partition("=")[0] if "=" in value else option
    result = run("ask", PEOPLE, "-q", "?", option, value)
    assert name in result.stderr
    _fails(result, remedy)


def test_a_document_longer_than_the_context_says_how_much_to_cut(run, model, tmp_path):
    options = ["--model", model, "--cache-dir", tmp_path / "cache"]
    result = run("ask", PEOPLE, "-q", "?", *options)
    _fails(result, "the model's context is 512", "cut at least")
    assert not (tmp_path / "cache").exists()


def test_a_cache_directory_that_is_a_file_is_left_alone(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("ask", PEOPLE, "-q", "?", "--cache-dir", tmp_path / "file")
    _fails(result, f"{tmp_path / 'file'}: ", "directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_another_programs_database_is_left_alone(run, tmp_path):
    with lmdb.open(str(tmp_path / "other")) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")
    result = run("ask", PEOPLE, "-q", "?", "--cache-dir", tmp_path / "other")
    _fails(result, f"{tmp_path / 'other'}: ", "another LMDB", "choose an empty directory")
    with lmdb.open(str(tmp_path / "other")) as env, env.begin() as txn:
        assert list(txn.cursor()) == [(b"their", b"data")]
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"data.mdb", "lock.mdb"}


def test_a_cache_directory_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = run("ask", PEOPLE, "-q", "?", "--cache-dir", tmp_path / "file" / "cache")
    _fails(result, f"{tmp_path / 'file' / 'cache'}: ", "is a file")


def test_a_bad_cache_directory_is_noticed_before_the_model_is_loaded(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    options = ["--cache-dir", tmp_path / "file", "--model", tmp_path / "none"]
    _fails(run("ask", PEOPLE, "-q", "?", *options), f"{tmp_path / 'file'}: ", "directory")


def test_a_model_that_does_not_exist_is_named(run, tmp_path):
    result = run("ask", PEOPLE, "-q", "?", "--model", tmp_path / "none")
    _fails(result, f"model '{tmp_path / 'none'}' does not exist", "demo")
