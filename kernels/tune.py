"""Makes ``config_table.py``: ``python -m kernels.tune [--measure]``.

Without ``--measure`` no GPU is needed: for every architecture, head_dim and regime the candidates
are compiled offline, and the first one that neither spills nor exceeds the shared memory wins, bare
and with window, soft-cap and sinks together. The candidates stand in order of predicted speed. With
``--measure`` the candidates that fit are timed on the GPU of this machine, and only the entries of
its architecture are replaced.

float32 is the exact path, without tensor cores on purpose; where every candidate spills (Hopper),
the one that spills least is taken, and fewer entries serve all.
"""

import argparse
import sys
from pathlib import Path

import torch

from kernels.config_table import TABLE, Row
from kernels.configs import AttentionConfig

ARCHITECTURES = {2: (80, 86, 89, 90, 100, 120), 4: (80, 90)}  # by itemsize
HEAD_DIMS = {2: (64, 80, 96, 128, 192, 256), 4: (64, 128, 256)}
# (rows, keys, warps, stages), best first by prediction: tall tiles reuse a loaded key tile for more
# queries, wide ones pay the barriers and the rescaling of a tile for more keys, and three stages
# hide the latency of a load behind two tiles' products.
CANDIDATES: dict[tuple[str, int], tuple[tuple[int, int, int, int], ...]] = {
    ("prefill", 2): (
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 32, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 2),
        (128, 32, 8, 2),
        (64, 32, 8, 3),
        (64, 32, 8, 2),
        (64, 32, 4, 2),
        (32, 32, 4, 2),
    ),
    ("prefill", 4): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2), (16, 16, 4, 2)),
    ("decode", 2): ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 3), (16, 32, 4, 2)),
    ("decode", 4): ((16, 32, 4, 3), (16, 32, 4, 2), (16, 16, 4, 2)),
}
# The copy engine of Hopper and later loads a tile with one instruction and no address registers.
# Only where a block holds a whole tile, and where it compiles: see ``attention_launch.tile_shape``.
TMA_ARCHITECTURES = (90, 100, 120)


def choose_offline(regime: str, itemsize: int, architecture: int, head_dim: int) -> Row:
    """The first clean candidate, else the one with the fewest spills; printed as it goes."""
    from kernels.offline import SHARED_LIMIT, AttentionCase, Resources, compile_for

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32

    def resources(config: AttentionConfig, block_size: int, features: bool) -> Resources:
        case = AttentionCase(
            regime,
            architecture,
            head_dim,
            dtype,
            block_size,
            window=1024 if features else None,
            softcap=30.0 if features else None,
            sinks=features,
        )
        return compile_for(architecture, case.launches(config)[0].warmup)

    def is_usable(found: Resources) -> bool:
        return found.is_clean and found.shared_bytes <= SHARED_LIMIT[architecture]

    least: tuple[int, Row] | None = None
    for candidate in CANDIDATES[regime, itemsize]:
        config = AttentionConfig(*candidate, tma=False)
        found = [resources(config, 16, features) for features in (False, True)]
        print(architecture, regime, head_dim, itemsize, candidate, *found, file=sys.stderr)
        if all(map(is_usable, found)):
            with_tma = (
                architecture in TMA_ARCHITECTURES
                and head_dim & (head_dim - 1) == 0
                and is_usable(resources(AttentionConfig(*candidate, tma=True), 64, True))
            )
            return (*candidate, with_tma)
        fits = all(one.shared_bytes <= SHARED_LIMIT[architecture] for one in found)
        spilled = sum(one.spills for one in found)
        if fits and (least is None or spilled < least[0]):
            least = (spilled, (*candidate, False))
    if least is None:
        raise SystemExit(f"no candidate fits {architecture} {regime} head_dim {head_dim}")
    return least[1]


def choose_measured(regime: str, itemsize: int, head_dim: int) -> Row:
    """The fastest candidate on this machine's GPU, for 2,048 new tokens on 14,336 or 16 × 4,096."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    from kernels.attention_launch import attention_launches, gpu_of

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    device = torch.device("cuda")
    num_seqs, num_new, length = (1, 2048, 16384) if regime == "prefill" else (16, 1, 4096)
    block_size, num_kv_heads, num_heads = 16, 8, 32
    num_blocks = num_seqs * length // block_size
    pool = torch.randn(
        num_blocks, 1, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device
    )
    tables = torch.randperm(num_blocks, device=device, dtype=torch.int32).view(num_seqs, -1)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    cu = torch.tensor([0, num_new], dtype=torch.int32, device=device)
    q = torch.randn(num_seqs * num_new, num_heads, head_dim, dtype=dtype, device=device)
    out = torch.empty_like(q)
    times: list[tuple[float, Row]] = []
    for candidate in CANDIDATES[regime, itemsize]:
        launches = attention_launches(
            q,
            pool[:, 0, 0],
            pool[:, 0, 1],
            tables,
            cu if regime == "prefill" else None,
            lens,
            head_dim**-0.5,
            None,
            None,
            None,
            None,
            out,
            gpu_of(device),
            AttentionConfig(*candidate, tma=False),
        )

        def run(launches: list = launches) -> None:  # type: ignore[type-arg]
            for launch in launches:
                launch.run()

        try:
            times.append((do_bench(run, return_mode="median"), (*candidate, False)))
        except OutOfResources:
            continue
        print(regime, head_dim, itemsize, candidate, f"{times[-1][0]:.3f} ms", file=sys.stderr)
    return min(times)[1]


def write_table(table: dict[tuple[str, int], dict[tuple[int, int], Row]], path: Path) -> None:
    lines = ['"""Tile shapes, made by ``python -m kernels.tune``; see ``configs.py``. Do not edit.']
    lines += ["", "``TABLE[regime, itemsize][compute capability, head_dim] =``"]
    lines += ["``(rows, keys, warps, stages, tma)``", '"""', ""]
    lines += ["Row = tuple[int, int, int, int, bool]"]
    lines += ["TABLE: dict[tuple[str, int], dict[tuple[int, int], Row]] = {"]
    for (regime, itemsize), rows in sorted(table.items()):
        lines.append(f'    ("{regime}", {itemsize}): {{')
        lines += [f"        {key}: {row}," for key, row in sorted(rows.items())]
        lines.append("    },")
    path.write_text("\n".join([*lines, "}", ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="time on this machine's GPU")
    parser.add_argument("--arch", type=int, action="append", help="only this one (repeatable)")
    parser.add_argument("--regime", choices=("prefill", "decode"), help="only this one")
    args = parser.parse_args()
    table = {key: dict(rows) for key, rows in TABLE.items()}
    for (regime, itemsize), rows in table.items():
        if args.regime not in (None, regime):
            continue
        for head_dim in HEAD_DIMS[itemsize]:
            if args.measure:
                major, minor = torch.cuda.get_device_capability()
                rows[major * 10 + minor, head_dim] = choose_measured(regime, itemsize, head_dim)
                continue
            for architecture in args.arch or ARCHITECTURES[itemsize]:
                rows[architecture, head_dim] = choose_offline(
                    regime, itemsize, architecture, head_dim
                )
    write_table(table, Path(__file__).with_name("config_table.py"))


if __name__ == "__main__":
    main()
