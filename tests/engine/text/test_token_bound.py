"""What a token stands for at most, and that a text beyond it is refused before it is tokenised."""

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.text.document_prompt import DocumentPrompt
from engine.text.prompts import PromptReader
from engine.text.token_bound import TokenBound
from kvstore.errors import ConfigError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LONG = "ab" * 8


def wrapped(inner: tokenizers.Tokenizer) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def byte_level(*, alphabet=BYTES, normalizer=None, splits=()) -> tokenizers.Tokenizer:
    names = [*alphabet, "ab", "abab", "abababab", LONG]
    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab"), ("abababab", "abababab")]
    inner = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def with_fallback(*, fallback=True) -> tokenizers.Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab"]
    inner = tokenizers.Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [("a", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=fallback,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return inner


FEW_BYTES = sorted(set(BYTES) - set("cz\u0100\u00c3\u00e1"))
TOKENIZERS = [
    byte_level(),
    byte_level(alphabet=FEW_BYTES),
    byte_level(normalizer=normalizers.NFC()),
    with_fallback(),
]


@given(text=st.text() | st.text("abcz\0é \u1fbe\u0308\u0301\u212a", max_size=60))
def test_a_text_has_never_fewer_tokens_than_the_bound_says(text):
    for inner in TOKENIZERS:
        num_tokens = len(inner.encode(text, add_special_tokens=False))
        assert TokenBound.of(wrapped(inner)).least_tokens(text) <= num_tokens


def test_the_bound_is_the_longest_token():
    assert TokenBound.of(wrapped(byte_level())) == TokenBound(len(LONG))
    known = TokenBound.of(wrapped(byte_level(alphabet=FEW_BYTES)))
    assert (known.most_bytes, sorted(known.dropped)) == (len(LONG), sorted(b"\0cz\xc3\xe1"))
    special = wrapped(byte_level())
    special.add_special_tokens({"additional_special_tokens": ["<|a very long one|>"]})
    assert TokenBound.of(special).most_bytes == len("<|a very long one|>")


def stripping() -> transformers.PreTrainedTokenizerFast:
    tokenizer = wrapped(byte_level())
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        wrapped(byte_level(alphabet=FEW_BYTES, normalizer=normalizers.NFC())),
        wrapped(byte_level(normalizer=normalizers.Strip())),
        wrapped(byte_level(splits=[pre_tokenizers.Split(" ", "removed")])),
        wrapped(with_fallback(fallback=False)),
        wrapped(tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))),
        stripping(),
        object(),
    ],
    ids=["a byte unknown", "strips", "removes", "fuses", "words", "takes spaces", "not fast"],
)
def test_there_is_no_bound_where_text_may_vanish(tokenizer):
    assert TokenBound.of(tokenizer) is None
    if isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        PromptReader(tokenizer, 2).check_length("x" * 10_000, "prompt")


class Unread(PromptReader):
    """Nothing may be tokenised."""

    @property
    def _encoding(self):
        raise AssertionError("tokenised")

    @_encoding.setter
    def _encoding(self, lock):
        pass


def test_a_text_far_too_long_is_refused_without_tokenising_it():
    """One text of many megabytes kept everybody else's prompt waiting for as many seconds."""
    tokenizer = wrapped(byte_level())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    reader = Unread(tokenizer, 10)
    text = "x" * (12 * len(LONG))
    problem = "has at least 12 tokens and the model's context is 10: cut at least 2 tokens"
    message = {"role": "user", "content": text}
    for read, what in (
        (lambda: reader.read(text), "prompt"),
        (lambda: reader.read_messages([message]), "prompt"),
        (lambda: reader.encode(text), "text"),
        (lambda: DocumentPrompt.of_text(reader, text), "document"),
        (
            lambda: DocumentPrompt.of_messages(reader, [message | {"content": text[:96]}] * 2),
            "document",
        ),
    ):
        with pytest.raises(ConfigError, match=f"the {what} {problem}"):
            read()


def test_a_text_is_read_whole_where_some_of_it_is_to_be_cut_or_left_out():
    tokenizer = wrapped(byte_level())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    reader = PromptReader(tokenizer, 10)
    text = "x" * (12 * len(LONG))
    assert len(reader.read(text, is_cut=True)[1]) == len(text)
    message = {"role": "user", "content": text}
    assert len(reader.read_messages([message], is_cut=True)) == len(text)
    spaces = {"role": "user", "content": " " * len(text) + "x"}
    assert len(reader.read_messages([spaces])) == 1
