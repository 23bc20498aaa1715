"""Text from prompts, fit to be shown: no character of it can do anything to the terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.config import expand_home
from kvstore.errors import ConfigError


def escape(text: str) -> str:
    """Line ends, escape sequences, text direction marks and the like as backslash escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shorten(text: str, width: int) -> str:
    """Escaped, and cut to ``width`` characters with an ellipsis."""
    shown = escape(text)
    return shown if len(shown) <= width else shown[: max(width - 1, 0)] + "…"


def check_text(text: str, what: str) -> None:
    """Raises ``ConfigError`` for bytes that are no UTF-8: lone surrogates, from shell or pipe."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _not_text(what) from None


def _not_text(what: str) -> ConfigError:
    return ConfigError(f"{what}: not UTF-8 text; convert it to UTF-8")


def read_stdin(what: str) -> str:
    """Text from a pipe. Raises ``ConfigError`` when it is none."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        raise _not_text(what) from None
    check_text(text, what)
    return text


class Reader:
    """Makes texts of token ids, with the tokenizer that an engine has left with a namespace, or
    with the one that the user names. Without either, there are no texts."""

    def __init__(self, tokenizer: str | None = None) -> None:
        """Raises ``ConfigError`` for a tokenizer that cannot be read."""
        self._loaded: dict[str, Any] = {}
        self._given = tokenizer
        if tokenizer is not None:
            self._load(tokenizer)

    def read(self, description: Mapping[str, Any], token_ids: Sequence[int]) -> str | None:
        """The text of tokens of a namespace that was registered so."""
        name = self._given or description.get("tokenizer")
        if not isinstance(name, str):
            return None
        try:
            tokenizer = self._load(name)
        except ConfigError:  # the file has gone: no texts, everything else
            tokenizer = self._loaded[name] = None
        if tokenizer is None:
            return None
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    def _load(self, name: str) -> Any:
        if name not in self._loaded:
            from engine.text.tokenizer_file import read_tokenizer

            self._loaded[name] = read_tokenizer(expand_home(name))
        return self._loaded[name]
