"""Lossless codecs on real KV: ratio, speed, and whether a restart becomes faster.

The blocks are those of the long example text under the demo model. A codec is worth turning on by
default only if the first question after a restart is answered sooner, with the page cache warm
and, where the medium is slow, with it dropped.
"""

import os
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
from bench_ttft import QUESTION, document_text
from harness import Record, alternate, main, paired_ratio, say, summarize

from kvstore.disk.codec import get_codec

OPTIONS = {
    "runs": 5,
    "model": "demo",
    "words": 2150,
    "dtype": "bfloat16",
    "codec": "planes-zstd",
}


def real_blocks(llm, text: str) -> np.ndarray:
    """Bytes of the document's blocks, [num_blocks, block_bytes]."""
    llm.document(text)
    store = llm._core.store
    ids = llm._core.call(lambda: [block for block in store.index.device if block >= 0])
    return store.device.rows[ids].copy()


def bench_speed(name: str, blocks: np.ndarray, itemsize: int, runs: int) -> dict:
    codec = get_codec(name)
    assert codec is not None
    coded: list[bytes] = []
    target = np.empty_like(blocks)

    def encode() -> float:
        started = time.perf_counter()
        coded[:] = [codec.encode(block.data, itemsize) for block in blocks]
        return time.perf_counter() - started

    def decode() -> float:
        target[:] = 0
        started = time.perf_counter()
        for stored, row in zip(coded, target, strict=True):
            codec.decode_into(memoryview(stored), row.data)
        seconds = time.perf_counter() - started
        assert (target == blocks).all(), "the codec changed a byte"
        return seconds

    samples = alternate({"encode": encode, "decode": decode}, runs)
    record = {"case": "speed", "codec": name, "bytes": blocks.nbytes}
    record |= {"over": "encoded bytes", "ratio": blocks.nbytes / sum(map(len, coded))}
    for step, times in samples.items():
        found = summarize(times)
        record |= {f"{step}_gb_s": blocks.nbytes / found["median"] / 1e9, f"{step}_s": found}
    return record


def restart_ttft(
    directory: Path, text: str, arguments: Namespace, codec: str, *, is_cold: bool
) -> tuple[float, list[int]]:
    """First question of a new engine, as after a restart: no block in memory."""
    from engine import LLM, SamplingParams

    if is_cold:
        with (directory / "data.mdb").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with LLM(
        arguments.model,
        dtype=arguments.dtype,
        disk_cache=directory,
        load_policy="always",
        max_model_len=4096,
        store_config={"codec": codec},
    ) as llm:
        document = llm.document(text, prefill=False)
        output = document.ask(QUESTION, SamplingParams(temperature=0.0, max_tokens=1))
    assert output.metrics.cached_tokens["disk"] > 0.9 * len(output.prompt_token_ids)
    return output.metrics.ttft_s, output.outputs[0].token_ids


def measure(arguments: Namespace) -> list[Record]:
    from engine import LLM, SamplingParams

    text, codecs = document_text(arguments.words), ("raw", arguments.codec)
    records = []
    with tempfile.TemporaryDirectory() as parent:
        directories = {name: Path(parent) / name for name in codecs}
        for name, directory in directories.items():
            say(f"reading the document into a cache with codec {name}")
            with LLM(
                arguments.model,
                dtype=arguments.dtype,
                disk_cache=directory,
                max_model_len=4096,
                store_config={"codec": name},
            ) as llm:
                blocks = real_blocks(llm, text)
                answer = llm.document(text).ask(
                    QUESTION, SamplingParams(temperature=0.0, max_tokens=1)
                )
                itemsize = llm._loaded.dtype.itemsize
        records.append(bench_speed(arguments.codec, blocks, itemsize, arguments.runs))
        for is_cold in (False, True):

            def ttft(name: str, is_cold: bool = is_cold) -> float:
                seconds, token_ids = restart_ttft(
                    directories[name], text, arguments, name, is_cold=is_cold
                )
                assert token_ids == answer.outputs[0].token_ids, "the answer changed"
                return seconds

            samples = alternate(
                {name: lambda name=name, ttft=ttft: ttft(name) for name in codecs}, arguments.runs
            )
            records.append(
                {
                    "case": "restart ttft",
                    "page_cache": "dropped" if is_cold else "warm",
                    "over": "raw",
                    "ratio": paired_ratio(samples[arguments.codec], samples["raw"]),
                }
                | {f"{name}_s": summarize(times) for name, times in samples.items()}
            )
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
