import json

import harness
import pytest


def line(**changes):
    where = {"cpu": "a", "cores": 2, "memory_gib": 23.5, "load": 0.5, "python": "3.11"}
    whole = {"schema": 1, "benchmark": "b", "case": "c", "page_cache": "warm", "machine": where}
    return whole | changes


def test_what_a_benchmark_prints_keeps_the_schema(capsys):
    record = {"case": "c", "ratio": 0.5, "goal": 0.6, "goal_is": "at most"}
    harness.report("b", [record], harness.machine(), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert harness.problems(printed) == []
    assert printed["ratio"] == 0.5


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (line(schema=2), "schema: expected 1"),
        (line(case=None), "case: expected str"),
        (line(machine=None), "machine.cpu: expected str"),
        (line(goal=1.0, goal_is="at most"), "goal: expected a ratio"),
        (line(goal=1.0, ratio=0.5, goal_is="about"), "goal: expected a ratio"),
    ],
)
def test_a_line_that_breaks_the_schema_says_where(broken, said):
    assert any(said in problem for problem in harness.problems(broken))


@pytest.mark.parametrize(
    ("goal_is", "ratio", "slack", "is_missed"),
    [
        ("at most", 1.0, 1.0, False),
        ("at most", 1.01, 1.0, True),
        ("at most", 1.49, 1.5, False),
        ("at most", 1.51, 1.5, True),
        ("at least", 1.0, 1.0, False),
        ("at least", 0.99, 1.0, True),
        ("at least", 0.67, 1.5, False),
        ("at least", 0.66, 1.5, True),
    ],
)
def test_a_goal_is_missed_on_its_worse_side_only(goal_is, ratio, slack, is_missed):
    record = {"ratio": ratio, "goal": 1.0, "goal_is": goal_is}
    assert harness.misses_goal(record, slack) is is_missed


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order = []
    samples = harness.alternate(
        {name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 2
    )
    assert "".join(order) == "ababab"
    assert samples == {"a": [3, 5], "b": [4, 6]}


def test_a_ratio_pairs_samples_of_the_same_moment():
    assert harness.paired_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 2.0]) == 0.5


def test_a_result_file_with_a_broken_line_is_refused_with_its_number(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps(line()) + "\n" + json.dumps(line(case=1)) + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:2: case: expected str"):
        harness.read_results([file])


def test_results_that_are_kept_keep_the_schema():
    folder = harness._ROOT / "benchmarks" / "results"
    files = sorted(folder.glob("*.jsonl"))
    assert files
    assert harness.read_results(files)


def test_progress_says_how_much_is_done_and_how_long_the_rest_takes(capsys):
    progress = harness.Progress(4, iter([100.0, 130.0, 220.0]).__next__)
    progress.add(1, "first")
    progress.add(3, "second")
    assert capsys.readouterr().err.splitlines() == [
        " 25%  about 1.5 min left  first",
        "100%  about 0.0 min left  second",
    ]
