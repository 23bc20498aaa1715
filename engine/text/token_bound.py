"""How much text a token can stand for, so that a text that is far too long is refused unread.

Tokenising takes about a second a megabyte, and whoever comes next waits for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.text.token_utf8 import BYTE_OF_LETTER

# Composed characters stand for at most 3.5 times as many bytes: U+1FBE with two accents is U+0390.
_COMPOSED = 4
_NOT_IN_TEXT = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])  # bytes that UTF-8 has no use for
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """most_bytes   of text, as UTF-8, that one token stands for
    dropped      bytes that the tokenizer does not know and leaves out
    """

    most_bytes: int
    dropped: bytes = b""

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenBound | None":
        """None where a token may stand for any number of bytes, as for an unknown word, and where
        more is left out than single bytes."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        description = json.loads(backend.to_str())
        model, added = description["model"], description["added_tokens"]
        normalizers = _steps(description["normalizer"], "normalizers")
        splits = _steps(description["pre_tokenizer"], "pretokenizers")
        keeps_bytes = (
            model["type"] == "BPE"
            and all(map(_keeps_all, normalizers))
            and all(map(_keeps_text, splits))
            and not any(token["lstrip"] or token["rstrip"] for token in added)
        )
        if not keeps_bytes:
            return None
        vocab: Mapping[str, int] = model["vocab"]
        composes = {"type": "NFC"} in normalizers
        if any(each["type"] == "ByteLevel" for each in splits):
            dropped = bytes(byte for letter, byte in BYTE_OF_LETTER.items() if letter not in vocab)
            if composes and not _NOT_IN_TEXT.issuperset(dropped):
                return None  # which ones it composes is not known
            longest = max(map(len, vocab))
        elif model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            dropped, longest = b"", max(map(_num_bytes, vocab))
        else:
            return None
        longest = max([longest, *(_num_bytes(token["content"]) for token in added)])
        return cls(longest * (_COMPOSED if composes else 1), dropped)

    def least_tokens(self, text: str) -> int:
        """As many tokens as the text has at least."""
        num_bytes = len(text.encode().translate(None, self.dropped))
        return -(-num_bytes // self.most_bytes)


def _steps(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for each in step[name] for inner in _steps(each, name)]


def _keeps_all(normalizer: Mapping[str, Any]) -> bool:
    return normalizer["type"] in ("NFC", "Prepend") or normalizer == _SPACE


def _keeps_text(split: Mapping[str, Any]) -> bool:
    kind = split["type"]
    is_split = kind == "Split" and split["behavior"] != "Removed"
    return is_split or kind in ("ByteLevel", "Metaspace", "Digits")


def _num_bytes(text: str) -> int:
    return len(text.encode())
