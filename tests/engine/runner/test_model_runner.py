"""Packed, chunked and decoded on a paged pool, every architecture gives what it gives eagerly."""

import threading

import pytest
import torch
from architectures import SUPPORTED, VOCAB, WINDOW, assert_close, eager_logits, load, tokens

from engine.model.loader import LoadedModel
from engine.runner.model_runner import ModelRunner, SequenceStep
from kvstore.errors import ConfigError


def make_pool(loaded: LoadedModel, num_blocks: int = 40) -> torch.Tensor:
    """Nothing in it is a number: what nobody wrote must not reach any output."""
    shape = (num_blocks, *loaded.layout.shape)
    return torch.full(shape, torch.nan, dtype=loaded.dtype, device=loaded.device)


class Workload:
    """Sequences with shuffled blocks, advanced step by step, each step's logits kept."""

    def __init__(self, loaded: LoadedModel, lengths: list[int], seed: int = 0) -> None:
        self.sequences = [tokens(length, seed + i) for i, length in enumerate(lengths)]
        self.done = [0] * len(lengths)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(39, generator=generator).tolist()
        self.tables = []
        for length in lengths:
            count = loaded.layout.blocks_for(length)
            self.tables.append([block + 1 for block in order[:count]])
            order = order[count:]

    def steps(self, counts: list[int], *, wants_logits: bool = True) -> list[SequenceStep]:
        steps = []
        for i, count in enumerate(counts):
            if count:
                start = self.done[i]
                new = self.sequences[i][start : start + count]
                steps.append(SequenceStep(new, start, self.tables[i], wants_logits))
                self.done[i] += count
        return steps


@pytest.mark.parametrize("name", SUPPORTED)
def test_paged_steps_equal_the_eager_forward(name):
    loaded = load(name)
    work = Workload(loaded, [45, 23, 33])
    expected = [eager_logits(loaded, sequence) for sequence in work.sequences]
    runner = ModelRunner(loaded, make_pool(loaded))
    # Chunks of several sizes, a chunk beside a single token, then steps of decoding alone.
    for counts in ([17, 20, 0], [23, 1, 9], [1, 0, 22], [1, 1, 1], [3, 0, 0], [0, 1, 1]):
        before = list(work.done)
        got = runner.score(work.steps(counts))
        rows = [
            expected[i][before[i] : before[i] + count] for i, count in enumerate(counts) if count
        ]
        assert_close(got, torch.cat(rows))
    assert work.done == [45, 23, 33]


def test_execute_returns_the_last_logits_of_those_that_want_them():
    loaded = load("Llama")
    work = Workload(loaded, [10, 6, 9])
    expected = [eager_logits(loaded, sequence) for sequence in work.sequences]
    steps = work.steps([10, 6, 9])
    steps[1] = SequenceStep(steps[1].token_ids, 0, steps[1].block_ids, wants_logits=False)
    got = ModelRunner(loaded, make_pool(loaded)).execute(steps)
    assert got.dtype == torch.float32
    assert_close(got, torch.stack([expected[0][-1], expected[2][-1]]))


def test_a_step_whose_logits_nobody_wants_still_fills_the_pool():
    loaded = load("Llama")
    work = Workload(loaded, [20])
    expected = eager_logits(loaded, work.sequences[0])
    runner = ModelRunner(loaded, make_pool(loaded))
    assert runner.execute(work.steps([19], wants_logits=False)).shape == (0, VOCAB)
    assert_close(runner.execute(work.steps([1])), expected[-1:])


def test_sequences_share_the_blocks_of_a_common_prefix():
    loaded = load("Gemma-2")
    prefix, ends = tokens(32, 1), [tokens(5, 2), tokens(9, 3)]
    runner = ModelRunner(loaded, make_pool(loaded))
    shared = [7, 3, 12, 5]
    runner.execute([SequenceStep(prefix, 0, shared, wants_logits=False)])
    steps = [SequenceStep(ends[0], 32, [*shared, 20], True)]
    steps.append(SequenceStep(ends[1], 32, [*shared, 9, 21], True))
    got = runner.execute(steps)
    for row, end in zip(got, ends, strict=True):
        assert_close(row, eager_logits(loaded, prefix + end)[-1])


def test_blocks_hold_full_attention_layers_first():
    """Layers 1 and 3 of this model are full attention: they are places 0 and 1 of a block."""
    loaded = load("Gemma-3")
    assert loaded.windows == (WINDOW, None, WINDOW, None)
    assert loaded.layer_order == (2, 0, 3, 1)


def test_only_the_slots_of_new_tokens_are_written():
    loaded = load("Llama")
    pool = make_pool(loaded)
    ModelRunner(loaded, pool).execute([SequenceStep(tokens(11, 0), 0, [4, 2], True)])
    written = ~pool.isnan()
    expected = torch.zeros_like(written)
    expected[4] = True
    expected[2, :, :, :3] = True
    assert torch.equal(written, expected)


def test_warm_up_leaves_the_pool_alone():
    loaded = load("Mistral")
    pool = make_pool(loaded)
    ModelRunner(loaded, pool).warm_up()
    assert pool.isnan().all()


def test_runners_of_one_model_in_several_threads_do_not_disturb_each_other():
    loaded = load("Gemma-2")
    num_threads, num_rounds = 3, 5
    jobs = [Workload(loaded, [30, 12], seed=10 * i) for i in range(num_threads)]
    plan = [[20, 5], [9, 6], [1, 1]]
    expected = []
    for job in jobs:
        logits = [eager_logits(loaded, sequence) for sequence in job.sequences]
        expected.append(torch.stack([logits[0][-1], logits[1][-1]]))
    barrier = threading.Barrier(num_threads)
    got: dict[int, list[torch.Tensor]] = {i: [] for i in range(num_threads)}

    def run(i: int) -> None:
        runner = ModelRunner(loaded, make_pool(loaded))
        for _ in range(num_rounds):
            jobs[i].done = [0, 0]
            barrier.wait(timeout=60)
            for counts in plan:
                last = runner.execute(jobs[i].steps(counts))
            got[i].append(last)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(num_threads):
        assert len(got[i]) == num_rounds
        for logits in got[i]:
            assert_close(logits, expected[i])


def test_a_frozen_key_does_not_depend_on_what_is_longer_in_the_batch():
    """transformers takes dynamic rope's frequencies from the longest position of the batch."""
    loaded = load("Llama, dynamic rope (frozen)")
    short, long = tokens(12, 1), tokens(100, 2)
    alone, beside = make_pool(loaded), make_pool(loaded)
    ModelRunner(loaded, alone).execute([SequenceStep(short, 0, [0, 1], True)])
    both = [SequenceStep(short, 0, [0, 1], True), SequenceStep(long, 0, range(2, 15), True)]
    ModelRunner(loaded, beside).execute(both)
    keys = alone[0, 0, 0], beside[0, 0, 0]
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "gpt-oss"])
def test_half_precision_models_run_in_their_dtype(name, dtype):
    loaded = load(name, dtype)
    assert loaded.layout.dtype == str(dtype).removeprefix("torch.")
    work = Workload(loaded, [30])
    expected = eager_logits(loaded, work.sequences[0])
    runner = ModelRunner(loaded, make_pool(loaded))
    got = torch.cat([runner.score(work.steps([count])) for count in (17, 12, 1)])
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 0.05


def test_attention_outside_a_runner_says_so():
    loaded = load("Llama")
    with pytest.raises(RuntimeError, match=r"ModelRunner\.execute"):
        loaded.model(input_ids=torch.tensor([[5, 6]]), use_cache=False)


def test_a_pool_of_another_shape_is_refused():
    loaded = load("Llama")
    with pytest.raises(ValueError, match="pool: expected"):
        ModelRunner(loaded, make_pool(loaded)[..., :4])
    with pytest.raises(ValueError, match="pool: expected"):
        ModelRunner(loaded, make_pool(loaded).half())


def test_too_few_blocks_are_refused():
    loaded = load("Llama")
    runner = ModelRunner(loaded, make_pool(loaded))
    with pytest.raises(ValueError, match="block_ids: expected 3, got 1"):
        runner.execute([SequenceStep(tokens(17, 0), 0, [4], True)])


def test_an_unknown_backend_is_refused():
    loaded = load("Llama")
    with pytest.raises(ConfigError, match="attention_backend: expected one of auto, torch, triton"):
        ModelRunner(loaded, make_pool(loaded), attention_backend="flash")
