"""The tokenizer of a model as one file that needs neither torch nor transformers to be read.

What transformers builds is not always what ``tokenizer.json`` of the checkpoint says, and a GGUF
file has none. So the engine names a file that says what it uses: the checkpoint's where that is the
same, else a copy beside the models in the user's cache directory, written once.
"""

import os
from pathlib import Path
from typing import Any

import xxhash

from kvstore.config import cache_home
from kvstore.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"


def keep_tokenizer(tokenizer: Any) -> Path | None:
    """A file that ``read_tokenizer`` makes the same tokenizer of; None when there can be none.

    ``tokenizer`` is transformers'. Never raises: without the file, texts are not shown.
    """
    try:
        text: str = tokenizer.backend_tokenizer.to_str(pretty=True)
    except AttributeError:
        return None  # a slow one, in Python
    try:
        own = Path(str(tokenizer.name_or_path), TOKENIZER_FILE)
        if own.is_file() and own.read_text(encoding="utf-8") == text:
            return own.absolute()
        data = text.encode()
        kept = cache_home() / "tokenizers" / xxhash.xxh3_128_hexdigest(data) / TOKENIZER_FILE
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial = kept.with_name(f"{kept.name}.{os.getpid()}")
            partial.write_bytes(data)
            partial.rename(kept)
    except (OSError, ConfigError, UnicodeError):
        return None
    return kept


def read_tokenizer(path: Path) -> Any:
    """A ``tokenizers.Tokenizer``. ``path`` is the file or the directory that holds it.

    Raises ``ConfigError``.
    """
    from tokenizers import Tokenizer

    try:
        file = path / TOKENIZER_FILE if path.is_dir() else path
        is_there = file.is_file()
    except OSError as error:  # of somebody else, say
        raise ConfigError(f"tokenizer {path}: cannot be read: {error.strerror}") from error
    if not is_there:
        raise ConfigError(f"tokenizer {path}: there is no {TOKENIZER_FILE}; pass another path")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # what the library raises has no type of its own
        raise ConfigError(f"tokenizer {file}: cannot be read: {error}") from error
