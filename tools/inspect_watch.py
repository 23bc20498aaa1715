"""``kvstore inspect --watch``: what the engines on a cache are doing, from what they publish.

They publish counters; rates are differences between two looks. On a terminal a screen, elsewhere
lines, or with ``--json`` objects, one a look.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from tools.json_text import json_text
from tools.sizes import format_age, format_bytes, format_count
from tools.terminal import can_draw
from tools.text import escape

_TIERS = ("device", "host", "disk")
Look = dict[str, Any]


def watch(directory: str, *, interval: float, count: int | None, as_json: bool) -> int:
    """Look every ``interval`` seconds, ``count`` times or until Ctrl-C."""
    from kvstore.disk.offline.look import Engines
    from kvstore.disk.offline.summary import summarize

    names = {each["id"]: each["model"] for each in summarize(directory)["namespaces"]}
    before: dict[tuple[int, str], Look] = {}
    with Engines(directory) as engines, _screen(as_json=as_json) as show:
        while count is None or count > 0:
            now = time.time()
            found = engines.read()
            rows = []
            for each in found:
                each["model"] = names.get(each.get("namespace", ""))
                key = (each["pid"], str(each.get("namespace")))
                rows.append(each | {"rates": _rates(before.get(key), each, now)})
                before[key] = {**each, "looked_at": now}
            show({"at": now, "engines": rows})
            count = None if count is None else count - 1
            if count != 0:
                time.sleep(interval)
    return 0


def _rates(before: Look | None, now: Look, at: float) -> dict[str, Any] | None:
    """Per second since the look before, and hit ratios of the blocks asked for meanwhile; None at
    the first look."""
    if before is None:
        return None
    seconds = max(at - before["looked_at"], 1e-3)

    def grown(read: Callable[[Look], float]) -> float:
        return max(read(now) - read(before), 0)

    asked = grown(lambda look: look["looked_up_blocks"])
    hits = {tier: grown(lambda look: look["tiers"][tier]["hits"]) for tier in _TIERS}  # noqa: B023
    promoted = {
        tier: grown(lambda look: look["promoted_blocks"].get(tier, 0))  # noqa: B023
        for tier in _TIERS[1:]
    }
    size = now["block_bytes"]
    return {
        "seconds": seconds,
        "asked_blocks": asked / seconds,
        "hit_ratio": {tier: hits[tier] / asked if asked else None for tier in _TIERS},
        "promoted_bytes": {tier: n * size / seconds for tier, n in promoted.items()},
        "demoted_bytes": grown(lambda look: look["demoted_blocks"]) * size / seconds,
        "written_bytes": grown(lambda look: look["written_bytes"]) / seconds,
    }


# ---- showing -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[Look], None]]:
    if as_json:
        yield lambda look: _print(json_text(look, indent=None))
    elif sys.stdout.isatty() and can_draw():
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(console=Console(), auto_refresh=False) as live:

            def draw(look: Look) -> None:
                live.update(Text("\n".join(_lines(look)), no_wrap=True), refresh=True)

            yield draw
    else:
        yield lambda look: _print("\n".join(_one_line(look)))


def _print(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


def _one_line(look: Look) -> Iterator[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(look["at"]))
    if not look["engines"]:
        yield f"{clock}  no engine is attached"
    for engine in look["engines"]:
        parts = [f"{clock}  {_name(engine)}", _traffic(engine), _queues(engine)]
        yield "; ".join(parts)


def _lines(look: Look) -> Iterator[str]:
    """The screen."""
    yield time.strftime("%H:%M:%S", time.localtime(look["at"]))
    if not look["engines"]:
        yield "no engine is attached"
    for engine in look["engines"]:
        since = engine.get("since")
        yield ""
        yield _name(engine) + (f", here for {format_age(look['at'] - since)}" if since else "")
        ratios = (engine["rates"] or {}).get("hit_ratio", {})
        heads = ("used", "of", "blocks", "hits now", "hits ever")
        yield f"  {'tier':8}{'state':10}" + "".join(f"{head:>12}" for head in heads)
        for tier in _TIERS:
            each = engine["tiers"][tier]
            asked = engine["looked_up_blocks"]
            cells = (
                format_bytes(each["used_bytes"]),
                format_bytes(each["capacity_bytes"]),
                f"{each['used_blocks']:,}",
                _share(ratios.get(tier)),
                _share(each["hits"] / asked if asked else None),
            )
            yield f"  {tier:8}{each['state']:10}" + "".join(f"{cell:>12}" for cell in cells)
        yield f"  {_traffic(engine)}"
        yield f"  {_queues(engine)}"


def _name(engine: Mapping[str, Any]) -> str:
    return f"{escape(str(engine['model'] or '?'))} (pid {engine['pid']})"


def _traffic(engine: Mapping[str, Any]) -> str:
    rates = engine["rates"]
    if rates is None:
        return f"{format_count(engine['looked_up_blocks'], 'block')} asked for so far"
    found = ", ".join(
        f"{tier} {_share(ratio)}" for tier, ratio in rates["hit_ratio"].items() if ratio
    )
    loaded = sum(rates["promoted_bytes"].values())
    return (
        f"{rates['asked_blocks']:,.0f} blocks/s asked for ({found or 'no hits'}), "
        f"{format_bytes(int(loaded))}/s loaded, {format_bytes(int(rates['demoted_bytes']))}/s to "
        f"host, {format_bytes(int(rates['written_bytes']))}/s written"
    )


def _queues(engine: Mapping[str, Any]) -> str:
    dirty = format_count(engine["dirty_blocks"], "dirty block")
    if engine["dirty_blocks"]:
        dirty += f" (the oldest for {engine['oldest_dirty_age_s']:.1f} s)"
    return (
        f"{dirty}, {format_count(engine['pending_transfers'], 'transfer')}; sequences: "
        f"{engine.get('running', 0):,} run, {engine.get('promoting', 0):,} load, "
        f"{engine.get('waiting', 0):,} wait"
    )


def _share(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
