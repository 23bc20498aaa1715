"""Whether an attention library is faster than our kernels here, for ``attention_backend="auto"``.

Asked on CUDA only, where one is installed that can read the model's blocks. Prefill and decode are
chosen apart, each on one typical step, and ours stays unless a library takes a tenth less time and
gives the same answer. A verdict holds for a device, the versions and the model's shape; it is kept
in a file, so that the same measurement is not made, and the same choice is not made anew, at every
start.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine.runner.attention_backends import LIBRARIES, find_backend
from engine.runner.forward_context import AttentionBackend
from kvstore.block import BlockLayout
from kvstore.config import cache_home
from kvstore.errors import ConfigError

logger = logging.getLogger(__name__)

_LEAST_GAIN = 0.10
# Of a float32 result of order one that was computed in bfloat16.
_TOLERANCE = 0.05
_DISTRIBUTIONS = ("torch", "triton", "flash-attn", "flash-attn-3", "flashinfer-python")
# A step with a long cached prefix, and one of many sequences: new tokens, sequences, context.
_PREFILL = (512, 1, 4096)
_DECODE = (1, 16, 2048)

TimeCall = Callable[[Callable[[], object]], float]
Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Step:
    """Arguments of one call: queries and metadata, and the pools they are about."""

    operands: tuple[torch.Tensor, ...]
    out: torch.Tensor

    def run(self, attend: Attend) -> torch.Tensor:
        scale = self.out.shape[-1] ** -0.5
        options = {"scale": scale, "window": None, "softcap": None, "sinks": None}
        return attend(*self.operands, **options, out=self.out)


def choose_backend(
    ours: AttentionBackend,
    layout: BlockLayout,
    pool: torch.Tensor,
    *,
    num_heads: int,
    max_model_len: int,
    time_call: TimeCall | None = None,
    verdicts: Path | None = None,
) -> AttentionBackend:
    """``ours``, or with a library's functions in it where those are faster.

    pool       [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] on CUDA; read only,
               whatever it holds
    time_call  seconds of a call; by default the median of several, by events on the device
    verdicts   file of what was measured before; by default in the user's cache directory
    """
    libraries = _usable(layout, pool.device)
    if not libraries:
        return ours
    verdicts = verdicts or cache_home() / "attention-backends.json"
    kinds = {"paged_prefill": _PREFILL, "paged_decode": _DECODE}
    key = _key(layout, pool.device, num_heads)
    known = _read(verdicts)
    names = known.get(key, {})
    if names.keys() != kinds.keys():
        scratch = torch.randn(32, *layout.shape, device=pool.device).to(pool.dtype)
        names = {}
        for function, shape in kinds.items():
            small = _step(scratch, shape, num_heads, max_model_len)
            large = _step(pool, shape, num_heads, max_model_len)
            names[function] = _fastest(
                {each.name: getattr(each, function) for each in (ours, *libraries.values())},
                small,
                large,
                time_call or _median_on_device,
            )
        _write(verdicts, known | {key: names})

    chosen = {function: libraries.get(names[function], ours) for function in kinds}
    prefill, decode = chosen.values()
    logger.info("attention prefill=%s decode=%s", prefill.name, decode.name)
    return AttentionBackend(
        "+".join(sorted({prefill.name, decode.name})),
        ours.write_kv,
        _but_sinks(prefill.paged_prefill, ours.paged_prefill),
        _but_sinks(decode.paged_decode, ours.paged_decode),
        is_capturable=decode.is_capturable,
    )


def _usable(layout: BlockLayout, device: torch.device) -> dict[str, AttentionBackend]:
    found = {}
    for name in LIBRARIES:
        with suppress(ConfigError):
            found[name] = find_backend(name, device, layout)
    return found


def _fastest(
    functions: Mapping[str, Attend], small: _Step, large: _Step, time_call: TimeCall
) -> str:
    """Name of the function to use; the first is ours, the oracle and the one to beat."""
    (our_name, our_function), *others = functions.items()
    expected = small.run(our_function).float().clone()
    best, best_s = our_name, time_call(lambda: large.run(our_function)) * (1 - _LEAST_GAIN)
    for name, function in others:
        try:
            error = float((small.run(function).float() - expected).abs().max())
            if not error <= _TOLERANCE:  # NaN is none, either
                logger.warning("attention library %s is off by %.2g, not used", name, error)
                continue
            seconds = time_call(lambda function=function: large.run(function))  # type: ignore[misc]
        except Exception as problem:  # of a library that does not fit this device or version
            logger.warning("attention library %s cannot be used: %s", name, problem)
            continue
        if seconds < best_s:
            best, best_s = name, seconds
    return best


def _step(pool: torch.Tensor, shape: tuple[int, int, int], num_heads: int, max_len: int) -> _Step:
    """A step of this shape on layer 0, its context cut to what pool and model allow. Blocks lie in
    no order; sequences share them where there are too few."""
    num_new, num_seqs, context = shape
    num_blocks, _, _, block_size, _, head_dim = pool.shape
    length = min(context, max_len, num_blocks * block_size)
    num_new = min(num_new, length)
    per_seq = -(-length // block_size)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    ids = order.repeat(-(-num_seqs * per_seq // num_blocks))[: num_seqs * per_seq]

    def ints(values: torch.Tensor) -> torch.Tensor:
        return values.to(pool.device, torch.int32)

    q = torch.randn(num_seqs * num_new, num_heads, head_dim, device=pool.device).to(pool.dtype)
    metadata = [ints(ids.view(num_seqs, per_seq))]
    if num_new > 1:
        metadata.append(ints(torch.arange(num_seqs + 1) * num_new))
    metadata.append(ints(torch.full((num_seqs,), length)))
    return _Step((q, pool[:, 0, 0], pool[:, 0, 1], *metadata), torch.empty_like(q))


def _but_sinks(chosen: Attend, ours: Attend) -> Attend:
    """``chosen``, but for layers with attention sinks, which no library here has."""

    def attend(*operands: torch.Tensor, sinks: torch.Tensor | None, **options: Any) -> torch.Tensor:
        function = chosen if sinks is None else ours
        return function(*operands, sinks=sinks, **options)

    return attend


def _median_on_device(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=10, rep=50, return_mode="median")) / 1e3


def _key(layout: BlockLayout, device: torch.device, num_heads: int) -> str:
    name = torch.cuda.get_device_name(device)
    parts = [name, f"{num_heads} heads", str(layout.shape), layout.dtype]
    for distribution in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            parts.append(f"{distribution} {version(distribution)}")
    return ", ".join(parts)


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(path: Path, verdicts: Mapping[str, Mapping[str, str]]) -> None:
    """A verdict that cannot be kept is measured again."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(verdicts, indent=1))
        beside.replace(path)
