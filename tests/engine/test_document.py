"""Documents on a model whose tokens are bytes, so that every count can be said beforehand."""

import logging
import os
import pty
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress

import pytest
import transformers

from engine import LLM, SamplingParams
from engine.text.document_prompt import DocumentPrompt, template_parts
from engine.text.prompts import PromptReader
from kvstore.errors import BlockMissingError, ConfigError

BLOCK = 16
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My name is Kofi <|im_end|>."},
    {"role": "assistant", "content": "Hello, Kofi."},
]


@pytest.fixture(scope="module")
def llm(text_model, tmp_path_factory):
    settings = {
        "dtype": "float32",
        "device_cache": "16MiB",
        "disk_cache": tmp_path_factory.mktemp("documents") / "cache",
        "load_policy": "always",
        "max_num_batched_tokens": 64,
    }
    with LLM(text_model, **settings) as llm:
        yield llm
        assert llm.check() == []


@pytest.fixture(scope="module")
def tokenizer(text_model):
    return transformers.AutoTokenizer.from_pretrained(text_model)


def whole_blocks(document) -> int:
    return document.num_tokens // BLOCK * BLOCK


def test_a_conversation_is_a_document_and_a_question_its_next_message(llm):
    document = llm.document(TALK)
    asked = llm._reader.read_messages(
        [
            TALK[0],
            {"role": "user", "content": "My name is Kofi ."},
            TALK[2],
            {"role": "user", "content": "Who am I?"},
        ]
    )
    prompt = document.prompt_token_ids("Who am I?")
    # What looks like a special token is text, and takes its bytes; all else is as chat() has it.
    assert len(prompt) == len(asked) + len("<|im_end|>")
    assert llm.tokenizer.decode(prompt) == llm.tokenizer.apply_chat_template(
        [*TALK, {"role": "user", "content": "Who am I?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    answer = document.ask("Who am I?", SHORT)
    assert answer.num_cached_tokens >= whole_blocks(document)
    assert answer.metrics.computed_tokens <= len(prompt) - whole_blocks(document)


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "user"}], ["hello"], [{"role": "user", "content": 5}], 5, None],
    ids=str,
)
def test_messages_that_are_none_are_refused(llm, messages):
    with pytest.raises(ConfigError):
        llm.document(messages)


@pytest.mark.parametrize("question", ["", " ", 5, None, [5]], ids=str)
def test_a_question_that_is_no_text_is_refused(llm, question):
    with pytest.raises(ConfigError, match="a question is text, and not empty"):
        llm.document("It is five.", prefill=False).ask(question)


def test_a_template_that_moves_or_drops_messages_is_refused(llm, tokenizer):
    reader = PromptReader(tokenizer)
    for template in (
        "{% for m in messages | reverse %}{{ m.content }}\n{% endfor %}",
        "{{ messages[-1].content }}",
        "{{ raise_exception('no system role') }}",
    ):
        other = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, chat_template=template
        )
        with pytest.raises(ConfigError, match="chat template"):
            DocumentPrompt.of_messages(PromptReader(other), TALK)
    assert DocumentPrompt.of_messages(reader, TALK).prefix


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d %b %Y') }} ",
        "{{ date_string }} ",
        "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }} ",
    ],
    ids=["now", "string", "in a macro"],
)
def test_a_template_that_prints_the_day_prints_the_same_one_ever(tokenizer, template):
    """With the real one a document would be read anew every day."""
    dated = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=template + "{% for m in messages %}{{ m.content }}|{% endfor %}",
    )
    assert template_parts(dated)[0] == "26 Jul 2024 "


def test_a_document_that_is_too_long_says_exactly_how_much_to_cut(llm):
    empty = llm.document("x", prefill=False)
    around = len(empty.prompt_token_ids("?")) - 2
    room = llm.max_model_len - around - 2  # for a question and an answer of one token
    llm.flush()
    before = llm.stats()
    for excess in (1, 7):
        with pytest.raises(ConfigError, match=rf"context is 512: cut at least {excess} tokens"):
            llm.document("x" * (room + excess))
        conversation = [{"role": "user", "content": "x" * (room + excess)}]
        with pytest.raises(ConfigError, match="cut at least"):
            llm.document(conversation)
    assert llm.stats() == before  # nothing was looked up, computed or stored
    answer = llm.document("x" * room).ask("?", SHORT)
    assert len(answer.outputs[0].token_ids) == 1
    assert answer.outputs[0].finish_reason == "length"


def test_what_is_too_long_is_known_before_weights_and_cache_directory(
    text_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("engine.model.loader._load_weights", lambda *_: pytest.fail("loaded"))

    def check(tokenizer, context_len):
        DocumentPrompt.of_text(PromptReader(tokenizer), "x" * 600).check_fits(context_len)

    with pytest.raises(ConfigError, match="the model's context is 512: cut"):
        LLM(text_model, disk_cache=tmp_path / "cache", before_weights=check)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="expected a directory"):
        LLM(text_model, disk_cache=tmp_path / "file")
    assert not (tmp_path / "cache").exists()


def test_a_str_is_text_also_when_a_file_has_that_name(llm, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("What the file says.")
    with caplog.at_level(logging.WARNING):
        document = llm.document("notes.txt", prefill=False)
    assert "notes.txt" in llm.tokenizer.decode(document.prompt_token_ids("?"))
    assert "pass a Path" in caplog.text
    caplog.clear()
    llm.document("no such file.txt", prefill=False)
    llm.document("a\0b", prefill=False)
    assert caplog.text == ""


def test_evict_frees_the_document_and_its_questions_in_every_tier(llm):
    document = llm.document("A document about bees, which nothing else shares. " * 3)
    answer = document.ask("How many bees?", SHORT)
    llm.flush()
    held = document.residency()
    assert held["device"] == whole_blocks(document)
    used = {name: tier.used_blocks for name, tier in llm.stats().tiers.items()}
    freed = document.evict()
    # The first block is the template's, which other documents begin with too.
    assert freed["device"] == freed["disk"] >= whole_blocks(document) - BLOCK
    now = {name: tier.used_blocks for name, tier in llm.stats().tiers.items()}
    for tier in ("device", "disk"):
        assert used[tier] - now[tier] == freed[tier] // BLOCK
    assert sum(document.residency().values()) <= BLOCK
    again = document.ask("How many bees?", SHORT)
    assert again.num_cached_tokens < 2 * BLOCK
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids


def test_evict_leaves_what_other_documents_share(llm):
    text = "A beginning that two documents have. " * 3
    short, long = llm.document(text), llm.document(text + "And an end that one has. " * 3)
    llm.flush()
    short.ask("Is it short?", SHORT)
    shared = short.evict()
    assert long.residency()["device"] == whole_blocks(long)
    assert short.residency()["device"] == whole_blocks(short)
    # Its questions' blocks are its own; what the long one continues is not.
    assert shared["device"] <= 3 * BLOCK
    freed = long.evict()
    assert freed["device"] >= whole_blocks(long) - BLOCK
    assert sum(short.residency().values()) <= BLOCK


def test_evict_skips_what_is_pinned_or_in_use(llm, hold_first):
    document = llm.document("Pinned, and then asked: such a document. " * 3)
    with document.pin():
        assert set(document.evict().values()) == {0}
        assert document.residency()["device"] == whole_blocks(document)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    hold_first(llm)
    with llm.generate([document.prompt_token_ids("Go on?")], long, stream=True) as stream:
        next(stream)
        document.evict()
        assert document.residency()["device"] == whole_blocks(document)
    llm.flush()
    assert document.evict()["device"] >= whole_blocks(document) - BLOCK
    assert sum(document.residency().values()) <= BLOCK


def test_releasing_a_pin_leaves_what_somebody_else_holds_on_disk(llm):
    def pinned():
        return llm.stats().tiers["disk"].pinned_blocks

    one, other = (llm.document("A document that two people pinned. " * 3) for _ in range(2))
    theirs = one.pin(persist=True)
    ours = other.pin(persist=True)
    ours.release()
    with other.pin(ttl=60):
        pass
    assert pinned() == theirs.num_blocks
    theirs.release()
    assert pinned() == 0
    one.pin(persist=True)
    assert other.unpin()  # whoever pinned it
    assert pinned() == 0


def test_a_pin_whose_time_is_over_is_not_held(llm, monkeypatch):
    document = llm.document("A document that is pinned for a while. " * 3)
    pin = document.pin(ttl=1000)
    assert document.pinned is pin
    clock = llm._core.store.pinning._clock
    monkeypatch.setattr(llm._core.store.pinning, "_clock", lambda: clock() + 1000)
    assert document.pinned is None
    assert repr(document).endswith(", not pinned)")
    assert repr(pin) == f"Pin(num_blocks={pin.num_blocks}, ended)"
    assert document.unpin()


@pytest.mark.parametrize("ttl", ["7d", True, 0, float("nan")])
def test_seconds_that_are_none_are_refused_before_the_document_is_read(llm, ttl):
    document = llm.document("A document that nobody reads. " * 3, prefill=False)
    with pytest.raises(ConfigError, match="ttl: expected a positive number of seconds, got"):
        document.pin(ttl=ttl)
    assert document.residency()["device"] <= BLOCK
    for wait in (llm.flush, llm.close, llm.start("Hello", SHORT).result):
        with pytest.raises(ConfigError, match="timeout: expected a number of seconds from 0 on"):
            wait("5")


def test_evict_of_a_document_that_only_disk_holds(llm):
    document = llm.document("A document that has left memory. " * 3)
    llm.reset_prefix_cache("device")
    assert document.residency() == {
        "device": 0, "host": 0, "disk": whole_blocks(document), "remote": 0,
    }  # fmt: skip
    freed = document.evict()
    assert freed["device"] == 0
    assert freed["disk"] >= whole_blocks(document) - BLOCK


def test_answers_about_a_document_are_streamed_as_prompts_are(llm):
    document = llm.document("A document of which answers come as they are made. " * 3)
    questions = ["Why?", "When?"]
    with document.ask(questions, SHORT, stream=True) as deltas:
        texts = dict.fromkeys(deltas.request_ids, "")
        for delta in deltas:
            texts[delta.request_id] += delta.outputs[0].text
            assert delta.num_cached_tokens >= whole_blocks(document)
    expected = [output.outputs[0].text for output in document.ask(questions, SHORT)]
    assert list(texts.values()) == expected
    assert (
        "".join(d.outputs[0].text for d in document.ask("Why?", SHORT, stream=True))
        == (expected[0])
    )
    with pytest.raises(ConfigError, match="a question is text"):
        document.ask("", stream=True)


def test_what_is_printed_of_a_document_is_one_line_without_its_text(llm):
    document = llm.document("A secret that nobody prints. " * 3)
    with document.pin() as pin:
        assert repr(document).startswith(f"Document(model={llm.config.model!r}, num_tokens=")
        assert repr(document).endswith(", pinned)")
        assert repr(pin) == f"Pin(num_blocks={pin.num_blocks}, held)"
    assert repr(document).endswith(", not pinned)")
    assert repr(pin) == f"Pin(num_blocks={pin.num_blocks}, released)"
    assert "secret" not in repr(document)
    assert repr(llm) == f"LLM(model={llm.config.model!r}, max_model_len=512, running)"


@contextmanager
def terminal() -> Iterator[list[str]]:
    """stderr is a terminal meanwhile; what was shown there is in the list at the end."""
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 100))
    seen, shown = bytearray(), []

    def read():
        with suppress(OSError):  # how a terminal says that nobody holds its other end
            while True:
                seen.extend(os.read(reader, 4096))

    thread = threading.Thread(target=read)
    thread.start()
    transformers.utils.logging.enable_progress_bar()
    with os.fdopen(writer, "w") as stderr, redirect_stderr(stderr):
        yield shown
    transformers.utils.logging.disable_progress_bar()
    thread.join()
    os.close(reader)
    shown.append(seen.decode())


def test_reading_a_long_document_shows_progress_on_a_terminal(llm, monkeypatch):
    bar, execute = transformers.utils.logging.tqdm, llm._core.runner.execute
    has_looked = threading.Event()

    def show(**settings):
        has_looked.set()
        return bar(**settings)

    def compute(steps):
        assert has_looked.wait(60)
        return execute(steps)

    monkeypatch.setattr(transformers.utils.logging, "tqdm", show)
    monkeypatch.setattr(llm._core.runner, "execute", compute)
    with terminal() as shown:
        document = llm.document("A long document. " * 20)
    assert "reading" in shown[0]
    assert f"{whole_blocks(document)}/{whole_blocks(document)}" in shown[0]
    with terminal() as shown:
        document.prefill()
    assert shown == [""]


def test_the_bar_of_answers_has_the_rate_and_the_hit_rate(llm):
    with terminal() as shown:
        llm.generate(["one", "two"], SamplingParams(n=2, max_tokens=2))
    assert "4/4" in shown[0]
    assert "tokens/s" in shown[0]
    assert "% of the prompts cached" in shown[0]
    with terminal() as shown:
        llm.generate(["three", "four"], SHORT, use_tqdm=False)
        list(llm.generate(["three", "four"], SHORT, stream=True))
        llm.generate("five", SHORT)
        llm.document("Short.").ask("Why?", SHORT)
    assert shown == [""]


def test_without_a_terminal_nothing_is_shown(llm, capfd):
    llm.generate(["one", "two"], SHORT)
    llm.document("A longer document, without a terminal. " * 8)
    assert capfd.readouterr() == ("", "")


def test_a_document_that_others_evict_before_it_is_pinned_is_read_again(llm, monkeypatch):
    document = llm.document("Evicted between reading and pinning. " * 3)
    look_up, num_left = document._lookup, 2

    def evict_after_reading():
        nonlocal num_left
        if num_left:
            num_left -= 1
            monkeypatch.setattr(document, "_lookup", look_up)
            document.evict()
            monkeypatch.setattr(document, "_lookup", evict_after_reading)
        return look_up()

    monkeypatch.setattr(document, "_lookup", evict_after_reading)
    with document.pin(persist=True) as pin:
        assert pin.num_blocks == whole_blocks(document) // BLOCK
    assert num_left == 0
    num_left = 100
    with pytest.raises(BlockMissingError):
        document.pin(persist=True)
    monkeypatch.undo()
    document.evict()
