"""What ``kvstore serve`` refuses before a model is loaded; ``tests/engine/server`` has the rest."""

import socket
import sys

import pytest

from tools.commands import run


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(missing, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    assert run(["serve", "--cache-dir", str(tmp_path / "cache")]) == 2
    assert "pip install fastapi uvicorn" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(kvstore, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = kvstore("serve", "--port", port, "--cache-dir", tmp_path / "cache")
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"port {port}: Address already in use" in line
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", " "], ["--port", "70000"], ["--grace", "-1"], ["--device-cache", "lots"]],
    ids=" ".join,
)
def test_a_nonsensical_setting_is_one_line_and_2(kvstore, arguments):
    result = kvstore("serve", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert arguments[0].strip("-").replace("-", "_") in line.replace("-", "_")


def test_an_address_that_others_reach_without_a_key_is_warned_of(kvstore, tmp_path):
    model = tmp_path / "none"
    result = kvstore("serve", "--host", "0.0.0.0", "--port", "0", "--model", model)
    warning, error = result.stderr.splitlines()
    assert "--api-key" in warning
    assert f"model '{model}' does not exist" in error
    keyed = kvstore("serve", "--host", "0.0.0.0", "--port", "0", "--model", model, "--api-key", "k")
    assert len(keyed.stderr.splitlines()) == 1
