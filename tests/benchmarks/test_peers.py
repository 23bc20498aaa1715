"""The protocol between a benchmark and other systems, with a worker that computes nothing."""

import pytest
from peers import client
from peers.client import Peer, PeerError

WORKER = """
import argparse, os, sys
sys.path.insert(0, {peers!r})
from serving import serve, take_stdout

class Echo:
    def __init__(self, model):
        self.model = model
        print("a library greets on stdout")
    def generate(self, prompts, max_tokens):
        return {{"outputs": [{{"token_ids": prompt[:max_tokens]}} for prompt in prompts]}}
    def reset(self):
        print("ending", file=sys.stderr, flush=True)
        os._exit(3)
    def info(self):
        raise ValueError("nothing to say")

answers = take_stdout()
parser = argparse.ArgumentParser()
parser.add_argument("--max-model-len")
serve(Echo(parser.parse_args().max_model_len), answers)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(peers=str(client._HERE)))
    monkeypatch.setitem(client.SYSTEMS, "echo", (str(script), None))
    with Peer("echo", max_model_len=7) as peer:
        yield peer


def test_answers_come_back_and_what_libraries_print_does_not(echo):
    result = echo.ask("generate", prompts=[[1, 2, 3], [4]], max_tokens=2)
    assert [output["token_ids"] for output in result["outputs"]] == [[1, 2], [4]]
    assert result["cpu_s"] >= 0
    assert echo.load_s > 0


def test_a_failure_of_a_worker_says_what_it_was_and_it_goes_on(echo):
    with pytest.raises(PeerError, match="echo: ValueError: nothing to say"):
        echo.ask("info")
    assert echo.ask("generate", prompts=[[5]], max_tokens=1)["outputs"] == [{"token_ids": [5]}]


def test_a_worker_that_ends_leaves_its_last_words(echo):
    with pytest.raises(PeerError, match=r"echo ended with status 3:\na library greets.*\nending"):
        echo.ask("reset")


def test_a_system_without_its_environment_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORE_PEERS", str(tmp_path))
    assert client.installed() == ["ours", "transformers"]
    with pytest.raises(PeerError, match="vllm is not installed: make peers"):
        Peer("vllm")


def test_what_does_not_start_is_left_out_with_a_word(tmp_path, monkeypatch, capsys, echo):
    monkeypatch.setenv("KVSTORE_PEERS", str(tmp_path))
    ends = tmp_path / "ends.py"
    ends.write_text("raise SystemExit('no such model')")
    monkeypatch.setitem(client.SYSTEMS, "ends", (str(ends), None))
    started = client.start({"ends": {}, "vllm": {}, "echo": {"max_model_len": 7}})
    assert list(started) == ["echo"]
    started["echo"].close()
    said = capsys.readouterr().err
    assert "vllm is not installed (make peers): left out" in said
    assert "ends left out: ends ended with status 1:\nno such model" in said
