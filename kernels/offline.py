"""Compiling the kernels for a GPU that is not there, and reading what came out.

The kernels go through the JIT's own ``warmup``, with the arguments a launch would have: compiling
the bare source instead leaves out the divisibility of strides and pointers, and checks a kernel
that never runs (320 loads of 16 bits instead of 64 asynchronous copies of 16 bytes, and spills).

Not for the interpreter: the process must not have ``TRITON_INTERPRET`` set.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.attention_launch import Gpu, attention_launches
from kernels.configs import AttentionConfig
from kernels.launch import Launch

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Shared memory that one program may have, in bytes (CUDA programming guide, less the 1 KiB that
# the driver reserves).
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


class OfflineDriver:
    """What the JIT asks of a driver while it compiles, answered for a given GPU."""

    def __init__(self, compute_capability: int) -> None:
        self.compute_capability = compute_capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.compute_capability, 32)

    def get_current_device(self) -> int:
        # The JIT's in-process cache is per device: one device a target keeps them apart.
        return self.compute_capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel uses. Counts are of instructions in its text, not of executions.

    stack_bytes, spills  local memory: both must be 0 for a kernel worth running ("32 registers"
                         with a stack of kilobytes is the assembler giving up, not a good kernel)
    async_copies         16-byte asynchronous copies from global to shared memory
    tensor_copies        bulk copies of the tensor memory accelerator
    mma                  HMMA, wgmma, tcgen05, or FFMA where no tensor core is used
    uses_tf32            whether any product rounds float32 operands to tf32
    """

    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    async_copies: int
    tensor_copies: int
    wide_loads: int
    wide_stores: int
    barriers: int
    mma: str
    uses_tf32: bool
    instructions: int

    @property
    def is_clean(self) -> bool:
        return self.spills == 0 and self.stack_bytes == 0


def compile_for(compute_capability: int, warmup: Callable[[], Any]) -> Resources:
    """Run ``warmup`` (which calls ``kernel.warmup(…)``) for that GPU and read what it compiled.

    The process keeps the offline driver: it cannot launch kernels any more.
    """
    triton.runtime.driver.set_active(OfflineDriver(compute_capability))
    return read_resources(warmup())


def read_resources(compiled: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[:200]!r}")
    ptx = compiled.asm["ptx"]
    return Resources(
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        spills=len(re.findall(r"\bSTL\b", sass)),
        shared_bytes=compiled.metadata.shared,
        async_copies=len(re.findall(r"\bLDGSTS\.E[A-Z0-9.]*\.128", sass)),
        tensor_copies=ptx.count("cp.async.bulk.tensor"),
        wide_loads=len(re.findall(r"\bLDG\.E[A-Z0-9.]*\.128", sass)),
        wide_stores=len(re.findall(r"\bSTG\.E[A-Z0-9.]*\.128", sass)),
        barriers=len(re.findall(r"\bBAR\.", sass)),
        mma=_mma_kind(ptx, sass),
        uses_tf32="tf32" in ptx,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]+\*/", sass, re.MULTILINE)),
    )


def _mma_kind(ptx: str, sass: str) -> str:
    if "tcgen05.mma" in ptx:
        return "tcgen05"
    for instruction, name in (("HGMMA", "wgmma"), ("HMMA", "HMMA"), ("FFMA", "FFMA")):
        if re.search(rf"\b{instruction}\b", sass):
            return name
    return "none"


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One attention kernel as a model would launch it; by default an 8B Llama's heads."""

    regime: str  # "prefill" or "decode"
    compute_capability: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    num_kv_heads: int = 8
    heads_per_kv: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def launches(self, config: AttentionConfig | None = None) -> list[Launch]:
        """With tensors that have no memory: only shapes, strides and dtypes count."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        num_heads = self.num_kv_heads * self.heads_per_kv
        num_seqs, num_tokens = (2, 4096) if self.regime == "prefill" else (16, 16)
        pool_shape = (64, 32, 2, self.block_size, self.num_kv_heads, self.head_dim)
        pool = empty(*pool_shape, dtype=self.dtype)
        q = empty(num_tokens, num_heads, self.head_dim, dtype=self.dtype)
        return attention_launches(
            q,
            pool[:, 0, 0],
            pool[:, 0, 1],
            empty(num_seqs, 8192 // self.block_size),
            empty(num_seqs + 1) if self.regime == "prefill" else None,
            empty(num_seqs),
            0.1,
            self.window,
            self.softcap,
            empty(num_heads, dtype=torch.float32) if self.sinks else None,
            None,
            torch.empty_like(q),
            Gpu(self.compute_capability, num_sms=132),
            config,
        )
