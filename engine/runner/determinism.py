"""Deterministic mode: logits have the same bits whether their prefix was computed or loaded.

A matrix product rounds differently with its number of rows, and a sum with the length of what it is
taken over. So where the mode is on, no shape depends on what else runs, or on what was cached:

    prefill   a prompt is computed in chunks that begin at multiples of ``chunk_tokens``, each a
              forward of its own, padded to that many tokens
    decode    ``decode_rows`` sequences a forward, the last one padded; each attends on its own
    reuse     whole chunks of prompts, nothing smaller and nothing that was decoded
    threads   as many as there were when the model was loaded

What a chunk's blocks hold then depends on the tokens before its end alone, and on what
``run_identity`` names, which is part of the namespace. docs/determinism.md says what it costs.
"""

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernels import reference

# Larger chunks compute a prompt faster, smaller ones leave less to be computed again behind a
# cached prefix. On a CPU a prompt takes 3 % longer in chunks of 256 than in chunks of 2,048; in
# chunks of 128 it takes 22 % longer, and a question saves a quarter, which pays after 16 of them.
# On a GPU a forward of a thousand tokens hardly takes longer than one of a hundred (a guess).
_CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}
# More rows serve more sequences at once, and cost the one that decodes alone: on a CPU 4 rows take
# 1.4 times as long as one, 8 twice as long. On a GPU the weights are read once for all (a guess).
_DECODE_ROWS = {"cpu": 4, "cuda": 64}
# Positions of a sequence that one program of the decode kernel walks: a fixed length, where the
# default is a number of parts that depends on the batch.
DECODE_SPLIT = 512

# Variables that make the CPU's libraries choose other instructions than they would by themselves.
_CPU_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR")


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """The shapes of all forwards of one engine. ``num_threads`` is None where a GPU computes."""

    chunk_tokens: int
    decode_rows: int
    num_threads: int | None

    @classmethod
    def of(cls, device: torch.device, block_size: int) -> "FixedShapes":
        kind = "cuda" if device.type == "cuda" else "cpu"
        if kind == "cuda":  # cuBLAS reads it at its first call; other values may change the bits
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return cls(
            chunk_tokens=max(_CHUNK_TOKENS[kind], block_size),
            decode_rows=_DECODE_ROWS[kind],
            num_threads=None if kind == "cuda" else torch.get_num_threads(),
        )

    def whole_chunks(self, num_tokens: int) -> int:
        """The tokens that fill whole chunks: what can be reused of so many."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens

    def padded(self, num_tokens: int) -> int:
        """Positions that a forward of ``num_tokens`` of one sequence writes. A single token is
        computed as decoding is, and takes one."""
        return num_tokens if num_tokens == 1 else self.chunk_tokens

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Around a forward, in its thread: the number of threads, and on a GPU operations without
        a race. An operation that has no such form raises."""
        if self.num_threads is not None:
            if torch.get_num_threads() != self.num_threads:
                torch.set_num_threads(self.num_threads)
            yield
            return
        enabled = torch.are_deterministic_algorithms_enabled()
        warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
        memory: Any = torch.utils.deterministic
        fills = memory.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False  # to find bugs; costs a pass over every result
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warns_only)
            memory.fill_uninitialized_memory = fills


def run_identity(
    shapes: FixedShapes, device: torch.device, backend: str, *, is_packed: bool = False
) -> dict[str, Any]:
    """What the bits of a block depend on beside the model: part of the model's identity.

    ``backend`` is the name of the attention kernels; ``is_packed``: its linear layers are
    (``engine.model.packed_linear``). A prefix computed with other threads, other instructions,
    another GPU, another torch or other kernels of ours is a miss.
    """
    identity: dict[str, Any] = {
        "attention": backend,
        "chunk_tokens": shapes.chunk_tokens,
        "kernels": _kernels(),
        "packed": is_packed,
        "torch": str(torch.__version__),
    }
    if device.type == "cuda":
        return identity | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return identity | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "threads": shapes.num_threads,
        "variables": [os.environ.get(name, "") for name in _CPU_VARIABLES],
    }


def _kernels() -> str:
    """Digest of the source of our kernels and their twins, and Triton's version."""
    digest = sha256()
    for path in sorted(Path(reference.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    with suppress(PackageNotFoundError):
        digest.update(version("triton").encode())
    return digest.hexdigest()


def _processor() -> str:
    """Digest of its instructions and cache sizes: libraries choose kernels and tiles by both."""
    get_capabilities = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is None:  # an older torch tells less
        return f"{platform.machine()} {platform.processor()}"
    facts = json.dumps(dict(get_capabilities()), sort_keys=True)
    return sha256(facts.encode()).hexdigest()
