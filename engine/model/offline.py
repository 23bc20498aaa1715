"""What an engine would do with a prompt, found out without loading the model.

The namespace follows from the model's files (``engine.model.identity``), the tokens from the
tokenizer and the template that an engine has left with the namespace, or that come with the model.
What only a running engine knows is None at first, and taken from the namespaces of the cache that
agree in all the rest. Needs neither torch nor transformers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.model.identity import expected_rope, model_identity, read_checkpoint
from engine.model.source import ModelSource, resolve_model
from engine.text.tokenizer_file import read_tokenizer
from kvstore.block import ITEMSIZE
from kvstore.config import expand_home
from kvstore.errors import ConfigError
from kvstore.hashing import namespace_id

_FALLBACK_DTYPE = "float32"


class OfflineModel:
    """Of one model and its settings, which mean what they mean to ``LLM``.

    identity   as ``engine.model.identity`` gives it; a dtype, code, or facts of deterministic mode
               that the files do not say are None
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        block_size: int = 16,
        max_model_len: int | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Raises ``ConfigError`` for a model that is not on this machine, or is none."""
        EngineConfig(block_size=block_size, max_model_len=max_model_len)  # refuses wrong ones
        if dtype != "auto" and dtype not in ITEMSIZE:
            raise ConfigError(f"dtype: expected auto, {', '.join(ITEMSIZE)}, got {dtype!r}")
        self.source: ModelSource = resolve_model(model, revision=revision, may_fetch=False)
        checkpoint = read_checkpoint(self.source, trust_remote_code=trust_remote_code)
        self.identity = model_identity(
            checkpoint,
            dtype=dtype if dtype != "auto" else checkpoint.dtype or "",
            block_size=block_size,
            frozen_rope=expected_rope(checkpoint.config, max_model_len),
        )
        for name in ("dtype", "modelling"):
            self.identity[name] = self.identity[name] or None
        self.identity["deterministic"] = None if deterministic else False
        self._tokenizer = tokenizer

    def candidates(self, registered: Mapping[bytes, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Whole identities that this model may have, those that are registered first."""
        known = {name: value for name, value in self.identity.items() if value is not None}
        found = []
        for namespace, description in registered.items():
            if all(description.get(name) == value for name, value in known.items()):
                identity = {name: description.get(name) for name in self.identity}
                is_deterministic = identity["deterministic"] is not False
                asks_for_it = self.identity["deterministic"] is None
                if is_deterministic == asks_for_it and namespace_id(identity) == namespace:
                    found.append(identity)
        guess = {"dtype": _FALLBACK_DTYPE, "modelling": "", "deterministic": {}} | known
        return found or [guess]

    def tokenizer(self, description: Mapping[str, Any]) -> Any:
        """The ``tokenizers.Tokenizer`` of a namespace with this description, or the model's own.

        Raises ``ConfigError`` when there is none.
        """
        stored = description.get("tokenizer")
        if self._tokenizer is not None:
            return read_tokenizer(expand_home(self._tokenizer))
        if isinstance(stored, str) and Path(stored).is_file():
            return read_tokenizer(Path(stored))
        if self.source.gguf_file is None:
            return read_tokenizer(self.source.path)
        raise ConfigError(
            f"model {self.source.name}: its tokenizer is known once an engine has used this cache "
            "with it; pass --tokenizer"
        )


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """As ``LLM.generate`` reads a text."""
    tokenizer.encode_special_tokens = False
    return list(tokenizer.encode(text).ids)


def document_tokens(tokenizer: Any, template: Sequence[str], text: str) -> list[int]:
    """What the questions about a document share, as ``LLM.document`` makes it."""
    tokenizer.encode_special_tokens = False
    before = tokenizer.encode(template[0], add_special_tokens=False).ids
    tokenizer.encode_special_tokens = True  # text that looks like a special token is text
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    tokenizer.encode_special_tokens = False
    return [*before, *ids]
