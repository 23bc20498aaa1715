"""What the Triton kernels compile to, for GPUs that need not be there.

    python benchmarks/kernel_resources.py            a table
    python benchmarks/kernel_resources.py --json     the same rows as JSON
    python benchmarks/kernel_resources.py --only prefill-90-128-bfloat16

At most 60 configurations as models launch them: each architecture, head_dim and dtype of the table,
the features (window, soft-cap, sinks, tensor descriptors), the reduction and the block movement. A
float16 or bfloat16 row must not spill and must fit its device's shared memory, else exit status 1;
float32 is the exact path without tensor cores and is only reported. Takes a few seconds a row the
first time, then Triton's cache answers. It finds neither races nor miscompiled code: that takes a
GPU (``benchmarks/gpu_suite.py``).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # compiled here, whatever the caller does


import torch
import triton

from kernels import movement_launch
from kernels.launch import Launch
from kernels.offline import SHARED_LIMIT, AttentionCase, compile_for

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
FULL_FEATURES = {"window": 1024, "softcap": 30.0, "sinks": True}


def attention_rows() -> dict[str, AttentionCase]:
    def name(case: AttentionCase, suffix: str = "") -> str:
        dtype = str(case.dtype).removeprefix("torch.")
        return f"{case.regime}-{case.compute_capability}-{case.head_dim}-{dtype}{suffix}"

    cases = [
        AttentionCase("prefill", arch, dim) for arch in ARCHITECTURES for dim in (64, 128, 256)
    ]
    cases += [
        AttentionCase("prefill", arch, dim) for arch in (80, 90, 100) for dim in (80, 96, 192)
    ]
    cases += [AttentionCase("prefill", arch, 128, torch.float16) for arch in ARCHITECTURES]
    cases += [AttentionCase("decode", arch, dim) for arch in ARCHITECTURES for dim in (64, 128)]
    for arch in (80, 90):
        cases.append(AttentionCase("prefill", arch, 128, torch.float32))
        cases.append(AttentionCase("decode", arch, 128, torch.float32))
    rows = {name(case): case for case in cases}
    for arch in (80, 90, 100):
        case = AttentionCase("prefill", arch, 128, **FULL_FEATURES)
        rows[name(case, "-window-softcap-sinks")] = case
    for arch in (90, 100):
        case = AttentionCase("prefill", arch, 128, block_size=64)
        rows[name(case, "-block64")] = case
    return rows


def movement_rows() -> dict[str, tuple[int, Callable[[], Launch]]]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool = empty(64, 32, 2, 16, 8, 128)
    ids = empty(8, dtype=torch.int32)

    def write() -> Launch:
        k = empty(100, 8, 128)
        slots = empty(100, dtype=torch.int64)
        return movement_launch.write_launch(k, k, pool[:, 0, 0], pool[:, 0, 1], slots)

    def gather(part: torch.Tensor) -> Callable[[], Launch]:
        out = torch.empty((8, *part.shape[1:]), dtype=part.dtype, device="meta")
        return lambda: movement_launch.move_launch(part, out, ids, None, None)

    return {
        "write_kv-90": (90, write),
        "gather_blocks-90": (90, gather(pool)),
        "gather_blocks-90-keys": (90, gather(pool[:, :, 0])),
        "copy_blocks-90-counts": (
            90,
            lambda: movement_launch.move_launch(pool, pool, ids, ids, ids),
        ),
    }


def measure(names: list[str] | None) -> list[dict[str, Any]]:
    launches: dict[str, tuple[int, torch.dtype, Callable[[], Launch]]] = {}
    for name, case in attention_rows().items():
        launches[name] = (case.compute_capability, case.dtype, lambda c=case: c.launches()[0])
    reduced = AttentionCase("decode", 90, 128)
    launches["reduce-90-128"] = (90, torch.bfloat16, lambda: reduced.launches()[1])
    for name, (arch, launch) in movement_rows().items():
        launches[name] = (arch, torch.bfloat16, launch)
    assert len(launches) <= 60
    unknown = set(names or ()) - launches.keys()
    if unknown:
        sys.exit(f"--only: no configuration named {', '.join(sorted(unknown))}")
    rows = []
    for name in names or launches:
        arch, dtype, make = launches[name]
        launch = make()
        found = compile_for(arch, launch.warmup)
        tile = {key: launch.options[key] for key in ("M", "N", "TMA") if key in launch.options}
        tile |= {key: launch.options.get(key) for key in ("num_warps", "num_stages")}
        fits = found.shared_bytes <= SHARED_LIMIT[arch]
        rows.append(
            {
                "name": name,
                "compute_capability": arch,
                "tile": tile,
                **asdict(found),
                "shared_limit_bytes": SHARED_LIMIT[arch],
                "ok": (found.is_clean and fits) if dtype != torch.float32 else None,
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        "| configuration | tile | registers | spills | shared | 16-byte copies | TMA | products |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        tile = row["tile"]
        shape = f"{tile['M']}x{tile['N']} " if "M" in tile else ""
        shape += f"w{tile['num_warps']}" + (f" s{tile['num_stages']}" if "M" in tile else "")
        spills = f"{row['spills']}" + (
            f" (stack {row['stack_bytes']})" if row["stack_bytes"] else ""
        )
        verdict = {True: "", False: " **over**", None: " (exempt)"}[row["ok"]]
        print(
            f"| {row['name']}{verdict} | {shape} | {row['registers']} | {spills} "
            f"| {row['shared_bytes'] // 1024} of {row['shared_limit_bytes'] // 1024} KiB "
            f"| {row['async_copies']} | {row['tensor_copies']} | {row['mma']} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")
    parser.add_argument("--only", action="append", metavar="NAME", help="one row (repeatable)")
    args = parser.parse_args()
    rows = measure(args.only)
    if args.json:
        print(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1))
    else:
        print_table(rows)
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
