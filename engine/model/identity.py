"""What makes two models the same for the cache: KV blocks of one are right for the other.

Everything that changes K or V beyond rounding, or how a block lays them out, is part of the
identity; the path or name of the model is not, nor, but in deterministic mode, are the device, the
chunk size and thread counts. A changed model therefore can only miss.

The identity follows from the files alone, so that ``kvstore why`` finds the namespace of a prompt
in a tenth of the time that loading the model takes. Needs neither torch nor transformers. Where the
loaded model knows better (its dtype, what was frozen, where its class stands), the engine says so;
``Checkpoint`` has the same from the files.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.model.source import ModelSource
from engine.model.weights import digest_tensors, gguf_tensors, read_weights
from kvstore.block import LAYOUT_VERSION
from kvstore.errors import ConfigError

# Facts about the file or the run, not about the model.
_IGNORED_CONFIG = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)

FrozenRope = Mapping[str, list[str | int]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a model's files say of it.

    config      ``config.json``, or what a GGUF file says of the model
    weights     digest of every tensor (``engine.model.weights``)
    modelling   digest of the code that computes it (``modelling_digest``), empty where the code is
                another repository's: only the loaded class tells then
    loader      what turns the file into tensors, where that is more than copying; else empty
    dtype       what dtype="auto" means, None where the files do not say
    """

    config: Mapping[str, Any]
    weights: str
    modelling: str
    loader: str = ""
    dtype: str | None = None

    @property
    def context_len(self) -> int | None:
        """Positions that the model was trained for, None where the files do not say."""
        found = _text_config(self.config).get("max_position_embeddings")
        return found if isinstance(found, int) else None


def read_checkpoint(source: ModelSource, *, trust_remote_code: bool = False) -> Checkpoint:
    """As ``engine.model.weights`` reads it. Raises ``ConfigError`` for files that are no model."""
    if source.gguf_file is not None:
        return _read_gguf(source.path / source.gguf_file)
    file = source.path / "config.json"
    try:
        config = json.loads(file.read_bytes())
        text_config = _text_config(config)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {source.name}: {file} cannot be read: {error}") from error
    named = config.get("transformers_weights")
    weights = read_weights(source.path, named if isinstance(named, str) else None)
    dtypes = (config.get(name) for name in ("dtype", "torch_dtype"))
    dtype = next((each for each in dtypes if isinstance(each, str)), None)
    own_code = config.get("auto_map") if trust_remote_code else None
    if own_code is None:
        modelling = modelling_digest(modelling_folder(str(text_config.get("model_type"))))
    elif "--" in str(own_code):  # owner/name--file.Class
        modelling = ""
    else:
        modelling = modelling_digest(source.path, "*.py")
    return Checkpoint(
        config=config,
        weights=weights.digest,
        modelling=modelling,
        dtype=(dtype or weights.dtype or "").removeprefix("torch.") or None,
    )


def model_identity(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    block_size: int,
    frozen_rope: FrozenRope,
    modelling: str | None = None,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields whose digest is the namespace of the model's blocks.

    ``frozen_rope`` is what ``engine.model.rope.freeze_rope`` returned, or ``expected_rope``;
    ``modelling`` replaces the checkpoint's where it is not empty; ``run`` is how the model is run
    where that matters, in deterministic mode (``engine.runner.determinism.run_identity``).
    """
    return {
        "block_size": block_size,
        "config": config_digest(checkpoint.config),
        "deterministic": dict(run) if run is not None else False,
        "dtype": dtype,
        "frozen_rope": dict(frozen_rope),
        "layout_version": LAYOUT_VERSION,
        "loader": checkpoint.loader,
        "modelling": modelling or checkpoint.modelling,
        "rope": dict(_rope_fields(checkpoint.config)),
        "weights": checkpoint.weights,
    }


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a model's config, nested ones included, but for what ``model_identity`` names."""
    text = json.dumps(_without_ignored(config), sort_keys=True, default=str)
    return sha256(text.encode()).hexdigest()


def _without_ignored(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        name: _without_ignored(field)
        for name, field in value.items()
        if name not in _IGNORED_CONFIG and not str(name).startswith(("_", "rope_"))
    }


def _rope_fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What the config says of rotary frequencies, apart: a difference there has a name then."""
    for name, field in config.items():
        if name.startswith("rope_"):
            yield f"{prefix}{name}", field
        elif isinstance(field, Mapping):
            yield from _rope_fields(field, f"{prefix}{name}.")


# ---- the code ----------------------------------------------------------------------------------


def modelling_folder(model_type: str) -> Path:
    """Where transformers keeps the code of a model type. Does not import transformers."""
    models = _transformers() / "models"
    folder = model_type.replace("-", "_")
    while folder:
        if any((models / folder).glob("modeling_*.py")):
            return models / folder
        folder = folder.rpartition("_")[0]  # gemma3_text stands with gemma3
    return models / "auto"  # of a kind we do not know: changes with every release


def modelling_digest(folder: Path, *patterns: str) -> str:
    """Digest of the code in ``folder`` that computes a model, and of what all models share.

    A new release may compute something else, or have other defaults for what a config leaves out.
    """
    patterns = patterns or ("modeling_*.py", "configuration_*.py")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    digest = sha256()
    for file in [*files, _transformers() / "modeling_rope_utils.py"]:
        digest.update(file.name.encode() + b"\0" + sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def class_digest(model_class: type, checkpoint: Checkpoint | None) -> str:
    """Digest of the code of a loaded model; empty where the checkpoint knows its own."""
    folder = Path(inspect.getsourcefile(model_class) or "").parent
    if _transformers() in folder.parents:
        return modelling_digest(folder)
    is_known = checkpoint is None or checkpoint.modelling
    return "" if is_known else modelling_digest(folder, "*.py")


def _transformers() -> Path:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigError("transformers is not installed: pip install transformers")
    return Path(spec.origin).parent


# ---- rotary frequencies ------------------------------------------------------------------------


def expected_rope(config: Mapping[str, Any], max_model_len: int | None) -> FrozenRope:
    """What ``engine.model.rope.freeze_rope`` will return for a model with this config."""
    text_config = _text_config(config)
    trained = int(text_config.get("max_position_embeddings") or 0)
    length = max_model_len or trained
    frozen: dict[str, list[str | int]] = {}
    for layer_type, parameters in _rope_parameters(text_config):
        rope_type = parameters.get("rope_type", parameters.get("type"))
        if rope_type == "dynamic":
            frozen[layer_type] = [rope_type, max(length, trained)]
        elif rope_type == "longrope":
            name = "original_max_position_embeddings"
            short = parameters.get(name) or text_config.get(name) or trained
            frozen[layer_type] = [rope_type, "long" if length > short else "short"]
    return frozen


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _rope_parameters(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, Mapping):
            continue
        by_layer = {kind: each for kind, each in given.items() if isinstance(each, Mapping)}
        yield from by_layer.items() if by_layer else [("", given)]
        return


# ---- GGUF --------------------------------------------------------------------------------------


def _read_gguf(file: Path) -> Checkpoint:
    """transformers translates names, dequantises and picks the class by code of its own: its
    version, and that of the reader, stand for all of it."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {
            name: sha256(b"".join(part.tobytes() for part in field.parts)).hexdigest()
            for name, field in reader.fields.items()
            if not name.startswith(("tokenizer.", "GGUF."))
        }
        texts = (reader.fields.get(f"general.{name}") for name in ("architecture", "name"))
        architecture, name = (str(text.contents()) if text else "" for text in texts)
        weights = digest_tensors(gguf_tensors(reader, file))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"model {file}: not a GGUF file that can be read: {error}") from error
    if "llama" in architecture and "mistral" in name.lower():
        architecture = "mistral"
    return Checkpoint(
        config=fields,
        weights=weights,
        modelling=modelling_digest(_gguf_folder(architecture)),
        loader=f"transformers {version('transformers')}, gguf {version('gguf')}",
        dtype=None,
    )


def _gguf_folder(architecture: str) -> Path:
    """llama.cpp writes qwen2moe and gpt-oss, transformers qwen2_moe and gpt_oss."""
    wanted = re.sub("[^a-z0-9]", "", architecture)
    for folder in sorted((_transformers() / "models").iterdir()):
        if folder.name.replace("_", "") == wanted:
            return folder
    return modelling_folder(architecture)
