import shutil
from contextlib import contextmanager
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from engine import parts
from engine.config import EngineConfig
from engine.model import loader
from engine.model.loader import load_model, prepare_model
from engine.model.source import resolve_model
from engine.runner.attention import PAGED
from kvstore.errors import ConfigError
from kvstore.hashing import namespace_id

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def save_model(path, **changes) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL | changes)
    model = LlamaForCausalLM(config).to(changes.get("dtype", torch.float32))
    model.generation_config = GenerationConfig(eos_token_id=[2, 7])
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("llama")
    save_model(path)
    return str(path)


def test_a_directory_loads_ready_to_run(directory):
    loaded = load_model(directory, device="cpu")
    assert loaded.name == directory
    assert (loaded.max_model_len, loaded.vocab_size) == (128, 300)
    assert loaded.layout.shape == (2, 2, 16, 2, 8)
    assert loaded.layout.dtype == "float32"
    assert loaded.device == torch.device("cpu")
    assert loaded.windows == (None, None)
    assert loaded.layer_order == (0, 1)
    assert loaded.model.config._attn_implementation == PAGED
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_every_end_of_sequence_token_is_known(directory):
    """Of generation settings (2, 7), config (2) and tokenizer (0)."""
    assert load_model(directory).eos_token_ids == (0, 2, 7)


def test_the_same_weights_elsewhere_are_the_same_model(directory, tmp_path):
    save_model(tmp_path)
    first, second = load_model(directory), load_model(str(tmp_path))
    assert namespace_id(first.identity) == namespace_id(second.identity)


def test_changed_weights_in_the_same_place_are_another_model(tmp_path):
    save_model(tmp_path)
    before = load_model(str(tmp_path)).identity
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    assert namespace_id(load_model(str(tmp_path)).identity) != namespace_id(before)


def test_dtype_auto_is_the_checkpoints(directory, tmp_path):
    save_model(tmp_path, dtype=torch.bfloat16)
    assert load_model(str(tmp_path)).layout.dtype == "bfloat16"
    assert load_model(str(tmp_path), dtype="float32").layout.dtype == "float32"
    assert load_model(directory, dtype="bfloat16").layout.dtype == "bfloat16"


def test_settings_that_change_blocks_change_the_identity(directory):
    base = namespace_id(load_model(directory).identity)
    for change in ({"dtype": "bfloat16"}, {"block_size": 32}, {"deterministic": True}):
        assert namespace_id(load_model(directory, **change).identity) != base
    assert namespace_id(load_model(directory, max_model_len=64).identity) == base


def test_a_frozen_rope_is_part_of_the_identity(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    save_model(tmp_path, rope_parameters=rope)
    lengths = {n: load_model(str(tmp_path), max_model_len=n) for n in (64, 128, 200)}
    ids = {n: namespace_id(loaded.identity) for n, loaded in lengths.items()}
    assert ids[64] == ids[128] != ids[200]
    assert lengths[200].max_model_len == 200


def test_a_tokenizer_may_come_from_elsewhere_or_not_at_all(directory, tmp_path):
    save_model(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).unlink()
    assert load_model(str(tmp_path), tokenizer=directory).tokenizer.encode("a")
    assert load_model(str(tmp_path), skip_tokenizer_init=True).tokenizer is None
    with pytest.raises(ConfigError, match=f"^tokenizer {tmp_path}: .*pass tokenizer="):
        load_model(str(tmp_path))


def test_a_hub_id_is_found_in_the_hubs_cache_without_a_network(directory, tmp_path, monkeypatch):
    kept = tmp_path / "models--someone--tiny"
    shutil.copytree(directory, kept / "snapshots" / "0123abcd")
    (kept / "refs").mkdir()
    for ref in ("main", "v2"):
        (kept / "refs" / ref).write_text("0123abcd")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    here, there = load_model(directory), load_model("someone/tiny")
    assert there.name == "someone/tiny"
    assert there.tokenizer.encode("a") == here.tokenizer.encode("a")
    assert namespace_id(there.identity) == namespace_id(here.identity)
    assert load_model("someone/tiny", revision="v2", skip_tokenizer_init=True).vocab_size == 300
    for missing in ({"revision": "v3"}, {"model": "someone/else"}):
        with pytest.raises(ConfigError, match=r"cannot be fetched .* check the name and the conn"):
            load_model(**{"model": "someone/tiny"} | missing)
    with pytest.raises(ConfigError, match="not in the hub's cache, and this fetches nothing"):
        resolve_model("someone/else", may_fetch=False)


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="absent") as caught:
        load_model(str(tmp_path / "absent"))
    assert "\n" not in str(caught.value)


def test_a_directory_without_weights_is_refused(directory, tmp_path):
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="not a causal language model that") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_truncated_checkpoint_is_refused(tmp_path):
    save_model(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match="not a causal language model that") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    """transformers would fill it with random numbers and a warning."""
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight; "):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "int8"}, "^dtype: expected auto, float32, float16, bfloat16, got 'int8'"),
        ({"device": "tpux"}, "^device: expected auto, cpu, cuda or cuda:N, got 'tpux'"),
        ({"max_model_len": 129}, "^max_model_len: .* was trained for 128 positions, got 129"),
        ({"max_model_len": 3}, "^max_model_len: expected at least 8, got 3"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(directory, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_model(directory, **setting)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(directory):
    with pytest.raises(ConfigError, match=r"^device: cuda was asked for, but torch finds no CUDA"):
        load_model(directory, device="cuda")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_a_gpu_beyond_the_last_is_refused(directory, two_gpus):
    with pytest.raises(ConfigError, match=r"^device: cuda:2 was asked for, but the last .* cuda:1"):
        load_model(str(directory), device="cuda:2")


def test_the_gpu_that_was_asked_for_is_current_for_the_kernels(directory, two_gpus, monkeypatch):
    """Triton would have started them on the first one, with the addresses of another."""
    current = []
    second = torch.device("cuda:1")

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(loader, "_load_weights", lambda *_: torch.nn.Module())
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, _: module)
    monkeypatch.setattr(loader, "prepare_model", lambda *_, **__: list(current))
    assert load_model(str(directory), device="cuda:1", skip_tokenizer_init=True) == [second]
    assert current == []

    # The step thread's own.

    def no_room(*_):
        raise MemoryError

    monkeypatch.setattr(parts, "_device_pool", no_room)
    loaded = SimpleNamespace(device=second, fixed_shapes=None, identity={})
    with pytest.raises(MemoryError):
        parts.build_parts(EngineConfig(), loaded, lambda: None)
    assert current == [second]


@pytest.mark.parametrize("length", [8, 9, 24])
def test_a_very_short_model_can_be_probed(length):
    model = MistralForCausalLM(
        MistralConfig(**SMALL | {"max_position_embeddings": length}, sliding_window=4)
    )
    assert prepare_model(model, None, name="short").max_model_len == length


def test_transformers_talks_as_before_after_loading(directory):
    transformers_logging.set_verbosity_warning()
    transformers_logging.enable_progress_bar()  # off in all tests of this folder
    try:
        load_model(directory)
        assert transformers_logging.get_verbosity() == transformers_logging.WARNING
        assert transformers_logging.is_progress_bar_enabled()
    finally:
        transformers_logging.disable_progress_bar()
