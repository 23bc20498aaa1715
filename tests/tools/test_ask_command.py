"""``kvstore ask`` on the real demo model, and everything that a user may get wrong."""

import json
from pathlib import Path

import lmdb
import pytest

from engine.model_source import demo_model

PEOPLE = Path(__file__).parents[2] / "examples" / "people.md"
FIRST, SECOND, THIRD = (
    "What is the age of Marta Lindqvist?",
    "Which country is Aiko Tanabe from?",
    "Which country is Kofi Mensah from?",
)
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
def home(tmp_path_factory) -> Path:
    """A user's cache directory that holds the demo model and no blocks."""
    home = tmp_path_factory.mktemp("home with a space")
    (home / "models").symlink_to(demo_model().parent)
    return home


@pytest.fixture(scope="module")
def two_runs(kvstore, home) -> list[dict]:
    """Two questions, and in a new process another one, with the default cache directory."""
    options = ["--json", "--load-policy", "always", "--max-tokens", "8"]
    first = kvstore("ask", PEOPLE, "-q", FIRST, "-q", SECOND, *options, KVSTORE_HOME=str(home))
    second = kvstore("ask", PEOPLE, "-q", THIRD, *options, KVSTORE_HOME=str(home))
    assert [(run.returncode, run.stderr) for run in (first, second)] == [(0, "")] * 2
    return [json.loads(first.stdout), json.loads(second.stdout)]


def test_ask_prints_the_object_of_the_contract(two_runs):
    first, second = two_runs
    assert first.keys() == {"model", "document", "answers"}
    assert first["model"] == "demo"
    assert first["document"]["tokens"] == second["document"]["tokens"] > 1700
    assert [answer["question"] for answer in first["answers"]] == [FIRST, SECOND]
    for answer in [*first["answers"], *second["answers"]]:
        for name, kind in ANSWER_TYPES.items():
            assert isinstance(answer[name], kind), name
        cached = answer["cached_tokens"]
        assert cached.keys() == {"device", "host", "disk", "remote"}
        assert sum(cached.values()) + answer["computed_tokens"] == answer["prompt_tokens"]
        assert answer["prompt_tokens"] > first["document"]["tokens"]
        assert 0 < len(answer["token_ids"]) <= 8
        assert 0 < answer["ttft_s"] <= answer["total_s"]


def test_a_document_is_read_once_then_found_on_the_device_then_on_disk(two_runs):
    first, second = two_runs
    document = first["document"]["tokens"] // 16 * 16
    cold, warm = (answer["cached_tokens"] for answer in first["answers"])
    assert set(cold.values()) == {0}
    assert warm["device"] >= document
    (after_restart,) = (answer["cached_tokens"] for answer in second["answers"])
    assert after_restart["disk"] >= document


def test_answers_are_sensible(two_runs):
    first, second = two_runs
    texts = [answer["text"] for answer in first["answers"] + second["answers"]]
    assert "Japan" in texts[1]
    assert "Ghana" in texts[2]


def test_the_default_cache_directory_is_below_the_users(two_runs, kvstore, home):
    summary = json.loads(kvstore("inspect", home / "cache", "--json").stdout)
    assert summary["tokens"] >= two_runs[0]["document"]["tokens"] // 16 * 16
    assert [namespace["model"] for namespace in summary["namespaces"]] == ["demo"]
    assert kvstore("verify", home / "cache").returncode == 0


def test_people_get_answers_on_stdout_and_the_rest_on_stderr(kvstore, tmp_path):
    (tmp_path / "note.txt").write_text("The capital of France is Paris.")
    cache_dir = ["--cache-dir", tmp_path / "cache"]
    question = "What is the capital of France?"
    result = kvstore("ask", tmp_path / "note.txt", "-q", question, *cache_dir)
    assert result.returncode == 0
    assert "Paris" in result.stdout
    assert "prompt tokens" not in result.stdout
    assert "prompt tokens: " in result.stderr


def _fails(result, *parts: str) -> None:
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    for part in parts:
        assert part in line


def test_a_missing_document_is_named(kvstore, tmp_path):
    _fails(kvstore("ask", tmp_path / "none", "-q", "?"), f"document {tmp_path / 'none'}: No such")


def test_a_directory_is_no_document(kvstore, tmp_path):
    _fails(kvstore("ask", tmp_path, "-q", "?"), str(tmp_path), "directory", "text file")


@pytest.mark.parametrize("content", ["", " \n\t"])
def test_an_empty_document_is_named(kvstore, tmp_path, content):
    (tmp_path / "doc").write_text(content)
    _fails(kvstore("ask", tmp_path / "doc", "-q", "?"), f"document {tmp_path / 'doc'}", "empty")


def test_a_document_that_is_not_text_is_named(kvstore, tmp_path):
    (tmp_path / "doc").write_bytes(b"\xff\xfe\x00")
    _fails(kvstore("ask", tmp_path / "doc", "-q", "?"), f"document {tmp_path / 'doc'}", "UTF-8")


def test_an_empty_question_is_refused(kvstore):
    _fails(kvstore("ask", PEOPLE, "-q", "  "), "-q", "empty")


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
    ],
)
def test_a_nonsensical_setting_is_named_with_what_would_do(kvstore, option, value, remedy):
    name = value.partition("=")[0] if "=" in value else option.strip("-").replace("-", "_")
    result = kvstore("ask", PEOPLE, "-q", "?", option, value)
    assert name in result.stderr.replace("-", "_")
    _fails(result, remedy)


def test_a_document_longer_than_the_context_says_how_much_to_cut(kvstore, home, tmp_path):
    options = ["--max-model-len", "256", "--cache-dir", tmp_path / "cache"]
    result = kvstore("ask", PEOPLE, "-q", "?", *options, KVSTORE_HOME=str(home))
    _fails(result, "the model's context is 256", "cut at least")
    assert json.loads(kvstore("inspect", tmp_path / "cache", "--json").stdout)["blocks"] == 0


def test_a_cache_directory_that_is_a_file_is_left_alone(kvstore, tmp_path):
    (tmp_path / "file").write_text("mine")
    result = kvstore("ask", PEOPLE, "-q", "?", "--cache-dir", tmp_path / "file")
    _fails(result, f"{tmp_path / 'file'}: ", "directory")
    assert (tmp_path / "file").read_text() == "mine"


def test_another_programs_database_is_left_alone(kvstore, tmp_path):
    with lmdb.open(str(tmp_path / "other")) as env, env.begin(write=True) as txn:
        txn.put(b"their", b"data")
    result = kvstore("ask", PEOPLE, "-q", "?", "--cache-dir", tmp_path / "other")
    _fails(result, f"{tmp_path / 'other'}: ", "another LMDB", "choose an empty directory")
    with lmdb.open(str(tmp_path / "other")) as env, env.begin() as txn:
        assert list(txn.cursor()) == [(b"their", b"data")]
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"data.mdb", "lock.mdb"}


def test_a_cache_directory_that_cannot_be_made_is_named(kvstore):
    result = kvstore("ask", PEOPLE, "-q", "?", "--cache-dir", "/proc/nowhere")
    _fails(result, "/proc/nowhere: ")


def test_a_model_that_does_not_exist_is_named(kvstore, tmp_path):
    result = kvstore("ask", PEOPLE, "-q", "?", "--model", tmp_path / "none")
    _fails(result, f"model '{tmp_path / 'none'}' does not exist", "demo")
