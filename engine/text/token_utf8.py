"""A token as UTF-8: where it is a part of a character, its text alone does not say which."""

import re
from typing import Any

# How byte-level vocabularies write bytes: printable ones as Latin-1, the others from U+0100 on.
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_LETTER = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + number): byte
    for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def token_utf8(tokenizer: Any, token_id: int, text: str) -> bytes:
    """Of a token whose text on its own is ``text``; put together, those of an answer are UTF-8."""
    if _REPLACEMENT not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes.fromhex(fallback[1])
    if all(letter in BYTE_OF_LETTER for letter in piece):
        return bytes(BYTE_OF_LETTER[letter] for letter in piece)
    return text.encode()
