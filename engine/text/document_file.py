"""A document in a text file. Importable without torch, for the command."""

import os
from pathlib import Path

from kvstore.errors import ConfigError

_LONGEST_PATH = 1024


def names_a_file(text: str) -> bool:
    """Whether a text, which a document's is, is also the path of a file: likely a mistake."""
    if len(text) > _LONGEST_PATH or "\n" in text:
        return False
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def read_document(path: os.PathLike[str]) -> str:
    """A text file's content. Raises ``ConfigError`` in one line for what cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"document {path}: {error.strerror or error}; name a text file that can be read"
        ) from error
    except UnicodeDecodeError:
        raise ConfigError(f"document {path}: not UTF-8 text; convert it to plain text") from None
