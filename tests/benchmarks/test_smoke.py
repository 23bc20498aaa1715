import importlib
from pathlib import Path

import pytest
import smoke


def test_every_benchmark_has_a_toy_run_or_a_reason():
    folder = Path(smoke.__file__).parent
    named = {path.stem.removeprefix("bench_").replace("_", "-") for path in folder.glob("bench_*")}
    assert named == set(smoke.TOYS) | set(smoke.LEFT_OUT)
    assert not set(smoke.TOYS) & set(smoke.LEFT_OUT)


@pytest.mark.parametrize("name", smoke.TOYS)
def test_toy_options_are_options_of_the_benchmark(name):
    module = importlib.import_module(f"bench_{name.replace('-', '_')}")
    assert set(smoke.TOYS[name].options) <= set(module.OPTIONS)
    assert smoke.TOYS[name].bounds


def test_a_ratio_beyond_its_bound_with_slack_ends_with_1(monkeypatch, capsys):
    records = [
        {"case": "good", "ratio": 1.4, "goal": 1.0, "goal_is": "at most"},
        {"case": "bad", "ratio": 1.6, "goal": 1.0, "goal_is": "at most"},
    ]
    monkeypatch.setattr(smoke, "run", lambda *_: records)
    monkeypatch.setattr(smoke, "toy_model", str)
    monkeypatch.setattr(smoke, "share_weights", lambda: None)
    monkeypatch.setattr("sys.argv", ["smoke.py", "store"])
    with pytest.raises(SystemExit, match=r"worse than the bound: store bad$"):
        smoke.main()
    assert capsys.readouterr().out.count("fine") == 1


@pytest.mark.parametrize(
    ("tries", "worse"),
    [
        ([(1.6, 1.0), (1.4, 1.0)], []),
        ([(1.6, 1.0), (1.7, 1.0), (1.4, 1.0)], []),
        ([(1.6, 1.0), (1.4, 1.9)], []),  # another one is worse the second time
        ([(1.6, 1.0), (1.6, 1.9), (1.6, 1.0)], ["store a"]),
    ],
)
def test_a_ratio_is_worse_when_every_run_says_so(monkeypatch, tries, worse):
    runs = iter(tries)

    def run(*_):
        return [
            {"case": case, "ratio": ratio, "goal": 1.0, "goal_is": "at most"}
            for case, ratio in zip("ab", next(runs), strict=True)
        ]

    monkeypatch.setattr(smoke, "run", run)
    assert smoke.run_all(["store"], "model") == worse
    assert list(runs) == []
