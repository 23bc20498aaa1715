"""The store's numbers as Prometheus metrics.

Everything is read from ``stats()`` snapshots: nothing is counted twice, and a store that nobody
scrapes pays nothing. Labels are tiers, reasons and states, of which there are few; never keys,
salts or requests. ``prometheus_client`` is imported when the first metric is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvstore.stats import StoreStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

S = TypeVar("S")

Values = Mapping[tuple[str, ...], Any]  # by label values
# (kind, name after "kvstore_", labels, where the values are, help). Counters get "_total".
Family = tuple[str, str, tuple[str, ...], Callable[[S], Values], str]
Read = Callable[[StoreStats], Values]

_STATES = ("ok", "degraded", "read_only", "checking", "off")
_TIER, _REASON, _MOVE = ("tier",), ("reason",), ("src", "dst")


def number(name: str) -> Callable[[Any], Values]:
    """One value of a snapshot; ``name`` may be dotted."""
    return lambda stats: {(): attrgetter(name)(stats)}


def by_label(name: str) -> Callable[[Any], Values]:
    """A mapping of a snapshot, with one label."""
    return lambda stats: {(label,): value for label, value in attrgetter(name)(stats).items()}


def _tiers(name: str) -> Read:
    """A number of each tier."""
    return lambda stats: {(tier,): getattr(each, name) for tier, each in stats.tiers.items()}


def _states(stats: StoreStats) -> Values:
    return {
        (tier, state): int(each.state == state)
        for tier, each in stats.tiers.items()
        for state in _STATES
    }


def _promoted(stats: StoreStats) -> Values:
    return {(source, "device"): count for source, count in stats.promoted_blocks.items()}


def _demoted(stats: StoreStats) -> Values:
    return {("device", "host"): stats.demoted_blocks}


def _bytes(read: Read) -> Read:
    return lambda stats: {label: count * stats.block_bytes for label, count in read(stats).items()}


_FAMILIES: tuple[Family[StoreStats], ...] = (
    ("gauge", "capacity_bytes", _TIER, _tiers("capacity_bytes"), "Bytes the tier may hold"),
    ("gauge", "used_bytes", _TIER, _tiers("used_bytes"), "Bytes the tier holds"),
    ("gauge", "used_blocks", _TIER, _tiers("used_blocks"), "Blocks the tier holds"),
    ("gauge", "pinned_blocks", _TIER, _tiers("pinned_blocks"), "Of them, blocks that are pinned"),
    ("gauge", "tier_state", ("tier", "state"), _states, "1 for the state the tier is in"),
    ("counter", "hit_blocks", _TIER, _tiers("hits"), "Blocks found, by the fastest tier with them"),
    ("counter", "missed_blocks", _TIER, _tiers("misses"), "Blocks looked for and not found there"),
    ("counter", "stored_blocks", _TIER, _tiers("stored_blocks"), "Blocks the tier came to hold"),
    ("counter", "removed_blocks", _TIER, _tiers("removed_blocks"), "Blocks that left the tier"),
    ("counter", "evicted_blocks", _TIER, _tiers("evicted_blocks"), "Blocks that had to make room"),
    ("counter", "looked_up_blocks", (), number("looked_up_blocks"), "Blocks requests asked for"),
    ("counter", "merged_blocks", (), number("merged_blocks"), "Blocks computed twice, kept once"),
    ("counter", "failed_loads", _REASON, by_label("failed_loads"), "Blocks whose load failed"),
    (
        "counter",
        "load_decisions",
        _REASON,
        by_label("load_decisions"),
        "Verdicts: load or compute",
    ),
    ("counter", "promoted_blocks", _MOVE, _promoted, "Blocks copied to the device"),
    ("counter", "promoted_bytes", _MOVE, _bytes(_promoted), "Bytes copied to the device"),
    ("counter", "demoted_blocks", _MOVE, _demoted, "Blocks copied to host memory"),
    ("counter", "demoted_bytes", _MOVE, _bytes(_demoted), "Bytes copied to host memory"),
    ("counter", "written_blocks", (), number("written.written_blocks"), "Blocks written to disk"),
    ("counter", "written_bytes", (), number("written.written_bytes"), "Bytes written to disk"),
    (
        "counter",
        "unwritten_blocks",
        (),
        number("written.unwritten_blocks"),
        "Disk could not take it",
    ),
    (
        "gauge",
        "written_last_day_bytes",
        (),
        number("written_bytes_last_day"),
        "Bytes written to disk in the last 24 hours",
    ),
    ("gauge", "dirty_blocks", (), number("dirty_blocks"), "Blocks that disk does not hold yet"),
    (
        "gauge",
        "oldest_dirty_age_seconds",
        (),
        number("oldest_dirty_age_s"),
        "Of the oldest one",
    ),
    ("gauge", "unreachable_blocks", (), number("unreachable_blocks"), "An ancestor is in no tier"),
    ("gauge", "pending_transfers", (), number("pending_transfers"), "Transfers under way"),
    ("histogram", "promote_seconds", _TIER, by_label("promote_seconds"), "Loads from a tier"),
    (
        "histogram",
        "promote_queue_seconds",
        _TIER,
        by_label("queue_seconds"),
        "Of it, behind other loads",
    ),
    ("histogram", "write_seconds", (), number("write_seconds"), "Writes to disk, waiting included"),
)


def render(stats: StoreStats, labels: Mapping[str, str] | None = None) -> str:
    """A snapshot as text in Prometheus' format; ``labels`` are added to every sample."""
    return as_text(_FAMILIES, stats, labels)


def as_text(
    families: Sequence[Family[S]], stats: S, labels: Mapping[str, str] | None = None
) -> str:
    """The same of any snapshot, by its own table of families."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(families, lambda: stats, labels))
    return generate_latest(registry).decode()


class _Collector(Generic[S]):
    def __init__(
        self,
        families: Sequence[Family[S]],
        stats: Callable[[], S],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._families = families
        self._stats = stats
        self._labels = dict(labels or {})

    def describe(self) -> list["Metric"]:
        """Nothing, so that registering does not read the snapshot."""
        return []

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client import metrics_core

        kinds: Mapping[str, Any] = {
            "gauge": metrics_core.GaugeMetricFamily,
            "counter": metrics_core.CounterMetricFamily,
            "histogram": metrics_core.HistogramMetricFamily,
        }
        stats, more = self._stats(), tuple(self._labels.values())
        for kind, name, labels, read, text in self._families:
            family = kinds[kind](f"kvstore_{name}", text, labels=[*labels, *self._labels])
            for label, value in read(stats).items():
                if kind == "histogram":
                    family.add_metric(label + more, value.cumulative(), value.total)
                else:
                    family.add_metric(label + more, value)
            yield family


class StoreCollector(_Collector[StoreStats]):
    """For ``prometheus_client.REGISTRY.register``: calls ``stats`` at every scrape.

    ``stats`` is called on the scraper's thread (``LLM.stats`` may be). ``labels`` tell apart the
    stores that one process serves, such as ``{"model": name}``.
    """

    def __init__(
        self, stats: Callable[[], StoreStats], labels: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(_FAMILIES, stats, labels)
