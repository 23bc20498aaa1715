"""The identity of a model follows from its files, and from every byte of them that counts."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    dynamic_module_utils,
)
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.model import identity, weights
from engine.model.identity import (
    config_digest,
    expected_rope,
    model_identity,
    modelling_folder,
    read_checkpoint,
)
from engine.model.loader import load_model
from engine.model.offline import OfflineModel
from engine.model.source import resolve_model
from engine.model.weights import read_weights
from kvstore.errors import ConfigError
from kvstore.hashing import namespace_id

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    return path


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def identify(path: Path, **change) -> bytes:
    settings = {"dtype": "float32", "block_size": 16, "frozen_rope": {}}
    checkpoint = read_checkpoint(resolve_model(str(path)))
    return namespace_id(model_identity(checkpoint, **settings | change))


def identify_weights(path: Path) -> str:
    return read_checkpoint(resolve_model(str(path))).weights


def digest(tensors: dict[str, torch.Tensor], path: Path) -> str:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return read_weights(path).digest


def change_config(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---- weights -----------------------------------------------------------------------------------


def test_a_copy_is_the_same_model(saved, model):
    assert identify(model) == identify(saved)


def test_a_changed_element_of_any_tensor_changes_the_weights(saved, tmp_path):
    before, tensors = read_weights(saved).digest, load_file(saved / "model.safetensors")
    assert digest(tensors, tmp_path) == before
    for name, tensor in tensors.items():
        changed = tensor.clone()
        changed.flatten()[tensor.numel() // 3] += 1e-3
        assert digest(tensors | {name: changed}, tmp_path) != before, name


def test_swapped_tensors_of_one_shape_change_the_weights(saved, tmp_path):
    tensors = load_file(saved / "model.safetensors")
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    swapped = tensors | {first: tensors[second], second: tensors[first]}
    assert digest(swapped, tmp_path) != read_weights(saved).digest


@pytest.fixture
def sampled(monkeypatch):
    monkeypatch.setattr(weights, "FULL_BYTES", 0)
    monkeypatch.setattr(weights, "SAMPLE_BYTES", 1024)


@pytest.mark.parametrize("at", [0, -1])
def test_a_large_model_is_sampled_from_first_to_last_byte_of_each_tensor(
    sampled, saved, tmp_path, at
):
    before, tensors = read_weights(saved).digest, load_file(saved / "model.safetensors")
    for name, tensor in tensors.items():
        raw = tensor.clone().view(torch.uint8)
        raw.flatten()[at] ^= 1
        assert digest(tensors | {name: raw.view(tensor.dtype)}, tmp_path) != before, name


def test_samples_see_a_change_of_a_whole_large_tensor(sampled, saved, tmp_path):
    before, tensors = read_weights(saved).digest, load_file(saved / "model.safetensors")
    for name, tensor in tensors.items():
        assert digest(tensors | {name: tensor * 1.001}, tmp_path) != before, name


def test_dtype_changes_the_weights(saved, tmp_path):
    halves = {k: v.bfloat16() for k, v in load_file(saved / "model.safetensors").items()}
    assert digest(halves, tmp_path) != read_weights(saved).digest
    assert read_weights(tmp_path).dtype == "bfloat16"


def test_the_same_tensors_in_other_shards_are_the_same_weights(saved, model):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"b.safetensors": names[:5], "a.safetensors": names[5:]}
    for file, some in shards.items():
        save_file({name: tensors[name] for name in some}, model / file)
    index = {"weight_map": {name: file for file, some in shards.items() for name in some}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert identify(model) == identify(saved)
    save_file({names[0]: tensors[names[0]] + 1}, model / "unused.safetensors")
    assert identify(model) == identify(saved)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_the_weights_are_those_of_the_file_that_the_config_names(saved, model, is_sharded):
    """transformers loads that file; model.safetensors beside it says nothing of the model then."""
    name = "chosen.safetensors"
    shutil.copy(model / "model.safetensors", model / name)
    tensors = load_file(model / name)
    if is_sharded:
        shard, name = name, "chosen.safetensors.index.json"
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
        (model / name).write_text(json.dumps(index))
    change_config(model, transformers_weights=name)
    assert identify_weights(model) == identify_weights(saved)
    tensors["model.norm.weight"] += 1
    save_file(tensors, model / "chosen.safetensors", {"format": "pt"})
    assert identify_weights(model) != identify_weights(saved)
    loaded = load_model(str(model), skip_tokenizer_init=True)
    assert torch.equal(loaded.model.model.norm.weight, tensors["model.norm.weight"])


def test_tied_weights_are_read_once_and_count(tmp_path):
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    before = identify(tmp_path)
    tensors["model.embed_tokens.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert identify(tmp_path) != before


@pytest.mark.parametrize("is_archive", [True, False])
def test_checkpoints_of_torch_are_read_without_it(model, is_archive):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"

    def write(**changed: torch.Tensor) -> bytes:
        torch.save(tensors | changed, file, _use_new_zipfile_serialization=is_archive)
        return identify(model)

    before = write()
    assert write() == before
    for name in ("model.norm.weight", "lm_head.weight"):
        assert write(**{name: tensors[name] + 1}) != before


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_checkpoint_is_one_line(model, damage):
    (model / "model.safetensors").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"download it again$"):
        identify(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        identify(model)


# ---- config, code and settings -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 256},
        {"sliding_window": 24},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"text_config": {"rope_theta": 1.0}},
    ],
)
def test_a_setting_of_the_model_changes_the_identity(saved, model, change):
    change_config(model, **change)
    assert identify(model) != identify(saved)


def test_the_place_of_a_model_does_not_change_the_config():
    config = LlamaConfig(**SIZES).to_dict()
    moved = config | {
        "_name_or_path": "/elsewhere/model",
        "transformers_version": "0.0.0",
        "use_cache": False,
        "torch_dtype": "float16",
        "dtype": "float16",
    }
    assert config_digest(moved) == config_digest(config)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"frozen_rope": {"": ["dynamic", 4096]}},
        {"run": {"threads": 2}},
        {"modelling": "of another release"},
    ],
)
def test_what_changes_blocks_changes_the_namespace(saved, change):
    assert identify(saved, **change) != identify(saved)


def test_another_modelling_file_changes_the_namespace(saved, monkeypatch):
    before = identify(saved)
    monkeypatch.setattr(identity, "modelling_digest", lambda folder, *patterns: "another release")
    assert identify(saved) != before


def test_code_that_comes_with_the_checkpoint_counts_where_it_is_trusted(model):
    change_config(model, auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    source, file = resolve_model(str(model)), model / "own.py"
    file.write_text("one = 1")
    before = [read_checkpoint(source, trust_remote_code=each).modelling for each in (True, False)]
    file.write_text("one = 2")
    after = [read_checkpoint(source, trust_remote_code=each).modelling for each in (True, False)]
    assert (before[0] != after[0], before[1] != after[1]) == (True, False)


def test_code_of_another_repository_counts_where_it_is_trusted(model, tmp_path, monkeypatch):
    """A config that transformers has saved names the repository that the code came from: what is
    there now runs, and the checkpoint's own folder says nothing of it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    repository = tmp_path / "code"
    repository.mkdir()
    own = "from transformers import LlamaForCausalLM\n\n\nclass Own(LlamaForCausalLM):\n    one = "
    reference = f"{repository}--own.Own"
    change_config(model, auto_map={"AutoModelForCausalLM": reference})
    offline = OfflineModel(str(model), trust_remote_code=True)
    identities = []
    for number in "12":
        (repository / "own.py").write_text(own + number)
        loaded = load_model(str(model), trust_remote_code=True, skip_tokenizer_init=True)
        assert type(loaded.model).one == int(number)
        identities.append(loaded.identity)
    first, second = identities
    assert first | {"modelling": ""} == second | {"modelling": ""}
    assert first["modelling"] != second["modelling"]
    assert offline.candidates({namespace_id(first): first}) == [first]


def test_every_causal_model_of_transformers_is_found_where_its_code_is():
    """Its folder is worked out from the model type, without importing transformers."""
    models = Path(import_module("transformers").__file__).parent / "models"
    wrong = {
        model_type: modelling_folder(model_type).name
        for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if any((models / model_type_to_module_name(model_type)).glob("modeling_*.py"))
        and modelling_folder(model_type).name != model_type_to_module_name(model_type)
    }
    assert wrong == {}


# ---- the same from the files and from the loaded model ------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


def llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def phi3() -> Phi3ForCausalLM:
    config = Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE,
    )
    return Phi3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (llama, {"dtype": "bfloat16"}),
        (lambda: llama().bfloat16(), {"block_size": 32}),
        (lambda: llama(rope_parameters=DYNAMIC), {}),
        (lambda: llama(rope_parameters=DYNAMIC), {"max_model_len": 200}),
        (phi3, {"max_model_len": 40}),
        (phi3, {}),
    ],
)
def test_the_engine_and_the_files_give_the_same_identity(tmp_path, make, settings):
    make().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), skip_tokenizer_init=True, **settings)
    checkpoint = read_checkpoint(resolve_model(str(tmp_path)))
    from_files = model_identity(
        checkpoint,
        dtype=settings.get("dtype") or checkpoint.dtype,
        block_size=settings.get("block_size", 16),
        frozen_rope=expected_rope(checkpoint.config, settings.get("max_model_len")),
    )
    assert from_files == loaded.identity


def test_the_identity_is_found_without_torch_and_transformers(saved):
    code = (
        "import sys; sys.modules['torch'] = None;"
        "from engine.model.identity import read_checkpoint;"
        "from engine.model.source import resolve_model;"
        "print(read_checkpoint(resolve_model(sys.argv[1])).weights, 'transformers' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [read_weights(saved).digest, "False"]
