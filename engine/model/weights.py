"""Digests of the weights in a checkpoint's files, without loading them.

    *.safetensors        every tensor: name, dtype, shape, and its bytes
    pytorch_model*.bin   every entry of the zip archive that torch writes: name, size, and its bytes
    *.gguf               every tensor: name, type, shape, and its bytes as they are packed

The bytes of a tensor are read in full where the model is small, else sampled: runs spread evenly
from the first byte to the last. Names and order of the files do not count, so a checkpoint that is
cut into other shards is the same one. Which of several files counts is what transformers would
load. Needs neither torch nor transformers.
"""

import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from kvstore.errors import ConfigError

# A model up to this size is read in full: a tenth of a second per GiB.
FULL_BYTES = 1 << 30
# Of a larger model, tensors larger than this are sampled. A 70B model is 3 GB of samples.
SAMPLE_BYTES = 4 << 20
NUM_RUNS = 64

_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20  # what the safetensors library takes
_INDEX = ".index.json"  # of shards: which tensor lies in which
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip entry: its end says how long the rest is
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Bytes [start, start + nbytes) of a file, and what they are."""

    name: str
    kind: str  # dtype and shape, as the format says them
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """``dtype`` is the first tensor's that is floating point, None where the files do not say."""

    digest: str
    dtype: str | None


def read_weights(directory: Path, name: str | None = None) -> Weights:
    """Of the checkpoint in ``directory``, in the file or index ``name`` where its config has one.

    Raises ``ConfigError`` when it has none, or a bad one.
    """
    files = _weight_files(directory, name)
    if not files:
        raise ConfigError(
            f"model {directory}: not a causal language model that transformers can load: it has no "
            "weights (model.safetensors or pytorch_model.bin)"
        )
    try:
        tensors = [tensor for file in files for tensor in _tensors(file)]
        kinds = (tensor.kind.partition(" ")[0] for tensor in tensors)
        dtype = next((_FLOATS[kind] for kind in kinds if kind in _FLOATS), None)
        return Weights(digest_tensors(tensors), dtype)
    except (OSError, ValueError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"model {directory}: not a causal language model that can be read: {error}; "
            "download it again"
        ) from error


def gguf_tensors(reader: Any, file: Path) -> list[StoredTensor]:
    """Of a ``gguf.GGUFReader`` of ``file``."""
    return [
        StoredTensor(
            tensor.name,
            f"{tensor.tensor_type.name} {tensor.shape.tolist()}",
            file,
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    ]


def digest_tensors(tensors: Iterable[StoredTensor]) -> str:
    """Sees every change of a model of up to ``FULL_BYTES``, and of a larger one every change of a
    tensor of up to ``SAMPLE_BYTES``; of larger tensors ``NUM_RUNS`` runs of ``SAMPLE_BYTES /
    NUM_RUNS`` bytes, the first and the last among them."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.name, tensor.kind))
    is_small = sum(tensor.nbytes for tensor in ordered) <= FULL_BYTES
    digest = sha256()
    with _Files() as files:
        for tensor in ordered:
            digest.update(f"{tensor.name} {tensor.kind}\0".encode())
            runs = [(0, tensor.nbytes)] if is_small else _runs(tensor.nbytes)
            hasher = xxhash.xxh3_128()
            for start, length in runs:
                files.feed(hasher, tensor.file, tensor.start + start, length)
            digest.update(hasher.digest())
    return digest.hexdigest()


def _runs(nbytes: int) -> list[tuple[int, int]]:
    if nbytes <= SAMPLE_BYTES:
        return [(0, nbytes)]
    length = SAMPLE_BYTES // NUM_RUNS
    last = nbytes - length
    return [(last * i // (NUM_RUNS - 1), length) for i in range(NUM_RUNS)]


class _Files:
    """Open files, each once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def feed(self, hasher: Any, file: Path, start: int, length: int) -> None:
        fd = self._open.get(file)
        if fd is None:
            fd = self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        while length > 0:
            data = os.pread(fd, min(length, _CHUNK_BYTES), start)
            if not data:
                raise ValueError(f"{file.name} ends too early")
            hasher.update(data)
            start, length = start + len(data), length - len(data)

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)


def _weight_files(directory: Path, name: str | None) -> list[Path]:
    """What transformers loads, first found first."""
    singles = ("model.safetensors", "pytorch_model.bin")
    names = [name] if name else [f"{each}{end}" for each in singles for end in ("", _INDEX)]
    file = next((directory / each for each in names if (directory / each).is_file()), None)
    if file is None:
        return []
    if not file.name.endswith(_INDEX):
        return [file]
    try:
        shards = sorted(set(json.loads(file.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model {directory}: {file.name} cannot be read") from error
    return [directory / shard for shard in shards]


def _tensors(file: Path) -> Iterator[StoredTensor]:
    if file.suffix == ".safetensors":
        yield from _safetensors(file)
    elif zipfile.is_zipfile(file):
        yield from _archive(file)
    else:  # an old pickle, which does not say where its tensors are: all of it is one
        yield StoredTensor(file.name, "pickle", file, 0, file.stat().st_size)


def _safetensors(file: Path) -> Iterator[StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if not 2 <= header_bytes <= min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(opened.read(header_bytes))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        kind = f"{entry['dtype']} {entry['shape']}"
        yield StoredTensor(name, kind, file, 8 + header_bytes + begin, end - begin)


def _archive(file: Path) -> Iterator[StoredTensor]:
    """Entries are stored, not compressed; ``data.pkl`` says which tensor lies in which."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as opened:
        for entry in archive.infolist():
            opened.seek(entry.header_offset)
            name_bytes, extra_bytes = _LOCAL_HEADER.unpack(opened.read(_LOCAL_HEADER.size))
            start = entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            name = entry.filename.partition("/")[2]  # the folder is called as the file was
            kind = f"{entry.compress_type} {entry.file_size} {entry.CRC}"
            yield StoredTensor(name, kind, file, start, entry.compress_size)
