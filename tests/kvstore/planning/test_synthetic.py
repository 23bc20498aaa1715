import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.planning import BlockSampler, make_plan, read_trace
from kvstore.planning.lru_curve import LruCurve
from kvstore.planning.synthetic import Workload, generate, write_mooncake

WORKLOAD = Workload(documents=200, sessions=20)


def saved(workload: Workload, capacity: int, num_requests: int = 4000) -> float:
    plan = make_plan(generate(workload, num_requests), capacities=[capacity])
    return plan.curves["lru"][0].outcome.hit_ratio_tokens


def test_a_seed_gives_one_trace():
    def blocks(workload: Workload) -> list[int]:
        return np.concatenate([batch.blocks for batch in generate(workload, 500)]).tolist()

    assert blocks(WORKLOAD) == blocks(WORKLOAD)
    assert blocks(WORKLOAD) != blocks(replace(WORKLOAD, seed=1))


def test_a_written_trace_is_read_back(tmp_path):
    path = tmp_path / "trace"
    with path.open("w") as file:
        write_mooncake(generate(WORKLOAD, 300), file)
    (batch,), (read,) = generate(WORKLOAD, 300), read_trace(path)
    assert read.blocks.tolist() == batch.blocks.tolist()
    assert read.num_tokens.tolist() == batch.num_tokens.tolist()
    assert read.arrival_s == pytest.approx(batch.arrival_s, abs=0.001)


def test_blocks_name_prefixes():
    parents: dict[int, int | None] = {}
    for batch in generate(WORKLOAD, 2000):
        for blocks, num_tokens, _ in batch.prompts():
            before = None
            for block in blocks.tolist():
                assert parents.setdefault(block, before) == before
                before = block
            assert num_tokens == 512 * len(blocks)


def test_a_session_grows_turn_by_turn():
    one = replace(WORKLOAD, sessions=1, turns=1000.0, turn_blocks=3)
    (batch,) = generate(one, 5)
    prompts = [blocks.tolist() for blocks, _, _ in batch.prompts()]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
        assert len(later) == len(earlier) + 3


def test_popular_documents_are_worth_a_small_cache_and_drift_makes_it_worthless():
    still = replace(WORKLOAD, turns=1, turn_blocks=0, documents=1000)
    alike, popular = saved(replace(still, zipf=0.0), 1000), saved(replace(still, zipf=1.2), 1000)
    moving = saved(replace(still, zipf=1.2, drift=0.5), 1000)
    assert alike < 0.1 < 0.4 < popular
    assert moving < 0.7 * popular


def test_a_long_trace_is_sampled_within_its_bound():
    curve = LruCurve(BlockSampler(most_blocks=2000))
    for batch in generate(replace(WORKLOAD, documents=20_000, zipf=0.8), 40_000):
        curve.add(batch)
    assert curve.num_blocks > 800_000
    assert curve.distances.num_blocks <= 2000
    assert curve.distances.num_behind_hole == 0


def test_the_generator_is_a_command():
    command = [sys.executable, "-m", "kvstore.planning.synthetic", "--requests", "3"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(result.stdout.splitlines()) == 3
    wrong = subprocess.run([*command, "--turns", "0"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].endswith("turns: expected at least 1, got 0.0")


@pytest.mark.parametrize(
    "values", [{"documents": 0}, {"zipf": -1.0}, {"requests_per_s": 0.0}, {"turns": 0.5}], ids=str
)
def test_a_workload_that_cannot_be_is_refused(values):
    with pytest.raises(ConfigError):
        Workload(**values)
