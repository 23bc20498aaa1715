import bench_report
import pytest

SECONDS = {"median": 0.5, "p90": 0.6, "p99": 0.7, "max": 0.8, "runs": 9}
MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 8.0,
    "load": 0.25,
    "python": "3.11.7",
    "commit": "abc",
    "torch": "2.13.0",
}


def record(**fields):
    return {"schema": 1, "benchmark": "ttft", "page_cache": "warm", "machine": MACHINE} | fields


def offload(tier, multiple):
    return record(
        benchmark="offload",
        case=f"{tier} uniform {multiple}",
        tier=tier,
        popularity="uniform",
        multiple=multiple,
        hit_share={"device": 0.25, "disk": 0.25, "computed": 0.5},
        ttft_s=SECONDS,
        recompute_ttft_s=SECONDS,
        tokens_per_s=900.0,
        recompute_tokens_per_s=300.0,
    )


@pytest.fixture
def page(tmp_path):
    records = [
        record(case="device", ttft_s=SECONDS, ratio=0.1, goal=0.125, goal_is="at most", runs=9),
        record(case="host", ttft_s=SECONDS, ratio=0.2, goal=0.125, goal_is="at most", runs=9),
        *(offload(tier, multiple) for tier in ("device", "disk") for multiple in (0.5, 1.0, 2.0)),
    ]
    return bench_report.page(records, tmp_path), tmp_path


def test_a_page_has_a_table_for_each_benchmark_with_its_command(page):
    text, _ = page
    assert "## ttft" in text
    assert "`kvstore bench ttft`" in text
    assert "In all rows: page_cache warm, ttft_s 0.5 · 0.6 · 0.7 · 0.8" in text
    assert "| device | 0.1 | at most 0.125 |" in text


def test_a_missed_goal_says_so(page):
    text, _ = page
    assert "| host | 0.2 | at most 0.125 **missed** |" in text
    assert text.count("**missed**") == 1


def test_a_page_names_the_machine_and_the_load(page):
    text, _ = page
    assert "A CPU, 2 cores, 8.0 GiB, Python 3.11.7, torch 2.13.0, commit abc; load 0.2." in text


def test_pictures_lie_beside_the_page(page):
    text, folder = page
    for name in ("goals.svg", "offload.svg"):
        assert f"({name})" in text
        assert (folder / name).read_text().count("<path") > 10
