from dataclasses import replace

import pytest

from engine import LLM, SamplingParams
from engine.text.turn_template import TurnTemplate
from kvstore.errors import ConfigError

BRIEF = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(text_model):
    """Every byte is a token, so that texts say how many there are."""
    with LLM(text_model, dtype="float32", device_cache="8MiB", load_policy="always") as engine:
        yield engine
        assert engine.check() == []


def rendered(llm, messages):
    return llm.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def reusable(output):
    """Tokens in full blocks of what was computed; the newest token was not."""
    return (len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1) // 16 * 16


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_reuses_the_whole_history(llm, system):
    session = llm.session(system)
    last = session.ask("Who keeps bees in Oslo, and why?", BRIEF)
    for question in ("And who else?", "Since when?", "Thank you."):
        output = session.ask(question, BRIEF)
        assert output.num_cached_tokens == reusable(last) > len(last.prompt_token_ids)
        last = output


def test_an_answer_is_the_same_as_without_a_cache(llm, make_oracle, text_model):
    session, oracle = llm.session(), make_oracle(text_model)
    for question in ("Who?", "When?"):
        output = session.ask(question, BRIEF)
        oracle.assert_equal(output.prompt_token_ids, output.outputs[0].token_ids, 20)


@pytest.mark.parametrize("text", ["ja", "a <|im_end|> in a text", "  spaces  ", "ü€"])
def test_its_tokens_are_what_the_template_renders(llm, monkeypatch, text):
    """Where the model's own tokens are those of its text, which is so when every byte is one."""
    session = llm.session("Be brief.")
    answers = iter([("so", "length"), ("it is<|im_end|>", "stop")])
    run = llm._run

    def answer(requests, *, show_progress):
        (output,) = run(requests, show_progress=show_progress)
        said, reason = next(answers)
        sample = replace(
            output.outputs[0],
            token_ids=llm._reader.encode(said, is_template=True),
            text=said.removesuffix("<|im_end|>"),
            finish_reason=reason,
        )
        return [replace(output, outputs=[sample])]

    monkeypatch.setattr(llm, "_run", answer)
    for question in (text, "Go on."):
        session.ask(question, BRIEF)
    parts = rendered_apart(llm, session.messages)
    assert session.token_ids == [token_id for part in parts for token_id in part]
    if "<|" not in text:
        assert session.token_ids == rendered(llm, session.messages)


def rendered_apart(llm, messages):
    """The ChatML template by hand, with texts that hold no special tokens."""
    encode = llm._reader.encode
    for message in messages:
        yield encode(f"<|im_start|>{message['role']}\n", is_template=True)
        yield encode(message["content"])
        yield encode("<|im_end|>\n", is_template=True)


def test_a_fork_goes_on_with_the_same_past(llm):
    session = llm.session()
    first = session.ask("Who keeps bees in Oslo?", BRIEF)
    fork = session.fork()
    here, there = session.ask("Where?", BRIEF), fork.ask("When, and why?", BRIEF)
    assert here.num_cached_tokens >= reusable(first)
    assert there.num_cached_tokens >= reusable(first)
    assert [message["content"] for message in fork.messages][2] == "When, and why?"
    assert session.messages[:2] == fork.messages[:2]
    assert session.token_ids != fork.token_ids


def test_a_conversation_beyond_the_context_is_refused_with_numbers(llm):
    session = llm.session()
    session.ask("x" * 400, BRIEF)
    before = session.token_ids, session.messages
    with pytest.raises(ConfigError, match=r"has \d+ tokens, this turn adds \d+, .* 512: \d+ too"):
        session.ask("y" * 200)
    assert (session.token_ids, session.messages) == before


def test_a_session_goes_on_from_one_answer(llm):
    with pytest.raises(ConfigError, match="n: a session goes on from one answer"):
        llm.session().ask("Who?", SamplingParams(n=2))
    for text in (" ", 5, None):
        with pytest.raises(ConfigError, match="a question is text, and not empty"):
            llm.session().ask(text)
    with pytest.raises(ConfigError, match="sampling_params: expected"):
        llm.session().ask("Who?", {"max_tokens": 8})
    with pytest.raises(ConfigError, match="system: expected text"):
        llm.session(5)


def said(session):
    return session.messages, session.token_ids


def test_a_turn_that_was_read_to_its_end_is_as_one_that_was_waited_for(llm):
    streamed, waited = llm.session("Be brief."), llm.session("Be brief.")
    for question in ("Who keeps bees in Oslo?", "And since when?"):
        before = said(streamed)
        for delta in streamed.ask(question, BRIEF, stream=True):
            if not delta.finished:
                assert said(streamed) == before
        waited.ask(question, BRIEF)
        assert said(streamed) == said(waited)
    assert f"num_turns=2, num_tokens={len(waited.token_ids)})" in repr(waited)


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_turn_whose_stream_is_closed_early_stays_with_what_was_read(llm, is_forgotten):
    session = llm.session()
    stream = session.ask("Who keeps bees in Oslo?", replace(BRIEF, max_tokens=300), stream=True)
    read = [next(stream), next(stream)]
    if is_forgotten:
        del stream
    else:
        stream.close()
        assert list(stream) == []
    text = "".join(delta.outputs[0].text for delta in read)
    heard = [token_id for delta in read for token_id in delta.outputs[0].token_ids]
    assert [message["content"] for message in session.messages] == ["Who keeps bees in Oslo?", text]
    ending = llm._reader.encode("<|im_end|>\n", is_template=True)
    assert session.token_ids == read[0].prompt_token_ids + heard + ending
    session.ask("And since when?", BRIEF)
    assert len(session.messages) == 4
    assert llm.check() == []


def test_a_turn_of_which_nothing_was_read_is_undone(llm):
    session = llm.session("Be brief.")
    session.ask("Who?", BRIEF)
    before = said(session)
    session.ask("And when?", BRIEF, stream=True).close()
    assert said(session) == before
    with pytest.raises(ConfigError):
        session.ask(" ", stream=True)
    session.ask("And when?", BRIEF)


def test_a_turn_that_an_error_ended_is_undone(llm, monkeypatch):
    session, execute = llm.session(), llm._core.runner.execute
    stream = session.ask("Who?", replace(BRIEF, max_tokens=300), stream=True)
    next(stream)

    def fail(steps):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._core.runner, "execute", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(stream)
    monkeypatch.setattr(llm._core.runner, "execute", execute)
    assert session.messages == []
    session.ask("Who?", BRIEF)


def test_a_session_answers_one_question_at_a_time(llm):
    session = llm.session()
    with session.ask("Who?", replace(BRIEF, max_tokens=300), stream=True) as stream:
        next(stream)
        assert repr(session).endswith(", answering)")
        with pytest.raises(ConfigError, match="is answering already: read that stream"):
            session.ask("When?", BRIEF)
        session.fork().ask("When?", BRIEF)
    assert session.ask("When?", BRIEF).finished


def test_salted_sessions_share_nothing(llm):
    text = "Who keeps bees in Oslo, and why does he do it?"
    for salt in ("a", "b"):
        output = llm.session(cache_salt=salt).ask(text, BRIEF)
        assert output.num_cached_tokens == 0


STRIPPING = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_texts_are_stripped_where_the_template_strips_them(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", STRIPPING)
    assert TurnTemplate.of(llm._reader, None).strips_text
    session = llm.session()
    session.ask("  Who?  ", BRIEF)
    assert session.token_ids[: len("[user]Who?</s>[assistant]")] == llm._reader.encode(
        "[user]Who?</s>[assistant]"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "a session needs a model with a chat template"),
        ("{{ raise_exception('no system here') }}", "refuses the messages: no system here"),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "print each message once"),
    ],
)
def test_a_template_without_a_place_for_the_turns_is_refused(llm, monkeypatch, template, message):
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(ConfigError, match=message):
        llm.session("Be brief.")
