"""What makes two models the same for the cache: KV blocks of one are right for the other.

Everything that changes K or V beyond rounding, or how a block lays them out, is part of the
identity; the path or name of the model is not, nor, but in deterministic mode, are the device, the
chunk size and thread counts. A changed model therefore can only miss.
"""

import inspect
import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import xxhash

from kvstore.block import LAYOUT_VERSION, BlockLayout

# A model up to this size is read in full: a tenth of a second per GiB.
FULL_BYTES = 1 << 30
# Of a larger model, tensors larger than this are sampled: runs spread evenly from the first byte to
# the last. A 70B model is 3 GB of samples.
SAMPLE_BYTES = 4 << 20
NUM_RUNS = 64

# Facts about the file or the run, not about the model.
_IGNORED_CONFIG = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def model_identity(
    model: torch.nn.Module,
    layout: BlockLayout,
    *,
    windows: Iterable[int | None],
    frozen_rope: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields whose digest is the namespace of the model's blocks.

    ``model`` is a transformers model with its weights loaded; ``frozen_rope`` is what
    ``engine.rope.freeze_rope`` returned; ``run`` is how the model is run where that matters, in
    deterministic mode (``engine.determinism.run_identity``).
    """
    return {
        "architecture": type(model).__name__,
        "block_size": layout.block_size,
        "config": config_digest(model.config),
        "deterministic": dict(run) if run is not None else False,
        "dtype": layout.dtype,
        "frozen_rope": dict(frozen_rope),
        "layout_version": LAYOUT_VERSION,
        "modelling": modelling_digest(type(model)),
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "weights": weights_digest(model),
        "windows": list(windows),
    }


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of every tensor of the state dict: name, shape, dtype and sampled bytes.

    The state dict, because what it leaves out (rope frequencies) is computed, and not bit for bit
    alike on every device.

    Taken from the tensors as loaded, so that it does not depend on the file they came from. Sees
    every change of a model of up to ``FULL_BYTES``, and of a larger one every change of a tensor of
    up to ``SAMPLE_BYTES``; of larger tensors it sees ``NUM_RUNS`` runs of ``SAMPLE_BYTES /
    NUM_RUNS`` bytes, the first and the last among them.
    """
    tensors = model.state_dict()
    is_small = sum(tensor.nbytes for tensor in tensors.values()) <= FULL_BYTES
    digest = sha256()
    for name, tensor in sorted(tensors.items()):
        header = f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode()
        sample = _bytes_of(tensor, tensor.nbytes if is_small else SAMPLE_BYTES)
        digest.update(header + xxhash.xxh3_128_digest(sample))
    return digest.hexdigest()


def config_digest(config: Any) -> str:
    """Digest of a transformers config, rope parameters and nested configs included."""
    fields = _without_ignored(config.to_dict())
    return sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _without_ignored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: _without_ignored(field)
        for name, field in value.items()
        if name not in _IGNORED_CONFIG and not str(name).startswith("_")
    }


def modelling_digest(model_class: type) -> str:
    """Digest of the file that defines the model: a new release may compute something else."""
    source = inspect.getsourcefile(model_class)
    return sha256(Path(source).read_bytes()).hexdigest() if source else model_class.__qualname__


@torch.inference_mode()
def _bytes_of(tensor: torch.Tensor, most: int) -> memoryview:
    """All bytes of the tensor, or about ``most`` of them when it has more."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.contiguous().flatten().view(torch.uint8)
    if flat.numel() > most:
        run = most // NUM_RUNS
        last = flat.numel() - run
        starts = [last * i // (NUM_RUNS - 1) for i in range(NUM_RUNS)]
        flat = torch.cat([flat[start : start + run] for start in starts])
    return flat.cpu().numpy().data
