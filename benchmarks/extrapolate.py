"""From one engine to a thousand: blocks, memory, disk and bandwidth, and what breaks first.

    .venv/bin/python benchmarks/extrapolate.py

Arithmetic only. What one engine does follows from a preset of ``kvstore.planning`` and from what a
trace hits; what a resource can do is measured (``benchmarks/results``) or on a data sheet. Prints
Markdown; the page ``docs/capacity.md`` has its output.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.block import TierName
from kvstore.planning import MODELS, PROCESSORS, profile_of

_RESULTS = Path(__file__).parent / "results"
_DAY_S = 86_400
_BLOCK_TOKENS = 16
_TOKENS_BYTES = 97  # a bytes object of 16 tokens, which the index keeps to confirm a match
_RECORD_BYTES = 320  # an index record on disk, as kvstore.disk counts it
_ENDURANCE_BYTES_PER_DAY = 7.68e12  # 1 drive write a day of a 7.68 TB drive, a read-intensive SSD's
_NODE_ENGINES = 8


@dataclass(frozen=True, slots=True)
class Use:
    """Of one resource: what is asked of it, what it can do, in ``unit``."""

    resource: str
    asked: float
    can: float
    unit: str
    source: str

    @property
    def share(self) -> float:
        return self.asked / self.can


def measured(benchmark: str, case: str, key: str) -> float:
    """The worst figure of a case in the kept results."""
    lines = (_RESULTS / f"{benchmark}.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["case"] == case]
    return min(record[key] for record in records if key in record)


def uses(options: argparse.Namespace) -> Iterator[Use]:
    """What one engine asks of each resource of its share of a node."""
    profile = profile_of(PROCESSORS[options.hardware], MODELS[options.model])
    step_s = profile.compute.seconds(0, options.prompt_tokens, profile.chunk_tokens)
    computed = options.utilisation * options.prompt_tokens / step_s  # tokens a second
    asked = computed / (1 - options.hit_ratio)
    loaded, block_bytes = asked - computed, _BLOCK_TOKENS * profile.bytes_per_token
    written_bytes = computed * profile.bytes_per_token
    from_disk = loaded * options.disk_share * profile.bytes_per_token
    lookup_us = measured("store", "bookkeeping", "us_per_block_at_1000000")
    yield Use(
        "owner thread: lookup, reserve, release",
        asked / _BLOCK_TOKENS * lookup_us / 1e6,
        1.0,
        "cores",
        "store.jsonl, bookkeeping",
    )
    yield Use(
        "host to device",
        loaded * profile.bytes_per_token / 1e9,
        profile.loads[TierName.HOST].bytes_per_s / 1e9,
        "GB/s",
        "preset",
    )
    yield Use(
        "reads from disk, one directory a node",
        _NODE_ENGINES * from_disk / 1e9,
        profile.loads[TierName.DISK].bytes_per_s / 1e9,
        "GB/s",
        "preset",
    )
    yield Use(
        "writes to disk, one directory a node",
        _NODE_ENGINES * written_bytes / 1e9,
        measured("disk", "put", "ours_gb_s"),
        "GB/s",
        "disk.jsonl, put: one LMDB writer",
    )
    yield Use(
        "the same, of blocks that are asked for again",
        _NODE_ENGINES * written_bytes * options.reused_share / 1e9,
        measured("disk", "put", "ours_gb_s"),
        "GB/s",
        "disk.jsonl, put: one LMDB writer",
    )
    yield Use(
        "wear of a node's drive by those alone",
        _NODE_ENGINES * written_bytes * options.reused_share * _DAY_S / 1e12,
        _ENDURANCE_BYTES_PER_DAY / 1e12,
        "TB/day",
        "one drive write a day, 7.68 TB",
    )
    index_bytes = measured("store", "memory", "bytes_per_block") + _TOKENS_BYTES
    num_blocks = (options.device_gib + options.host_gib) * 2**30 / block_bytes
    yield Use(
        "index in memory",
        num_blocks * index_bytes / 2**30,
        options.host_gib,
        "GiB",
        "store.jsonl, memory; of the host tier's size",
    )


def sizes(options: argparse.Namespace) -> list[list[str]]:
    """What is held in all, by the number of engines."""
    profile = profile_of(PROCESSORS[options.hardware], MODELS[options.model])
    block_bytes = _BLOCK_TOKENS * profile.bytes_per_token
    index_bytes = measured("store", "memory", "bytes_per_block") + _TOKENS_BYTES
    per_engine = {
        "device": options.device_gib * 2**30,
        "host": options.host_gib * 2**30,
        "disk": options.disk_tib * 2**40 / _NODE_ENGINES,
    }
    blocks = {tier: size / block_bytes for tier, size in per_engine.items()}
    in_memory = (blocks["device"] + blocks["host"]) * index_bytes
    head = "engines, device, host, disk, blocks, tokens, index in memory, index on disk"
    rows = [head.split(", ")]
    for engines in (1, _NODE_ENGINES, 100, 1000):
        total = sum(blocks.values()) * engines
        rows.append(
            [
                f"{engines:,}",
                *(_size(per_engine[tier] * engines) for tier in per_engine),
                _count(total),
                _count(total * _BLOCK_TOKENS),
                _size(in_memory * engines),
                _size(blocks["disk"] * engines * _RECORD_BYTES),
            ]
        )
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} PiB"


def _count(number: float) -> str:
    for unit in ("", " thousand", " million", " billion"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} trillion"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS)
    parser.add_argument("--hardware", default="h100", choices=PROCESSORS)
    for name, default, text in (
        ("--prompt-tokens", 12_000, "of a prompt"),
        ("--hit-ratio", 0.34, "of prompt tokens, in all tiers together"),
        ("--disk-share", 0.5, "of the hits that come from disk"),
        ("--reused-share", 0.25, "of the computed blocks that are ever asked for again"),
        ("--utilisation", 0.5, "of the time that an engine prefills"),
        ("--device-gib", 40, "of blocks on a device"),
        ("--host-gib", 128, "of blocks in host memory, an engine"),
        ("--disk-tib", 4, "of blocks on disk, a node of 8 engines"),
    ):
        parser.add_argument(name, type=float, default=default, help=f"{text}; default: {default}")
    options = parser.parse_args()
    print(markdown(sizes(options)))
    print()
    rows = [
        [
            use.resource,
            f"{use.asked:.3g} {use.unit}",
            f"{use.can:.3g} {use.unit}",
            f"{100 * use.share:.2g} %" if use.share < 1 else f"{use.share:.2g} times",
            use.source,
        ]
        for use in sorted(uses(options), key=lambda use: -use.share)
    ]
    print(markdown([["resource", "asked", "can", "share", "from"], *rows]))


if __name__ == "__main__":
    main()
