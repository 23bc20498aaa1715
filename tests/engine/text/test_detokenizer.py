import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.model.source import resolve_model
from engine.text.detokenizer import Detokenizer

TEXTS = [
    "Hello world",
    "日本語のテキスト and more",
    "flags 🇩🇪🇯🇵, family 👨‍👩‍👧, skin 👍🏽!",
    "ñandú — ça va",
    " leading space, trailing space ",
    "\n\n\ttabs",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Every token is one byte of UTF-8, as in the worst case of a GPT-2 vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Words with a leading ▁ and, for what is not in the vocabulary, one token per byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


BYTE_FALLBACK = byte_fallback()


def bytes_as_tokens(tokenizer, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


def stream(tokenizer, token_ids, **arguments) -> tuple[Detokenizer, list[str]]:
    """All deltas of a sequence, up to a stop string if there is one."""
    detokenizer = Detokenizer(tokenizer, **arguments)
    deltas = []
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        deltas.append(detokenizer.take_delta())
        if stopped is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta(is_finished=True))
    return detokenizer, deltas


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_out_whole_from_single_bytes(text):
    tokenizer = byte_level()
    detokenizer, deltas = stream(tokenizer, tokenizer.encode(text))
    assert detokenizer.text == text
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_is_held_back_until_its_last_byte():
    tokenizer = byte_level()
    _, deltas = stream(tokenizer, tokenizer.encode("a👍b"))
    assert deltas == ["a", "", "", "", "👍", "b", ""]


@pytest.mark.parametrize("text", ["👍🏽", "日本", "é"])
def test_byte_fallback_characters_come_out_whole(text):
    tokenizer = byte_fallback()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    detokenizer, deltas = stream(tokenizer, [hello, *bytes_as_tokens(tokenizer, text), world])
    assert detokenizer.text == f"Hello{text} world"
    assert not any("\ufffd" in delta for delta in deltas)


def test_the_first_word_keeps_the_space_between_prompt_and_output():
    tokenizer = byte_fallback()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    detokenizer, _ = stream(tokenizer, [world], prompt_token_ids=[hello])
    assert detokenizer.text == " world"


def test_a_character_begun_in_the_prompt_does_not_disturb_the_output():
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("é")
    detokenizer, _ = stream(
        tokenizer, [*rest, *tokenizer.encode("tudes")], prompt_token_ids=[first]
    )
    assert detokenizer.text.endswith("tudes")


def test_special_tokens_are_not_text():
    tokenizer = byte_level()
    token_ids = [*tokenizer.encode("ab"), tokenizer.eos_token_id, *tokenizer.encode("c")]
    assert stream(tokenizer, token_ids)[0].text == "abc"
    assert stream(tokenizer, token_ids, skip_special_tokens=False)[0].text == "ab<|end|>c"


def test_many_special_tokens_do_not_lose_the_context_of_the_next_word():
    tokenizer = byte_fallback()
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁world"])
    token_ids = [hello, *[tokenizer.eos_token_id] * 20, world]
    assert stream(tokenizer, token_ids)[0].text == "Hello world"


def test_bytes_that_are_no_character_do_not_hold_the_text_for_ever():
    tokenizer = byte_level()
    continuation = tokenizer.encode("é")[1]
    detokenizer, deltas = stream(tokenizer, [continuation] * 40)
    assert len(detokenizer.text) == 40
    assert sum(map(bool, deltas)) > 3


def test_an_unfinished_character_at_the_end_is_shown_as_one():
    tokenizer = byte_level()
    detokenizer, _ = stream(tokenizer, tokenizer.encode("a👍")[:3])
    assert detokenizer.text == "a\ufffd"


def test_a_stop_string_across_tokens_ends_the_text_before_it():
    tokenizer = byte_level()
    detokenizer, deltas = stream(
        tokenizer, tokenizer.encode("one STOP two"), stop=["STOP", "absent"]
    )
    assert detokenizer.text == "one "
    assert detokenizer.stop_reason == "STOP"
    assert "".join(deltas) == "one "


def test_what_may_become_a_stop_string_is_not_delivered_before_it_cannot():
    tokenizer = byte_level()
    _, deltas = stream(tokenizer, tokenizer.encode("aSTxSTOP"), stop=["STOP"])
    assert deltas[:4] == ["a", "", "", "STx"]
    assert "".join(deltas) == "aSTx"


def test_the_stop_string_that_begins_first_ends_the_text():
    tokenizer = byte_level()
    detokenizer, _ = stream(tokenizer, tokenizer.encode("xabcd"), stop=["cd", "bcd", "zz"])
    assert detokenizer.text == "xa"
    assert detokenizer.stop_reason == "bcd"


def test_a_stop_string_is_not_looked_for_in_the_prompt():
    tokenizer = byte_level()
    detokenizer, _ = stream(
        tokenizer, tokenizer.encode("d text"), prompt_token_ids=tokenizer.encode("en"), stop=["end"]
    )
    assert detokenizer.text == "d text"
    assert detokenizer.stop_reason is None


@pytest.fixture(scope="module")
def demo_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(resolve_model("demo").path)


# Every kind of character, and often those that take several tokens or combine with others.
CHARACTERS = st.characters(exclude_categories=["Cs"])
ANY_TEXT = st.text(st.one_of(CHARACTERS, st.sampled_from("aé 日👩‍🇩\u0301\ufffd\n")), max_size=25)


def streamed(tokenizer, prompt: str, token_ids: list[int], stop: list[str]) -> str:
    """The text; that the deltas are its pieces, none of which is taken back, is checked on the way.
    The prompt's last tokens are what it is decoded behind."""
    ids = tokenizer.encode(prompt)
    detokenizer, deltas = stream(tokenizer, token_ids, prompt_token_ids=ids, stop=stop)
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text


@settings(max_examples=200)
@example(text="\U00040000\U00040000\u0a40", prompt="", data=None)  # behind bytes that are none
@given(text=ANY_TEXT, prompt=st.sampled_from(["", "Once", "Q: é", "日"]), data=st.data())
def test_any_text_comes_out_of_the_demo_tokenizer_whole(demo_tokenizer, text, prompt, data):
    token_ids = demo_tokenizer.encode(text)
    text = demo_tokenizer.decode(token_ids)  # the vocabulary lacks a few bytes of rare planes
    assert streamed(demo_tokenizer, prompt, token_ids, []) == text
    if text and data:
        start = data.draw(st.integers(0, len(text) - 1))
        stop = text[start : start + data.draw(st.integers(1, 6))]
        assert streamed(demo_tokenizer, prompt, token_ids, [stop]) == text[: text.index(stop)]


@settings(max_examples=100)
@given(words=st.lists(st.one_of(st.sampled_from(["▁Hello", "▁world", "b"]), ANY_TEXT), max_size=12))
def test_any_text_comes_out_of_byte_fallback_whole(words):
    tokenizer = BYTE_FALLBACK
    token_ids, expected = [], ""
    for word in words:
        is_piece = word in ("▁Hello", "▁world", "b")
        token_ids += (
            tokenizer.convert_tokens_to_ids([word])
            if is_piece
            else bytes_as_tokens(tokenizer, word)
        )
        expected += word.replace("▁", " ") if is_piece else word
    assert streamed(tokenizer, "b", token_ids, []) == expected
