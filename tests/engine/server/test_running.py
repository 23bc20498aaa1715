"""How ``kvstore serve`` ends: answers end too, and the next start finds on disk what was read."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from engine import LLM, SamplingParams

PROMPT = "A prompt of more than one block of tokens."
SETTINGS = {"dtype": "float32", "device_cache": "16MiB", "load_policy": "always"}
GREEDY = {"model": "tiny", "prompt": PROMPT, "temperature": 0.0}


@contextmanager
def serving(model: str, cache: Path) -> Iterator[tuple[subprocess.Popen, openai.OpenAI]]:
    """A server process that writes nothing before it ends, and a client of it."""
    command = [
        Path(sys.executable).with_name("kvstore"), "serve", "--model", model, "--cache-dir", cache,
        "--port", "0", "--served-model-name", "tiny", "--grace", "0.3",
        *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()),
        "--store-config", "dirty_max_age_s=1000",
    ]  # fmt: skip
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"KVSTORE_API_KEY": "from the environment"},
    ) as process:
        try:
            ready = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)\n", read_line(process))
            assert ready
            client = openai.OpenAI(
                base_url=f"{ready[1]}/v1", api_key="from the environment", max_retries=0
            )
            with client:
                yield process, client
        finally:
            process.kill()


def read_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_sigterm_ends_what_is_under_way_and_the_next_start_finds_what_was_read(
    text_model, tmp_path
):
    with serving(text_model, tmp_path / "cache") as (process, client):
        long = {"max_tokens": 460, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(stream=True, **GREEDY, **long)
        next(stream)
        half_sent = socket.create_connection((client.base_url.host, client.base_url.port))
        half_sent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n")
        half_sent.sendall(b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
        assert half_sent.recv(100).startswith(b"HTTP/1.1 100")  # it waits for the body
        half_sent.sendall(b"{")
        process.send_signal(signal.SIGTERM)
        with half_sent, half_sent.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
            assert b'"code":"closed"' in answer.read()
        ends = [chunk.choices[0].finish_reason for chunk in stream]
        assert set(ends[:-1]) == {None}
        assert ends[-1] in ("abort", "length")
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, "")

    with LLM(text_model, disk_cache=tmp_path / "cache", **SETTINGS) as llm:
        (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=1))
        assert output.metrics.cached_tokens["disk"] == len(PROMPT) - 1
