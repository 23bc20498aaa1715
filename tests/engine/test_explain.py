"""``llm.explain`` says what a request would find, and the files say the same without the engine."""

import os
import time

import pytest

from engine import LLM, SamplingParams
from engine.model.offline import OfflineModel, document_tokens, prompt_tokens
from engine.text.document_prompt import template_parts
from engine.text.tokenizer_file import keep_tokenizer, read_tokenizer
from kvstore.costs.cost import LoadDecision, LoadReason
from kvstore.disk.offline.browse import Browser
from kvstore.disk.offline.look import Engines
from kvstore.disk.slices import reading
from kvstore.errors import ConfigError
from kvstore.hashing import namespace_id
from kvstore.why.explanation import Cause

ONE = SamplingParams(temperature=0.0, max_tokens=1)
TEXT = "The quick brown fox jumps over the lazy dog, again and again, all day long."
TEXTS = ("", "plain text", "<|im_start|>user\nA <|im_end|> é 漢字 🙂\n\n  two  spaces\t")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache directory, and a home for the user's files."""
    path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_HOME", str(path / "home"))
        yield path


@pytest.fixture(scope="module")
def llm(text_model, home):
    settings = {"dtype": "float32", "device_cache": "4MiB", "load_policy": "always"}
    with LLM(text_model, disk_cache=home / "cache", **settings) as llm:
        yield llm


def test_what_a_request_finds_is_what_was_explained(llm):
    text = "Explained, and then asked: " + TEXT
    assert llm.explain(text).cause is Cause.NEVER_STORED
    llm.generate(text, ONE)
    found = llm.explain(text)
    assert (found.cause, found.is_cached) == (Cause.CACHED, True)
    (output,) = llm.generate(text, ONE)
    assert found.cached_tokens == output.num_cached_tokens
    assert found.tiers["device"] == found.cached_blocks * 16


def test_the_difference_is_shown_whatever_tier_the_other_prompt_is_in(llm):
    llm.generate(TEXT, ONE)
    asked = TEXT.replace("lazy dog", "lazy cat")
    for tier in ("device", "disk"):
        found = llm.explain(asked)
        assert found.cause is Cause.DIFFERS
        assert found.tiers[tier] == found.cached_blocks * 16 > 0
        assert found.difference.before.endswith("the lazy ")
        assert found.difference.prompt.startswith("cat, again")
        assert found.difference.cached.startswith("dog, aga")
        llm.reset_prefix_cache("device")


def test_explaining_changes_no_statistics(llm):
    before = llm.stats()
    llm.explain(TEXT)
    after = llm.stats()
    assert after.looked_up_blocks == before.looked_up_blocks
    assert after.load_decisions == before.load_decisions


def test_other_salts_are_found_in_memory_and_on_disk(llm):
    llm.generate("In memory: " + TEXT, ONE)
    for _ in range(2):
        found = llm.explain("In memory: " + TEXT, cache_salt="tenant")
        assert found.cause is Cause.OTHER_SALT
        assert found.elsewhere[0].cached_tokens == found.prompt_blocks * 16
        llm.reset_prefix_cache("device")


def test_wrong_prompts_are_refused(llm):
    with pytest.raises(ConfigError, match="token ids"):
        llm.explain(["words"])


def test_a_cut_by_the_cost_of_loading_says_so(llm, monkeypatch):
    llm.generate(TEXT, ONE)
    llm.flush()
    llm.reset_prefix_cache("device")
    verdict = LoadDecision(0, 4, LoadReason.COMPUTE, 0.0, 0.001, 1.0)
    monkeypatch.setattr(llm._core.store.cost, "choose", lambda *_, **__: verdict)
    found = llm.explain(TEXT)
    assert (found.cause, found.load["reason"]) == (Cause.LOAD_IS_SLOWER, "compute")


def test_without_a_disk_what_is_gone_is_gone(make_llm):
    llm = make_llm()
    assert llm.explain(list(range(3, 60))).cause is Cause.UNKNOWN
    llm.generate([list(range(3, 60))], ONE)
    assert llm.explain(list(range(3, 60))).cause is Cause.CACHED
    found = llm.explain(list(range(3, 60)), cache_salt="tenant")
    assert (found.cause, found.cached_tokens) == (Cause.OTHER_SALT, 0)
    assert llm.explain(list(range(4, 60)), cache_salt="tenant").cause is Cause.UNKNOWN


def test_a_policy_to_load_nothing_is_the_cause_and_the_reason(make_llm, tmp_path):
    prompt = list(range(3, 60))
    llm = make_llm(disk_cache=tmp_path / "cache", load_policy="never")
    llm.generate([prompt], ONE)
    llm.flush()
    (output,) = llm.generate([prompt], ONE)
    assert output.metrics.load_decision.reason is LoadReason.NOTHING_TO_LOAD
    llm.reset_prefix_cache("device")
    assert llm.explain(prompt[::-1]).load["reason"] == "nothing_to_load"
    found = llm.explain(prompt)
    assert (found.cause, found.load["reason"]) == (Cause.LOAD_POLICY, "never")
    assert found.tiers["disk"] == found.prompt_blocks * 16
    (output,) = llm.generate([prompt], ONE)
    assert output.metrics.load_decision.reason is LoadReason.NEVER
    assert output.num_cached_tokens == 0


def test_an_engine_publishes_how_it_is_doing(llm, home):
    llm.generate(TEXT, ONE)
    asked = llm.stats().looked_up_blocks
    with Engines(home / "cache") as engines:

        def is_told() -> bool:  # at most a second later; and then, with nothing left to do
            found = engines.read()
            return bool(found) and (
                (found[0]["looked_up_blocks"], found[0]["running"], found[0]["waiting"])
                == (asked, 0, 0)
            )

        deadline = time.monotonic() + 60
        while not is_told():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (engine,) = engines.read()
    assert (engine["pid"], engine["role"]) == (os.getpid(), "engine")
    assert engine["namespace"] == namespace_id(llm._loaded.identity).hex()


# ---- the same without the engine ---------------------------------------------------------------


def test_namespace_and_tokens_are_found_from_files_and_what_the_engine_left(llm, text_model, home):
    model = OfflineModel(text_model, dtype="float32")
    with reading(home / "cache") as env:
        registered = Browser(env).namespaces()
    assert model.candidates(registered) == [llm._loaded.identity]
    description = registered[namespace_id(llm._loaded.identity)]
    assert description["model"] == text_model
    assert (description["num_layers"], description["windows"]) == (2, [None, None])
    tokenizer = model.tokenizer(description)
    for text in TEXTS[1:]:
        assert prompt_tokens(tokenizer, text) == llm._reader.read(text)[1]
        document = llm.document(text, prefill=False)
        assert document_tokens(tokenizer, description["document_template"], text) == (
            document._prompt.prefix
        )
    assert description["document_template"] == list(template_parts(llm.tokenizer))


def test_a_tokenizer_is_kept_once_where_the_checkpoint_has_another(llm, text_model, home):
    own = keep_tokenizer(llm.tokenizer)
    assert str(own) == f"{text_model}/tokenizer.json"
    llm.tokenizer.name_or_path, name = str(home), llm.tokenizer.name_or_path
    try:
        kept = keep_tokenizer(llm.tokenizer)
        assert keep_tokenizer(llm.tokenizer) == kept
    finally:
        llm.tokenizer.name_or_path = name
    assert kept.is_relative_to(home / "home")
    for text in TEXTS:
        assert read_tokenizer(kept).encode(text).ids == llm.tokenizer(text)["input_ids"]
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        read_tokenizer(home)
    (home / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokenizer(home)


def test_what_only_a_running_engine_knows_is_taken_from_the_cache(text_model):
    model = OfflineModel(text_model, dtype="float32", deterministic=True)
    plain = OfflineModel(text_model, dtype="float32").identity
    runs = [plain | {"deterministic": {"threads": n}} for n in (1, 2)]
    registered = {namespace_id(each): {**each, "model": "m"} for each in [plain, *runs]}
    assert model.candidates(registered) == runs
    assert model.candidates({}) == [plain | {"deterministic": {}}]
