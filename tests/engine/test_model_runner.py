"""Packed, chunked and decoded on a paged pool, every architecture gives what it gives eagerly.

``SUPPORTED`` is the table of docs/models.md. The models are tiny and random, their weights spread
widely enough that the output depends on all of the input.
"""

import re
import threading
from pathlib import Path

import pytest
import torch
import transformers

from engine.attention import PAGED
from engine.model_loader import LoadedModel, prepare_model
from engine.model_runner import ModelRunner, SequenceStep
from kvstore.errors import ConfigError

VOCAB = 97
BLOCK = 8
WINDOW = 24
MAX_LEN = 128

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_STYLE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": WINDOW}
MIXED = {"sliding_window": WINDOW, "num_hidden_layers": 4}


def rope(rope_type: str, **parameters) -> dict:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


SUPPORTED = {
    "Llama": ("LlamaConfig", COMMON),
    "Llama, untied, attention bias": (
        "LlamaConfig",
        COMMON | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "Llama, tied": ("LlamaConfig", COMMON | {"tie_word_embeddings": True}),
    "Llama, linear rope": ("LlamaConfig", COMMON | rope("linear", factor=2.0)),
    "Llama, YaRN rope": (
        "LlamaConfig",
        COMMON | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "Llama, llama3 rope": (
        "LlamaConfig",
        COMMON
        | rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "Llama, dynamic rope (frozen)": (
        "LlamaConfig",
        COMMON | {"max_position_embeddings": 32} | rope("dynamic", factor=4.0),
    ),
    "Mistral": ("MistralConfig", COMMON | SLIDING),
    "Mixtral": ("MixtralConfig", COMMON | {"num_local_experts": 4}),
    "Qwen2": ("Qwen2Config", COMMON),
    "Qwen3": ("Qwen3Config", COMMON | {"head_dim": 16}),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        COMMON
        | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "Gemma-2": ("Gemma2Config", COMMON | MIXED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "Gemma-3": (
        "Gemma3TextConfig",
        COMMON
        | MIXED
        | {"head_dim": 8, "query_pre_attn_scalar": 8}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "Phi": ("PhiConfig", COMMON),
    "Phi-3": ("Phi3Config", COMMON),
    "Phi-3, longrope (frozen)": (
        "Phi3Config",
        COMMON
        | {"original_max_position_embeddings": 32}
        | rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
            original_max_position_embeddings=32,
        ),
    ),
    "OLMo-2": ("Olmo2Config", COMMON),
    "OLMo-3": ("Olmo3Config", COMMON | MIXED),
    "Granite": (
        "GraniteConfig",
        COMMON
        | {"attention_multiplier": 0.2, "residual_multiplier": 0.5}
        | {"embedding_multiplier": 2.0, "logits_scaling": 2.0},
    ),
    "StableLM": ("StableLmConfig", COMMON),
    "Nemotron": ("NemotronConfig", COMMON),
    "Cohere": ("CohereConfig", COMMON),
    "Cohere-2": ("Cohere2Config", COMMON | MIXED),
    "GLM-4": ("Glm4Config", COMMON | {"head_dim": 8}),
    "ERNIE-4.5": ("Ernie4_5Config", COMMON | {"head_dim": 8}),
    "EXAONE-4": ("Exaone4Config", COMMON | MIXED),
    "SmolLM3": ("SmolLM3Config", COMMON | {"num_hidden_layers": 4}),
    "Starcoder2": ("Starcoder2Config", COMMON | SLIDING),
    "GPT-NeoX": ("GPTNeoXConfig", COMMON),
    "GPT-2": ("GPT2Config", GPT2_STYLE),
    "GPT-J": ("GPTJConfig", GPT2_STYLE | {"rotary_dim": 4}),
    "GPT-BigCode": ("GPTBigCodeConfig", GPT2_STYLE),
    "OPT": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "init_std": 0.3,
        },
    ),
    "Persimmon": ("PersimmonConfig", COMMON),
    "gpt-oss": (
        "GptOssConfig",
        COMMON
        | MIXED
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
}


def load(name: str, dtype: torch.dtype = torch.float32, **arguments) -> LoadedModel:
    config_class, settings = SUPPORTED[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    network = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=dtype
    )
    arguments = {"block_size": BLOCK, "max_model_len": MAX_LEN} | arguments
    return prepare_model(network, None, name=name, **arguments)


def eager_logits(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    loaded.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            return loaded.model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        loaded.model.set_attn_implementation(PAGED)


def make_pool(loaded: LoadedModel, num_blocks: int = 40) -> torch.Tensor:
    """Nothing in it is a number: what nobody wrote must not reach any output."""
    shape = (num_blocks, *loaded.layout.shape)
    return torch.full(shape, torch.nan, dtype=loaded.dtype, device=loaded.device)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == expected.shape
    spread = expected.max() - expected.min()
    assert (got - expected).abs().max() <= tolerance * spread


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


def test_documented_architectures_are_the_tested_ones():
    document = Path(__file__).parents[2] / "docs" / "models.md"
    supported = document.read_text().partition("## Refused")[0]
    rows = re.findall(r"^\| `(.+?)` \|", supported, re.MULTILINE)
    assert rows == list(SUPPORTED)


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
