"""The demo model in float32: greedy answers equal transformers', cold and from every tier."""

import pytest

from engine import LLM, SamplingParams
from engine.model.source import resolve_model
from kvstore.errors import CapacityError, ConfigError

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SHORT = SamplingParams(temperature=0.0, max_tokens=6)
FACT = "Mr. Adams keeps bees in Oslo and sells honey to his neighbours on Fridays. "
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a king who",
    "def fibonacci(n):\n    ",
    "Note. " + FACT * 4 + "On which day is honey sold?",
    "Story. " + FACT * 11 + "Who keeps bees?",
    "List three colours, separated by commas:",
    FACT * 24 + "In which city does Mr. Adams live?",
]


@pytest.fixture(scope="module")
def demo_llm(tmp_path_factory):
    settings = {
        "dtype": "float32",
        "max_model_len": 640,
        "device_cache": "32MiB",  # one sequence: what other prompts use pushes blocks out
        "host_cache": "64MiB",
        "disk_cache": tmp_path_factory.mktemp("cache"),
        "load_policy": "always",
        "max_num_batched_tokens": 256,
    }
    with LLM("demo", **settings) as llm:
        yield llm
        assert llm.check() == []


@pytest.fixture(scope="module")
def demo_oracle(make_oracle):
    return make_oracle(resolve_model("demo").path)


def test_greedy_answers_equal_transformers_cold_and_from_every_tier(demo_llm, demo_oracle):
    ids = [demo_llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert len({len(prompt) for prompt in ids}) >= 6
    served = []
    for forget in (None, None, "device", ("device", "host")):
        for tier in (forget,) if isinstance(forget, str) else forget or ():
            demo_llm.reset_prefix_cache(tier)
        outputs = demo_llm.generate(PROMPTS, SHORT, use_tqdm=False)
        for prompt, output in zip(ids, outputs, strict=True):
            assert output.prompt_token_ids == prompt
            demo_oracle.assert_equal(prompt, output.outputs[0].token_ids, max_tokens=6)
        served.append(
            {tier for output in outputs for tier, n in output.metrics.cached_tokens.items() if n}
        )
    assert served[0] == set()
    assert "device" in served[1]
    assert "host" in served[1] | served[2]
    assert "disk" in served[3]


def test_text_is_decoded_whole_and_ends_before_a_stop_string(demo_llm):
    (free,) = demo_llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12))
    text = free.outputs[0].text
    assert text == demo_llm.tokenizer.decode(free.outputs[0].token_ids, skip_special_tokens=True)
    stop = text[5:8]
    (stopped,) = demo_llm.generate(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, stop=[stop])
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop


def test_logprobs_name_the_sampled_token_first(demo_llm):
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    (output,) = demo_llm.generate(PROMPTS[0], params)
    sample = output.outputs[0]
    assert len(sample.logprobs) == len(sample.token_ids)
    for token_id, named in zip(sample.token_ids, sample.logprobs, strict=True):
        assert named[token_id].logprob == max(each.logprob for each in named.values())
        assert named[token_id].decoded_token == demo_llm.tokenizer.decode([token_id])


def test_a_document_is_read_once_and_its_questions_share_it(demo_llm):
    text = FACT * 20 + "The bees live in nine hives. "
    document = demo_llm.document(text)
    assert document.residency()["device"] == document.num_tokens // 16 * 16
    first = document.ask("How many hives are there?")
    second, third = document.ask(["Who keeps bees?", "On which day is honey sold?"])
    for answer in (first, second, third):
        assert answer.num_cached_tokens >= document.num_tokens // 16 * 16
        assert (
            answer.metrics.computed_tokens
            <= 16 + len(answer.prompt_token_ids) - document.num_tokens
        )
    assert first.outputs[0].text


def test_a_documents_text_is_never_read_as_a_special_token(demo_llm):
    plain = demo_llm.document("A quiet text.", prefill=False)
    sly = demo_llm.document("A <|im_end|> text.", prefill=False)
    end = demo_llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sly.prompt_token_ids("Why?").count(end) == plain.prompt_token_ids("Why?").count(end)


def test_no_token_crosses_the_border_of_document_and_question(demo_llm):
    document = demo_llm.document(FACT, prefill=False)
    one, two = document.prompt_token_ids("Who?"), document.prompt_token_ids("What now?")
    assert one[: document.num_tokens] == two[: document.num_tokens]
    assert FACT in demo_llm.tokenizer.decode(one)


def test_chat_answers_a_conversation(demo_llm):
    messages = [{"role": "user", "content": "Say hello."}]
    (output,) = demo_llm.chat(messages, GREEDY)
    (again,) = demo_llm.chat([messages], GREEDY)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    assert demo_llm.chat(parts, GREEDY)[0].prompt_token_ids == output.prompt_token_ids
    for wrong in ([{"rol": "user"}], [{"role": "user", "content": 5}], ["hello"]):
        with pytest.raises(ConfigError, match="a message is a dictionary"):
            demo_llm.chat([wrong], GREEDY)
    for wrong, problem in (
        ("Hello", r"^chat\(\) takes a list of messages, .* got 'Hello'"),
        (messages[0], r"^chat\(\) takes a list of messages"),
        ([{**messages[0], "role": "robot"}], r"^role: expected system, .* got 'robot'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            demo_llm.chat(wrong, GREEDY)
    with pytest.raises(ConfigError, match=r"messages are for chat\(\)"):
        demo_llm.generate(messages, GREEDY)
    assert output.outputs[0].token_ids == again.outputs[0].token_ids
    assert output.outputs[0].text.strip()


def test_a_pinned_document_stays_in_memory_and_a_warmed_one_comes_back(demo_llm):
    pinned = demo_llm.document("Pinned. " + FACT * 6, pin=True)
    with demo_llm.document("Long. " + FACT * 24).pin() as held:
        assert held.num_blocks > 0
        with pytest.raises(CapacityError, match="at most half"):
            demo_llm.document("Too much. " + FACT * 24).pin()
    found = pinned.residency()
    assert found["device"] + found["host"] == pinned.num_tokens // 16 * 16
    again = pinned.pin()
    assert pinned.pinned is again
    again.release()
    assert pinned.pinned is None
    assert pinned.unpin()
    assert not pinned.unpin()
    assert demo_llm.stats().tiers["device"].pinned_blocks == 0
    demo_llm.reset_prefix_cache("device")
    demo_llm.reset_prefix_cache("host")
    pinned.warm()
    assert demo_llm._core.wait_for(lambda: demo_llm._core.store.num_pending == 0, timeout=60)
    assert pinned.residency()["device"] == pinned.num_tokens // 16 * 16


def test_a_document_pinned_on_disk_is_not_cleared_and_can_be_unpinned_by_name(demo_llm):
    text = "Kept. " + FACT * 6
    document = demo_llm.document(text, ttl=1000.0)
    num_blocks = document.num_tokens // 16
    assert document.pinned.num_blocks == num_blocks
    assert demo_llm.stats().tiers["disk"].pinned_blocks == num_blocks
    assert demo_llm.reset_prefix_cache() == num_blocks
    assert document.residency()["disk"] == 16 * num_blocks
    answer = document.ask("Why?", GREEDY)
    assert answer.metrics.cached_tokens["disk"] >= 16 * num_blocks
    again = demo_llm.document(text, prefill=False)
    assert again.unpin()
    assert not again.unpin()
    assert demo_llm.stats().tiers["disk"].pinned_blocks == 0
    with document.pin(persist=True):
        assert demo_llm.stats().tiers["disk"].pinned_blocks == num_blocks
    assert demo_llm.stats().tiers["disk"].pinned_blocks == 0


def test_a_session_has_the_tokens_that_the_chat_template_renders(demo_llm):
    session = demo_llm.session()
    for question in ("Name a colour.", "And another one?"):
        session.ask(question, GREEDY)
    rendered = demo_llm.tokenizer.apply_chat_template(
        session.messages, tokenize=True, return_dict=False
    )
    assert session.token_ids == rendered
