"""Decode graphs without a GPU: a stand-in captures by remembering the function, replays by calling
it again, and demands that it finds everything where it was."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from architectures import BLOCK, MAX_LEN, VOCAB, assert_close, load, make_network, tokens
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from engine import parts
from engine.model.loader import LoadedModel, prepare_model
from engine.runner import decode_graphs, model_runner
from engine.runner.attention_backends import find_backend
from engine.runner.decode_graphs import bucket_sizes
from engine.runner.determinism import FixedShapes
from engine.runner.model_runner import ModelRunner, SequenceStep
from engine.runner.staging import Staging
from engine.sampling.sampler import SampleRequest, sample
from engine.sampling.sampling_params import SamplingParams

NUM_BLOCKS = 64


class FakeGraphs:
    """``sees`` is told of every tensor that a kernel of the captured function is called with."""

    def __init__(self) -> None:
        self.captured: list[int] = []  # batch sizes, in order
        self.replayed: list[int] = []
        self._seen: list[tuple[int, torch.Size]] = []

    def sees(self, *tensors: torch.Tensor) -> None:
        if not isinstance(tensors[0], FakeTensor):  # before anything is captured
            self._seen += [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    def capture(self, run: Callable[[], None]) -> "FakeGraph":
        graph = FakeGraph(self, run, self._addresses(run))
        self.captured.append(graph.size)
        return graph

    def _addresses(self, run: Callable[[], None]) -> list[tuple[int, torch.Size]]:
        self._seen = []
        run()
        seen, self._seen = self._seen, []
        return seen


class FakeGraph:
    def __init__(self, api: FakeGraphs, run: Callable[[], None], addresses: list) -> None:
        self._api, self._run, self._addresses = api, run, addresses
        self.size = addresses[0][1][-1]  # token ids come first

    def replay(self) -> None:
        self._api.replayed.append(self.size)
        assert self._api._addresses(self._run) == self._addresses


@pytest.fixture
def graphs(monkeypatch) -> FakeGraphs:
    """Runners that are made meanwhile believe that their attention can be captured."""
    api = FakeGraphs()

    def capturable(*arguments, **options):
        twins = find_backend(*arguments, **options)

        def write_kv(k, v, k_pool, v_pool, slots):
            api.sees(k_pool, v_pool, slots)
            twins.write_kv(k, v, k_pool, v_pool, slots)

        def paged_decode(q, k_pool, v_pool, block_tables, seq_lens, **options):
            api.sees(k_pool, v_pool, block_tables, seq_lens)
            return twins.paged_decode(q, k_pool, v_pool, block_tables, seq_lens, **options)

        return replace(twins, write_kv=write_kv, paged_decode=paged_decode, is_capturable=True)

    monkeypatch.setattr(model_runner, "find_backend", capturable)
    return api


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return load("Llama")


@pytest.fixture
def spied(llama, graphs):
    """The model tells the stand-in where its inputs are."""

    def before(_, __, inputs):
        graphs.sees(inputs["input_ids"], inputs["position_ids"])

    hook = llama.model.register_forward_pre_hook(before, with_kwargs=True)
    yield llama
    hook.remove()


def make_pool(loaded: LoadedModel) -> torch.Tensor:
    return torch.full((NUM_BLOCKS, *loaded.layout.shape), torch.nan)


class Conversations:
    """The same sequences on two runners, each with a pool of its own."""

    def __init__(self, loaded: LoadedModel, *runners: ModelRunner) -> None:
        self.runners = runners
        self.texts: list[list[int]] = []
        self.tables: list[list[int]] = []
        self._free = list(range(1, NUM_BLOCKS))

    def begin(self, *lengths: int) -> None:
        for length in lengths:
            self.texts.append(tokens(length, len(self.texts)))
            count = -(-length // BLOCK)
            self.tables.append([self._free.pop() for _ in range(count)])
            step = SequenceStep(self.texts[-1], 0, self.tables[-1], wants_logits=False)
            for runner in self.runners:
                runner.execute([step])

    def decode(self, *which: int) -> None:
        """One more token of each, in this order; all runners must agree."""
        steps = []
        for i in which:
            prefix = len(self.texts[i])
            self.texts[i].append(3 + (prefix * 7 + i) % 90)
            if prefix % BLOCK == 0:
                self.tables[i].append(self._free.pop())
            steps.append(SequenceStep(self.texts[i][-1:], prefix, self.tables[i], True))
        first, *others = (runner.execute(steps).clone() for runner in self.runners)
        for other in others:
            assert_close(first, other)


def graphed(loaded: LoadedModel, graphs: FakeGraphs | None, **options) -> ModelRunner:
    runner = ModelRunner(loaded, make_pool(loaded), graphs=graphs, **options)
    runner.warm_up()
    return runner


def test_buckets_are_powers_of_two_and_the_largest_batch():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(11) == (1, 2, 4, 8, 11)


def test_replayed_steps_equal_eager_ones(spied, graphs):
    runner = graphed(spied, graphs, max_num_seqs=5)
    assert graphs.captured == [5, 4, 2, 1]
    talk = Conversations(spied, runner, ModelRunner(spied, make_pool(spied)))
    talk.begin(13, 5, 24, 3, 8)
    # Batches grow and shrink, rows change places, blocks fill up.
    rounds = [(0,), (0, 1, 2), (2, 1, 0), (3, 4), (0, 1, 2, 3, 4), (4, 0), (1, 2, 3)]
    for which in rounds * 3:
        talk.decode(*which)
    # A sequence that gets other blocks, as when equal ones are merged.
    talk.tables[0][0], talk.tables[1][0] = talk.tables[1][0], talk.tables[0][0]
    for each in talk.runners:
        each._pool[[talk.tables[0][0], talk.tables[1][0]]] = each._pool[
            [talk.tables[1][0], talk.tables[0][0]]
        ]
    talk.decode(0, 1)
    assert graphs.replayed == [1, 4, 4, 2, 5, 2, 4] * 3 + [2]


def test_padding_and_captures_write_nothing_into_the_pool(spied, graphs):
    runner = graphed(spied, graphs, max_num_seqs=8)
    assert runner._pool.isnan().all()
    talk = Conversations(spied, runner)
    talk.begin(9, 4, 6)
    before = (~runner._pool.isnan()).sum()
    talk.decode(0, 1, 2)  # in a graph of four
    assert (~runner._pool.isnan()).sum() - before == 3 * runner._pool[0, :, :, 0].numel()


def test_a_step_is_one_copy_and_a_second_one_when_a_block_is_new(spied, graphs, monkeypatch):
    sent = []

    class Counted(Staging):
        def send(self, array, target=None):
            sent.append(array.shape)
            return super().send(array, target)

    monkeypatch.setattr(decode_graphs, "Staging", Counted)
    talk = Conversations(spied, graphed(spied, graphs, max_num_seqs=2))
    talk.begin(14, 13)
    talk.decode(0, 1)  # both tables are new to the device, two blocks each
    sent.clear()
    counts = []
    for _ in range(5):
        talk.decode(0, 1)
        counts.append(len(sent))
        sent.clear()
    assert counts == [1, 2, 2, 1, 1]


def test_prefill_and_steps_beyond_the_largest_batch_are_not_replayed(spied, graphs):
    talk = Conversations(spied, graphed(spied, graphs, max_num_seqs=2))
    talk.begin(5, 6, 7)
    talk.decode(0, 1, 2)
    assert graphs.replayed == []


def test_no_graph_is_captured_where_it_is_not_wanted_or_possible(llama, graphs):
    assert not graphed(llama, graphs, enforce_eager=True).has_graphs
    assert not graphed(llama, None).has_graphs
    assert graphs.captured == []


def test_attention_that_plans_on_the_host_is_not_captured(llama):
    graphs = FakeGraphs()  # without the fixture: the twins look at the lengths
    assert not graphed(llama, graphs).has_graphs
    assert graphs.captured == []


def test_a_rehearsal_captures_the_largest_graph_only(spied, graphs):
    ModelRunner(spied, make_pool(spied), graphs=graphs).warm_up(100, is_rehearsal=True)
    assert graphs.captured == [64]


def test_deterministic_steps_have_the_same_bits_replayed(spied, graphs):
    shapes = FixedShapes(chunk_tokens=16, decode_rows=4, num_threads=torch.get_num_threads())
    runners = [graphed(spied, api, max_num_seqs=8, fixed_shapes=shapes) for api in (graphs, None)]
    assert graphs.captured == [4]
    tables = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]
    got = []
    for runner in runners:
        for i, table in enumerate(tables):
            runner.execute([SequenceStep(tokens(9 + i, i), 0, table, wants_logits=False)])
        steps = [SequenceStep([7 + i], 9 + i, table, True) for i, table in enumerate(tables)]
        got.append(runner.execute(steps))
    assert torch.equal(*got)
    assert graphs.replayed == [4, 4]


def test_an_engine_on_graphs_answers_as_transformers_does(
    graphs, make_llm, tiny_prompts, tiny_oracle, monkeypatch
):
    graphs.capture = lambda run: FakeReplay(graphs, run)  # this model is not spied on

    def with_graphs(*arguments, **options):
        return ModelRunner(*arguments, **options, graphs=graphs)

    monkeypatch.setattr(parts, "ModelRunner", with_graphs)
    llm = make_llm(max_num_seqs=6)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for prompt, output in zip(
        tiny_prompts[:8], llm.generate(tiny_prompts[:8], params), strict=True
    ):
        tiny_oracle.assert_equal(prompt, output.outputs[0].token_ids)
    assert len(graphs.replayed) > 10


class FakeReplay:
    def __init__(self, api: FakeGraphs, run: Callable[[], None]) -> None:
        self._api, self._run = api, run

    def replay(self) -> None:
        self._api.replayed.append(0)
        self._run()


# ---- what the host waits for ---------------------------------------------------------------------

# One of each way to write a model. float32 has no grouped product without values.
WAYS = ["Gemma-2", "Phi-3, longrope (frozen)", "GPT-J", "OPT"]
EXPERTS = ["Mixtral", "gpt-oss"]


@pytest.mark.parametrize("name", WAYS + EXPERTS)
def test_no_forward_of_decoding_looks_at_values(name):
    loaded = load(name, torch.bfloat16 if name in EXPERTS else torch.float32)
    assert ModelRunner(loaded, make_pool(loaded).to(loaded.dtype)).find_obstacle() is None


def test_experts_in_a_loop_are_found_and_run_without_graphs(graphs, caplog):
    network = make_network("Mixtral")
    network.set_experts_implementation("eager")
    loaded = prepare_model(network, None, name="Mixtral", block_size=BLOCK, max_model_len=MAX_LEN)
    runner = ModelRunner(loaded, make_pool(loaded), graphs=graphs)
    with caplog.at_level("INFO", logger="engine"):
        runner.warm_up()
    assert not runner.has_graphs
    assert "not captured as graphs: DynamicOutputShapeException: aten.nonzero" in caplog.text


def test_a_model_that_reads_one_number_is_found(llama):
    runner = ModelRunner(llama, make_pool(llama))
    hook = llama.model.model.layers[1].register_forward_hook(
        lambda _, __, out: out if out.sum() > 0 else -out
    )
    try:
        assert "_local_scalar_dense" in runner.find_obstacle()
    finally:
        hook.remove()


def test_a_step_fetches_its_tokens_and_nothing_else(llama, monkeypatch):
    """From the lists of the scheduler to the tokens: whatever else looked at a value would fail."""
    runner = ModelRunner(llama, make_pool(llama))
    runner._context.backend = model_runner._NO_ATTENTION
    steps = [SequenceStep([5], 17, [1, 2, 3], True), SequenceStep([6, 7, 8], 0, [4], True)]
    fetched = []
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: fetched.append(self.shape) or [3, 3])
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = runner.execute(steps)
        assert logits.shape == (2, VOCAB)
        sample(logits, [SampleRequest(SamplingParams(temperature=0.0))] * 2)
    assert fetched == [(2,)]
