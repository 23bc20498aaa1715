import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lru_oracle import batch_of, lru_hits

from kvstore.planning import read_trace
from kvstore.planning.dominance import count_larger_before
from kvstore.planning.stack_distance import COLD, StackDistances

BLOCKS = st.integers(0, 12)
REQUESTS = st.lists(st.lists(BLOCKS, max_size=9), min_size=1, max_size=30)


@given(st.permutations(range(37)), st.lists(st.integers(0, 37), min_size=37, max_size=37))
def test_larger_elements_before_a_place_are_counted(ranks, ends):
    counted = count_larger_before(np.array(ranks), np.array(ends))
    assert list(counted) == [
        sum(rank > own for rank in ranks[:end]) for own, end in zip(ranks, ends, strict=True)
    ]


@given(REQUESTS, st.integers(1, 7))
def test_one_pass_equals_an_lru_cache_of_every_size(requests, batch_size):
    """Of any ids: with holes, with blocks twice in a request, with requests larger than a cache."""
    distances, above, batches = StackDistances(), [], []
    for start in range(0, len(requests), batch_size):
        batches.append(batch_of(requests[start : start + batch_size]))
        above.append(distances.of(batches[-1]))
    for capacity in range(1, 15):
        hits = [
            count
            for batch, each in zip(batches, above, strict=True)
            for count in batch.per_request((each < capacity).astype(int)).tolist()
        ]
        assert hits == lru_hits(requests, capacity)


def test_one_pass_equals_an_lru_cache_on_published_traces(trace):
    requests = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    (batch,) = read_trace(trace)
    above = StackDistances().of(batch)
    for capacity in (1, 30, 500, 2000):
        hits = batch.per_request((above < capacity).astype(int)).tolist()
        assert hits == lru_hits(requests, capacity)


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=30))
def test_with_prefix_keys_a_block_lies_above_its_children(prompts):
    """So a cache of any size holds whole prefixes, and a block's own distance is its prefix's."""
    keys: dict[tuple[int, ...], int] = {}
    requests = [
        [keys.setdefault(tuple(prompt[: end + 1]), len(keys)) for end in range(len(prompt))]
        for prompt in [[9], *prompts]
    ]
    distances = StackDistances()
    distances.of(batch_of(requests))
    assert distances.num_behind_hole == 0


def test_blocks_behind_a_hole_need_the_larger_cache_and_are_counted():
    distances = StackDistances()
    above = distances.of(batch_of([[1], [2], [3], [1, 3]]))
    assert above.tolist() == [COLD, COLD, COLD, 2, 2]
    assert distances.num_behind_hole == 1


def test_forgotten_blocks_are_cold_again():
    distances = StackDistances()
    distances.of(batch_of([[1, 2, 3]]))
    distances.keep_only(distances.ids != 2)
    assert distances.num_blocks == 2
    assert distances.of(batch_of([[3], [2]])).tolist() == [1, COLD]
