"""Fixed shapes: a token's logits are the same bits whatever else is computed, or was cached."""

import contextlib
import random

import pytest
import torch
import transformers

from engine.model.loader import LoadedModel, prepare_model
from engine.runner.determinism import FixedShapes, run_identity
from engine.runner.model_runner import ModelRunner, SequenceStep

CPU = torch.device("cpu")
CHUNK = 256
NUM_TOKENS = 300  # one whole chunk and a part of the next
TABLE = 2 * CHUNK // 16

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": NUM_TOKENS + 10,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Llama": ("LlamaConfig", COMMON),
    "sliding window": ("MistralConfig", COMMON | {"sliding_window": 50}),
    "mixture of experts": ("MixtralConfig", COMMON | {"num_local_experts": 4}),
    # Padding reaches beyond the last position that it has an embedding for.
    "learned positions": (
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": NUM_TOKENS + 10}
        | {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


def make_loaded(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    name, settings = MODELS[kind]
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**settings), attn_implementation="eager"
    )
    return prepare_model(network.to(dtype), None, name=kind, deterministic=True)


@pytest.fixture(scope="module", params=MODELS)
def loaded(request) -> LoadedModel:
    return make_loaded(request.param)


class Pool:
    """A runner on a pool whose blocks hold NaN until they are written."""

    def __init__(self, loaded: LoadedModel, num_blocks: int = 400) -> None:
        shape = (num_blocks, *loaded.layout.shape)
        self.tensor = torch.full(shape, torch.nan, dtype=loaded.dtype)
        self._runner = ModelRunner(loaded, self.tensor, fixed_shapes=loaded.fixed_shapes)

    def run(self, *steps: SequenceStep) -> torch.Tensor:
        return self._runner.execute(steps)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


def read(pool: Pool, tokens: list[int], table: list[int]) -> torch.Tensor:
    """Logits of the last token of each chunk."""
    rows = [
        pool.run(SequenceStep(tokens[start : start + CHUNK], start, table, True))
        for start in range(0, len(tokens), CHUNK)
    ]
    return torch.cat(rows)


def test_a_prefix_that_was_moved_gives_the_bits_of_one_that_was_computed(loaded):
    tokens, table = prompt(0, NUM_TOKENS), list(range(TABLE))
    here = Pool(loaded)
    expected = read(here, tokens, table)
    there, moved = Pool(loaded), random.Random(1).sample(range(400), TABLE)
    there.tensor[moved[: CHUNK // 16]] = here.tensor[table[: CHUNK // 16]]
    (got,) = there.run(SequenceStep(tokens[CHUNK:], CHUNK, moved, True))
    assert not got.isnan().any()
    assert torch.equal(got, expected[-1])


def test_a_decoded_token_has_the_same_bits_in_every_batch(loaded):
    tokens, table = prompt(0, NUM_TOKENS), list(range(TABLE))
    alone = Pool(loaded)
    read(alone, tokens, table)
    (expected,) = alone.run(SequenceStep([5], NUM_TOKENS, table, True))

    crowded = Pool(loaded)
    read(crowded, tokens, table)
    others = []
    for i in range(10):  # more than one forward holds
        blocks = list(range(TABLE + 17 * i, TABLE + 17 * (i + 1)))
        read(crowded, prompt(i + 1, 20 + 7 * i), blocks)
        others.append(SequenceStep([i + 3], 20 + 7 * i, blocks, i % 2 == 0))
    steps = [*others[:6], SequenceStep([5], NUM_TOKENS, table, True), *others[6:]]
    rows = crowded.run(*steps)
    assert rows.shape[0] == 6
    assert torch.equal(rows[3], expected)


def test_chunks_and_decodes_of_one_step_do_not_touch_each_other(loaded):
    """The logits come back in the order of the steps, whichever forward computed them."""
    tokens, other = prompt(0, NUM_TOKENS), prompt(1, 40)
    table, blocks = list(range(TABLE)), list(range(TABLE, TABLE + 16))
    apart = Pool(loaded)
    expected = [*read(apart, other, blocks)]
    read(apart, tokens[:CHUNK], table)
    expected += [*apart.run(SequenceStep([7], 40, blocks, True))]
    expected += [*apart.run(SequenceStep(tokens[CHUNK:], CHUNK, table, True))]

    together = Pool(loaded)
    first = together.run(
        SequenceStep(tokens[:CHUNK], 0, table, False), SequenceStep(other, 0, blocks, True)
    )
    second = together.run(
        SequenceStep([7], 40, blocks, True), SequenceStep(tokens[CHUNK:], CHUNK, table, True)
    )
    assert torch.equal(torch.cat([first, second]), torch.stack(expected))


@pytest.mark.parametrize("kind", ["Llama", "sliding window", "learned positions"])
def test_a_token_has_the_same_keys_whatever_follows_it(kind):
    """Unpadded, the last chunk of a prompt would round as its length has it. A mixture of experts
    is left out: what a token shares an expert with, its padding included, decides the rounding."""
    loaded = make_loaded(kind, torch.float32)
    tokens, table = prompt(0, CHUNK), list(range(CHUNK // 16))
    short, long = Pool(loaded), Pool(loaded)
    read(short, tokens[:3], table)
    read(long, tokens, table)
    assert torch.equal(short.tensor[0, :, :, :3], long.tensor[0, :, :, :3])


def test_a_step_that_wants_no_logits_gives_none(loaded):
    pool = Pool(loaded)
    rows = pool.run(SequenceStep(prompt(0, 20), 0, list(range(16)), False))
    assert rows.shape == (0, loaded.vocab_size)


def test_padding_writes_only_into_the_blocks_of_its_sequence():
    pool, table = Pool(make_loaded()), list(range(30, 30 + CHUNK // 16))
    pool.run(SequenceStep(prompt(0, 20), 0, table, False))
    pool.run(SequenceStep([5], 20, table, True))
    written = ~pool.tensor.flatten(1).isnan().all(dim=1)
    assert written.nonzero().flatten().tolist() == table


def test_the_number_of_threads_stays_that_of_the_load():
    shapes = FixedShapes.of(CPU, 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        with shapes.in_force():
            assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_a_gpu_runs_operations_without_races_during_a_forward_alone():
    shapes = FixedShapes(chunk_tokens=1024, decode_rows=64, num_threads=None)
    with contextlib.suppress(KeyError), shapes.in_force():
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(("block_size", "chunk_tokens"), [(8, 256), (16, 256), (256, 256)])
def test_a_chunk_is_whole_blocks(block_size, chunk_tokens):
    assert FixedShapes.of(CPU, block_size).chunk_tokens == chunk_tokens


def test_what_changes_bits_is_named(monkeypatch):
    shapes = FixedShapes(256, 8, 2)
    same = run_identity(shapes, CPU, "torch")
    assert run_identity(shapes, CPU, "torch") == same
    assert run_identity(shapes, CPU, "triton") != same
    assert run_identity(FixedShapes(256, 8, 1), CPU, "torch") != same
    assert run_identity(FixedShapes(512, 8, 2), CPU, "torch") != same
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert run_identity(shapes, CPU, "torch") != same
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert run_identity(shapes, CPU, "torch") != same


def test_the_number_of_decode_rows_changes_no_block():
    """What is decoded is never reused, so a change of it keeps the cache."""
    first, second = (run_identity(FixedShapes(256, rows, 2), CPU, "torch") for rows in (8, 16))
    assert first == second


def test_only_the_mode_makes_the_run_a_part_of_the_identity():
    identity = make_loaded().identity["deterministic"]
    assert identity["threads"] == torch.get_num_threads()
    name, settings = MODELS["Llama"]
    network = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**settings), attn_implementation="eager"
    )
    assert prepare_model(network, None, name="plain").identity["deterministic"] is False
