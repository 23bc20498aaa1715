"""``kvstore plan`` on excerpts of published traces, as a script would call it."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import plan_picture
from tools.commands import run

TRACE = Path(__file__).parents[1] / "data" / "mooncake_synthetic.jsonl"
SMALL = ("--capacity-blocks", "100,1000")


@pytest.fixture
def plan(capsys):
    """Runs ``kvstore plan`` in this process: status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = run(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_json_of_a_plan_has_its_documented_keys(plan):
    status, stdout, _ = plan(TRACE, *SMALL, "--json")
    report = json.loads(stdout)
    assert status == 0
    records = [json.loads(line) for line in TRACE.read_text().splitlines()]
    blocks = [block for record in records for block in record["hash_ids"]]
    assert report["trace"] == {
        "requests": len(records),
        "blocks": len(blocks),
        "tokens": sum(record["input_length"] for record in records),
        "unique_blocks": len(set(blocks)),
        "block_tokens": 512,
        "duration_s": records[-1]["timestamp"] / 1000,
    }
    assert report["policy"] == "lru"
    assert [point["capacity_blocks"] for point in report["curve"]] == [100, 1000]
    for point in report["curve"]:
        assert 0 <= point["hit_ratio_blocks"] <= point["hit_ratio_tokens"] <= 1
        assert point["capacity_bytes"] == point["capacity_blocks"] * 512 * 131072
    assert report["recommendation"].startswith(("host ", "No size pays"))


def test_what_nobody_chose_is_said_with_how_to_choose_it(plan):
    _, _, stderr = plan(TRACE, *SMALL)
    assert stderr == (
        "kvstore: assuming the model llama-3.1-8b on h100: choose with --model and --hardware\n"
    )
    _, _, stderr = plan(TRACE, *SMALL, "--model", "demo")
    assert stderr == "kvstore: assuming h100: choose with --hardware\n"
    _, _, stderr = plan(TRACE, *SMALL, "--model", "demo", "--hardware", "l4")
    assert stderr == ""


def test_the_table_says_sizes_ratios_and_what_to_buy(plan):
    status, stdout, _ = plan(TRACE, *SMALL, "--model", "smollm2-135m", "--hardware", "epyc-2-cores")
    assert status == 0
    assert "smollm2-135m: 22.5 KiB a token, 11.2 MiB a block" in stdout
    assert "first uses only" in stdout
    assert stdout.splitlines()[-1].endswith(".")


def test_policies_and_splits_become_rows_of_csv(plan):
    status, stdout, _ = plan(
        TRACE, "--policy", "lru,slru", "--capacity-blocks", "1000", "--device-cache", "10GiB",
        "--host-cache", "0,20GiB", "--disk-cache-size", "200GiB", "--csv",
    )  # fmt: skip
    rows = list(csv.DictReader(stdout.splitlines()))
    assert status == 0
    assert [row["policy"] for row in rows] == ["lru", "slru", "lru", "lru", "slru", "slru"]
    assert [row["host_blocks"] for row in rows] == ["", "", "0", "320", "0", "320"]
    assert all(float(row["ttft_median_s"]) > 0 for row in rows)
    assert int(rows[2]["disk_tokens"]) > 0


def test_the_demo_is_a_model_here_too(plan):
    status, stdout, _ = plan(TRACE, *SMALL, "--model", "demo")
    assert status == 0
    assert "smollm2-135m: 22.5 KiB a token" in stdout


def test_a_sample_comes_with_its_error(plan):
    status, stdout, _ = plan(TRACE, *SMALL, "--sample", "0.5")
    assert status == 0
    assert "sample      50 % of the blocks" in stdout
    assert " ± " in stdout


def test_a_trace_comes_through_a_pipe(tmp_path):
    result = subprocess.run(
        [Path(sys.executable).with_name("kvstore"), "plan", "-", *SMALL, "--json"],
        input=TRACE.read_bytes(),
        capture_output=True,
        check=True,
    )
    assert json.loads(result.stdout)["trace"]["requests"] == 200


def test_texts_are_tokenised_by_the_named_tokenizer(plan, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["the", "cat", "sat", "on", "<?>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<?>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trace = tmp_path / "texts.jsonl"
    trace.write_text(f"{json.dumps('the cat sat on ' * 8)}\n" * 3)
    status, stdout, _ = plan(trace, "--tokenizer", tmp_path, "--json", "--capacity-blocks", "2")
    assert status == 0
    report = json.loads(stdout)
    assert report["trace"]["blocks"] == 6
    assert report["curve"][0]["hit_ratio_blocks"] == pytest.approx(4 / 6)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_is_of_the_kind_that_its_name_says(plan, tmp_path, suffix):
    target = tmp_path / f"curve.{suffix}"
    status, _, _ = plan(TRACE, *SMALL, "--plot", target)
    assert status == 0
    start = target.read_bytes()[:200]
    assert (b"<svg" in target.read_bytes()) if suffix == "svg" else start.startswith(b"\x89PNG")


def test_curves_are_told_apart_without_colours(plan, tmp_path):
    styles = {(line, marker) for line, marker in plan_picture._STYLES}
    assert len(styles) == len({line for line, _ in styles}) == len({mark for _, mark in styles})
    target = tmp_path / "curve.svg"
    plan(TRACE, *SMALL, "--plot", target)
    colours = set(re.findall("#[0-9a-f]{6}", target.read_text()))
    assert colours
    assert {c for c in colours if not c[1:3] == c[3:5] == c[5:7]} == set()


def test_a_picture_without_matplotlib_says_what_to_install(plan, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, stdout, stderr = plan(TRACE, *SMALL, "--plot", tmp_path / "curve.png")
    assert (status, stdout) == (1, "")
    assert stderr == "kvstore: --plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["absent.jsonl"],
        [TRACE, "--capacity-blocks", "many"],
        [TRACE, "--capacity-blocks", "0"],
        [TRACE, "--policy", "mru"],
        [TRACE, "--policy", ","],
        [TRACE, "--capacity-blocks", ""],
        [TRACE, "--device-cache", ""],
        [TRACE, "--device-cache", "1GiB", "--host-cache", ","],
        [TRACE, "--device-cache", "1GiB", "--write-policy", ""],
        [TRACE, "--sample", "2"],
        [TRACE, "--host-cache", "64GiB"],
        [TRACE, "--capacity-blocks", "9" * 30],
        [TRACE, "--sample", "nan"],
        [TRACE, "--block-size", "9" * 30],
        [TRACE, "--model-bytes-per-token", "9" * 30],
        [TRACE, "--device-cache", "1KiB"],
        [TRACE, "--device-cache", "9" * 30 + "TiB"],
        [TRACE, "--device-cache", "9" * 400],
        [TRACE, "--device-cache", "1GiB", "--write-policy", "never"],
        [TRACE, "--model", "absent"],
        [TRACE, "--plot", "curve.pdf"],
        [TRACE, "--plot", "absent/curve.png"],
        [TRACE, "--tokenizer", "absent.json"],
        [TRACE, "--json", "--csv"],
    ],
    ids=lambda arguments: " ".join(str(each)[-30:] for each in arguments[-2:]),
)
def test_wrong_usage_is_one_line_and_2(plan, arguments):
    status, stdout, stderr = plan(*arguments)
    assert (status, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1


def test_a_split_without_a_device_names_the_option_and_not_a_value_that_nobody_gave(plan):
    assert "needs --device-cache" in plan(TRACE, "--host-cache", "64GiB")[2]


def test_a_bad_trace_is_one_line_and_1(plan, tmp_path):
    trace = tmp_path / "trace"
    trace.write_text('{"input_length": 5, "hash_ids": [1]}\n{"input_length": 5}\n')
    status, stdout, stderr = plan(trace)
    assert (status, stdout) == (1, "")
    assert stderr == (f"kvstore: {trace} line 2: expected hash_ids, a list of block ids\n")
