import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.text.token_utf8 import token_utf8

TEXT = "ñandú — 日本 🇩🇪, <|end|> and \ufffd"


def of_bytes() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", extra_special_tokens=["\ufffd"]
    )


def of_characters() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"andú ,", "\ufffd"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("make", [of_bytes, of_characters])
def test_bytes_of_tokens_together_are_the_text(make):
    tokenizer = make()
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    parts = [token_utf8(tokenizer, each, tokenizer.decode([each])) for each in token_ids]
    assert b"".join(parts).decode() == TEXT
    assert len(parts) > len(TEXT) - len("<|end|>")  # some characters are of several tokens
