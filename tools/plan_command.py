"""``kvstore plan TRACE``: what caches of many sizes would save of a trace of requests."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import click

from kvstore.block import TierName
from kvstore.config import parse_size
from kvstore.planning import (
    FORMATS,
    MODELS,
    PROCESSORS,
    BlockSampler,
    CacheSetup,
    HardwareProfile,
    RequestBatch,
    make_plan,
    profile_of,
    read_model_shape,
    read_trace,
)
from tools.command import JSON_OPTION, Command
from tools.json_text import json_text
from tools.parameters import File, Number
from tools.plan_picture import check_picture, draw
from tools.plan_report import PlanReport
from tools.terminal import can_draw, say

_DEFAULT_MODEL, _DEFAULT_HARDWARE = "llama-3.1-8b", "h100"
_SHAPES = {**MODELS, "demo": MODELS["smollm2-135m"]}
_SAMPLE_BLOCKS = 1 << 23  # distinct blocks kept at once, by default: about half a gigabyte
# Named as LLM's settings of the same meaning.
_SIZES = {
    "device_cache": "--device-cache",
    "host_cache": "--host-cache",
    "disk_cache_size": "--disk-cache-size",
}
_MOST_BLOCKS = 1 << 40  # of a cache
_ON_TERMINAL_S, _ELSEWHERE_S = 0.5, 30.0  # between two words of progress


def _plan(
    trace: str,
    as_json: bool,
    as_csv: bool,
    plot: str | None,
    capacity_blocks: str | None,
    policy: str,
    sample: float | None,
    sample_blocks: int,
    tier: str,
    trace_format: str | None,
    tokenizer: str | None,
    block_size: int | None,
    **settings: Any,
) -> int:
    if as_json and as_csv:
        raise click.UsageError("--json and --csv: print one or the other")
    if plot:
        check_picture(Path(plot))
    capacities = None if capacity_blocks is None else _numbers(capacity_blocks)
    encode = None if tokenizer is None else _encoder(tokenizer)
    policies = _words(policy, "--policy")
    batches = read_trace(trace, format=trace_format, block_tokens=block_size, encode=encode)
    first, batches = _peek(batches)
    hardware = _hardware(settings)
    block_bytes = (first.block_tokens if first else 1) * hardware.bytes_per_token
    sampler = BlockSampler(sample) if sample else BlockSampler(most_blocks=sample_blocks or None)
    progress = _Progress()
    plan = make_plan(
        batches,
        capacities=capacities,
        policies=policies,
        setups=list(_setups(settings, policies, block_bytes)),
        hardware=hardware,
        tier=TierName(tier),
        sampler=sampler,
        progress=progress,
    )
    progress.end()
    if not settings["measure"]:
        _say_assumptions(settings["model"], settings["hardware"])
    report = PlanReport(plan, hardware, TierName(tier))
    if plot:
        name = "standard input" if trace == "-" else Path(trace).name
        draw(plan, hardware, Path(plot), f"{name}\n{report.recommendation()}")
    if as_json:
        click.echo(json_text(report.as_json()))
    else:
        click.echo(report.as_csv() if as_csv else report.as_text())
    return 0


def _peek(
    batches: Iterator[RequestBatch],
) -> tuple[RequestBatch | None, Iterable[RequestBatch]]:
    first = next(batches, None)
    return first, batches if first is None else chain([first], batches)


def _words(text: str, flag: str) -> list[str]:
    """The different ones, in the order given."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise click.UsageError(f"{flag}: expected at least one value, got {text!r}")
    return list(dict.fromkeys(words))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word.replace("_", "")) for word in _words(text, "--capacity-blocks")]
    except ValueError:
        numbers = [-1]
    if not all(0 <= number <= _MOST_BLOCKS for number in numbers):
        raise click.UsageError(
            f"--capacity-blocks: expected numbers up to {_MOST_BLOCKS:,} with commas between them, "
            f"got {text!r}"
        )
    return numbers


def _hardware(settings: dict[str, Any]) -> HardwareProfile:
    model = settings["model"]
    if settings["measure"]:
        from engine.measuring.machine_profile import measure_machine

        say(f"measuring this machine with {model or 'demo'}")
        profile = measure_machine(model or "demo")
    else:
        name = model or _DEFAULT_MODEL
        shape = _SHAPES[name] if name in _SHAPES else read_model_shape(name)
        profile = profile_of(PROCESSORS[settings["hardware"] or _DEFAULT_HARDWARE], shape)
    if settings["model_bytes_per_token"] is not None:
        profile = replace(profile, bytes_per_token=settings["model_bytes_per_token"])
    return profile


def _say_assumptions(model: str | None, hardware: str | None) -> None:
    """A trace may be of another model than the sizes and times are of."""
    assumed = {
        "--model": None if model else f"the model {_DEFAULT_MODEL}",
        "--hardware": None if hardware else _DEFAULT_HARDWARE,
    }
    flags = [flag for flag, value in assumed.items() if value]
    if flags:
        values = " on ".join(value for value in assumed.values() if value)
        say(f"assuming {values}: choose with {' and '.join(flags)}")


def _setups(
    settings: dict[str, Any], policies: list[str], block_bytes: int
) -> Iterator[CacheSetup]:
    """Every combination of the sizes, policies and write policies that were given."""
    given = {name: settings[name] for name in _SIZES}
    write_policies = _words(settings["write_policy"], "--write-policy")
    if all(text is None for text in given.values()):
        return
    if given["device_cache"] is None:
        raise click.UsageError(f"a split over tiers needs {_SIZES['device_cache']}, too")
    sizes = []
    for name, text in given.items():
        words = ["0"] if text is None else _words(text, _SIZES[name])
        asked = [(parse_size(word, _SIZES[name]), word) for word in words]
        for num_bytes, word in asked:
            if num_bytes > _MOST_BLOCKS * block_bytes:
                raise click.UsageError(
                    f"{_SIZES[name]} {word}: more than {_MOST_BLOCKS:,} blocks of {block_bytes:,} "
                    "bytes"
                )
            if 0 < num_bytes < block_bytes or (name == "device_cache" and not num_bytes):
                raise click.UsageError(
                    f"{_SIZES[name]} {word}: smaller than a block, which has {block_bytes:,} bytes"
                )
        sizes.append([num_bytes // block_bytes for num_bytes, _ in asked])
    for policy in policies:
        for write_policy in write_policies:
            for device, host, disk in product(*sizes):
                yield CacheSetup(device, host, disk, policy, write_policy)


def _encoder(name: str) -> Callable[[str], list[int]]:
    """A tokenizer.json, or a directory that has one."""
    from tokenizers import Tokenizer

    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.exists():
        raise click.UsageError(f"--tokenizer: {path} does not exist; name a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise click.UsageError(f"--tokenizer: {path}: {error}") from error
    return lambda text: tokenizer.encode(text).ids


class _Progress:
    """A line that is written over, on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._is_terminal = can_draw()
        self._pause_s = _ON_TERMINAL_S if self._is_terminal else _ELSEWHERE_S
        self._due = time.monotonic() + self._pause_s
        self._width = 0

    def __call__(self, text: str) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._pause_s
        if self._is_terminal:
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            say(text)

    def end(self) -> None:
        if self._width:
            print(f"\r{'':{self._width}}\r", end="", file=sys.stderr, flush=True)


plan = Command(
    name="plan",
    callback=_plan,
    help="Tell what KV caches of many sizes would save of the requests in TRACE (- for stdin): a "
    "Mooncake trace, an event file of a store, or JSON lines of token ids or of texts, gzipped or "
    "not. The LRU curve takes one pass; other policies, and splits over tiers, are simulated with "
    "the store's own code. Needs no GPU and no model.",
    examples=(
        "kvstore plan trace.jsonl",
        "kvstore plan trace.jsonl --policy lru,s3-fifo --plot curves.svg",
        "kvstore plan trace.jsonl --device-cache 40GiB --host-cache 0,256GiB --json",
    ),
    params=[
        click.Argument(["trace"], metavar="TRACE", type=File()),
        click.Option(
            ["--capacity-blocks"],
            metavar="N[,N…]",
            help="Sizes of the curve's caches.  [default: powers of two up to the trace's blocks]",
        ),
        click.Option(
            ["--policy"],
            default="lru",
            show_default=True,
            metavar="P[,P…]",
            help="Victim policies: lru, slru, s3-fifo.",
        ),
        JSON_OPTION,
        click.Option(["--csv", "as_csv"], is_flag=True, help="Print CSV."),
        click.Option(
            ["--plot"], type=File(), metavar="FILE", help="Draw the curves: .png or .svg."
        ),
    ],
    sections={
        "Trace": [
            click.Option(
                ["--format", "trace_format"],
                type=click.Choice(FORMATS),
                help="[default: found out]",
            ),
            click.Option(
                ["--block-size"],
                type=click.IntRange(1, 1 << 20),
                metavar="TOKENS",
                help="Tokens of a block.  [default: 512 for mooncake, 16 for tokens and text]",
            ),
            click.Option(
                ["--tokenizer"], metavar="FILE", help="A tokenizer.json, for a trace of texts."
            ),
            click.Option(
                ["--sample"],
                type=Number(0, 1, min_open=True),
                metavar="SHARE",
                help="Look at this share of the blocks, and print the error that this brings.",
            ),
            click.Option(
                ["--sample-blocks"],
                type=click.IntRange(0, 1 << 40),
                default=_SAMPLE_BLOCKS,
                show_default=True,
                metavar="N",
                help="Halve that share whenever more distinct blocks are kept; 0 for never.",
            ),
        ],
        "Tiers": [
            *(
                click.Option([flag], metavar="SIZE[,…]", help=help_text)
                for flag, help_text in zip(
                    _SIZES.values(),
                    ("Simulate a split: GPU memory,", "host memory,", "disk: 500GiB,2TiB."),
                    strict=True,
                )
            ),
            click.Option(
                ["--write-policy"],
                default="write_behind",
                show_default=True,
                metavar="P[,P…]",
                help="write_behind, write_through, write_back, min_hits.",
            ),
        ],
        "Hardware": [
            click.Option(
                ["--hardware"],
                type=click.Choice(list(PROCESSORS)),
                help="Whose speeds the times to the first token are estimated with.  "
                f"[default: {_DEFAULT_HARDWARE}]",
            ),
            click.Option(
                ["--model"],
                metavar="MODEL",
                help=f"{', '.join(MODELS)} or a transformers directory.  "
                f"[default: {_DEFAULT_MODEL}]",
            ),
            click.Option(
                ["--model-bytes-per-token"],
                type=click.IntRange(1, 1 << 30),
                metavar="BYTES",
                help="K and V of a token, whatever the model says.",
            ),
            click.Option(
                ["--measure"],
                is_flag=True,
                help="Measure this machine instead, with MODEL run for some seconds.  "
                "[default model: demo]",
            ),
            click.Option(
                ["--tier"],
                type=click.Choice(["device", "host", "disk"]),
                default="host",
                show_default=True,
                help="Where the curve's caches are.",
            ),
        ],
    },
)
