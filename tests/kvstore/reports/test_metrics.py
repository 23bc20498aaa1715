import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import BlockMissingError
from kvstore.reports.metrics import StoreCollector, render
from kvstore.testing import FaultyDisk, MemoryDisk

A, B, C, END = [1] * 4, [2] * 4, [3] * 4, [9]


def samples(text):
    """Values by name and labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def engine(make_engine):
    """Has moved blocks through all tiers."""
    disk = FaultyDisk(MemoryDisk())
    engine = make_engine(4, host_blocks=3, disk=disk)
    for prompt in (A + B, C, A + B, [4] * 8, C):
        engine.run(prompt + END)
        engine.store.flush(10.0)
    engine.store.reset()
    disk.fail_reads = lambda ref: BlockMissingError("gone") if ref.depth == 1 else None
    engine.run(A + B + END)
    return engine


def test_every_number_of_a_tier_is_a_sample(engine):
    stats = engine.store.stats()
    found = samples(render(stats))
    names = {
        "kvstore_capacity_bytes": "capacity_bytes",
        "kvstore_used_bytes": "used_bytes",
        "kvstore_used_blocks": "used_blocks",
        "kvstore_pinned_blocks": "pinned_blocks",
        "kvstore_hit_blocks_total": "hits",
        "kvstore_missed_blocks_total": "misses",
        "kvstore_stored_blocks_total": "stored_blocks",
        "kvstore_removed_blocks_total": "removed_blocks",
        "kvstore_evicted_blocks_total": "evicted_blocks",
    }
    for name, field in names.items():
        for tier in ("device", "host", "disk"):
            assert found[name, ("tier", tier)] == getattr(stats.tiers[tier], field), (name, tier)
    assert found["kvstore_hit_blocks_total", ("tier", "disk")] > 0


def test_moves_between_tiers_count_blocks_and_bytes(engine):
    stats = engine.store.stats()
    found = samples(render(stats))
    for source in ("host", "disk"):
        move = (("dst", "device"), ("src", source))
        assert found["kvstore_promoted_blocks_total", *move] == stats.promoted_blocks[source] > 0
        assert found["kvstore_promoted_bytes_total", *move] == 128 * stats.promoted_blocks[source]
    move = (("dst", "host"), ("src", "device"))
    assert found["kvstore_demoted_blocks_total", *move] == stats.demoted_blocks > 0
    written = stats.written.written_blocks
    assert found["kvstore_written_blocks_total",] == written > 0
    assert found["kvstore_written_bytes_total",] == 128 * written
    assert found["kvstore_written_last_day_bytes",] == 128 * written


def test_failures_are_counted_by_reason(engine):
    found = samples(render(engine.store.stats()))
    assert found["kvstore_failed_loads_total", ("reason", "BlockMissingError")] == 1


def test_histograms_have_as_many_values_as_there_were_loads_and_writes(engine):
    stats = engine.store.stats()
    found = samples(render(stats))
    for name in ("promote_seconds", "promote_queue_seconds"):
        for tier in ("host", "disk"):
            count = found[f"kvstore_{name}_count", ("tier", tier)]
            assert count == stats.promote_seconds[tier].count > 0
            assert found[f"kvstore_{name}_bucket", ("le", "+Inf"), ("tier", tier)] == count
    assert found["kvstore_write_seconds_count",] == stats.write_seconds.count > 0


def test_the_state_of_a_tier_is_one_of_a_few(make_engine):
    found = samples(render(make_engine(4).store.stats()))
    states = {
        labels["state"]: value
        for (name, *pairs), value in found.items()
        if name == "kvstore_tier_state" and (labels := dict(pairs))["tier"] == "disk"
    }
    assert states == {"ok": 0, "degraded": 0, "read_only": 0, "checking": 0, "off": 1}


def test_names_follow_prometheus_rules(engine):
    for family in text_string_to_metric_families(render(engine.store.stats())):
        assert family.name.startswith("kvstore_")
        assert family.documentation
        units = ("_bytes", "_blocks", "_seconds", "_loads", "_decisions", "_transfers", "_state")
        assert family.name.endswith(units)


def test_labels_are_few_and_hold_no_content(engine):
    """However many requests there were, the number of samples is that of tiers and reasons."""
    before = len(samples(render(engine.store.stats())))
    for token in range(10, 30):
        engine.run([token] * 8 + END, salt=f"tenant {token}")
    text = render(engine.store.stats())
    assert len(samples(text)) == before
    assert "tenant" not in text


def test_constant_labels_tell_stores_apart(make_engine):
    registry = CollectorRegistry()
    for name in ("one", "two"):
        registry.register(StoreCollector(make_engine(4).store.stats, {"model": name}))
    for name in ("one", "two"):
        labels = {"tier": "device", "model": name}
        assert registry.get_sample_value("kvstore_capacity_bytes", labels) == 512


def test_registering_does_not_read_the_store():
    def stats():
        raise AssertionError("the store was read")

    CollectorRegistry().register(StoreCollector(stats))


def test_the_store_is_imported_without_prometheus():
    code = (
        "import sys; sys.modules['prometheus_client'] = None;"
        "import kvstore.store, kvstore.reports.metrics"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
