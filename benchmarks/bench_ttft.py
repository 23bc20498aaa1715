"""Time to first token of a question about a long document, by the tier that holds the document.

cold      nothing cached, caching on          off     caching off
device    resident blocks                     host    every block comes from host memory
disk      every block comes from LMDB within the process that wrote it
restart   a new process finds them on disk (page cache warm), its first question

Every answer is compared with the one without a cache before its time counts. Contenders alternate.
"""

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from harness import Record, alternate, main, paired_ratio, say, summarize

QUESTION = "What is this text about?"
GOALS = {"device": 1 / 8, "host": 1 / 7, "restart": 1 / 6, "overhead": 1.05}
OPTIONS = {"runs": 7, "restarts": 5, "words": 2150, "model": "demo", "dtype": "bfloat16"}

RESTART = """
import json, sys
from engine import LLM, SamplingParams
text, question, directory, model, settings = json.loads(sys.argv[1])
with LLM(model, disk_cache=directory, **settings) as llm:
    document = llm.document(text, prefill=False)
    answer = document.ask(question, SamplingParams(temperature=0.0, max_tokens=1))
found = answer.metrics.cached_tokens
print(json.dumps([answer.metrics.ttft_s, found, answer.outputs[0].token_ids]))
"""


def document_text(num_words: int) -> str:
    """The beginning of the long example text."""
    path = Path(__file__).parents[1] / "examples" / "long.txt"
    return " ".join(path.read_text(encoding="utf-8").split(" ")[:num_words])


def measure(arguments: Namespace) -> list[Record]:
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1)
    text, other = document_text(arguments.words), document_text(arguments.words)[::-1]
    max_len = 16 * (arguments.words // 8)  # the text reversed has more tokens than the text
    settings = {"dtype": arguments.dtype, "load_policy": "always", "max_model_len": max_len}
    with tempfile.TemporaryDirectory() as directory:
        cache = str(Path(directory) / "cache")
        off = LLM(arguments.model, enable_prefix_caching=False, **settings)
        cached = LLM(arguments.model, disk_cache=cache, **settings)
        # Room for one document on the device: others push it into host memory.
        least = max_len // 16 * off.stats().block_bytes
        hosted = LLM(arguments.model, device_cache=least, host_cache=5 * least, **settings)
        plain = off.document(text, prefill=False)
        kept = cached.document(text)
        cached.flush()
        third = len(other) // 3
        moved = hosted.document(text)
        parts = [other[start : start + third] for start in range(0, 3 * third, third)]
        pushing = [hosted.document(part) for part in parts]
        answer = plain.ask(QUESTION, params)
        expected, num_tokens = answer.outputs[0].token_ids, len(answer.prompt_token_ids)
        say(f"{num_tokens} prompt tokens")
        salts = iter(range(1_000_000))

        def ttft(document, tier=None):
            output = document.ask(QUESTION, params)
            found = output.metrics.cached_tokens
            # The chat template's first block may be shared with another document on the device.
            least = 0.9 * num_tokens - 16 if tier else 0
            assert found.get(tier, 0) >= least, f"served from {found}, not {tier}"
            assert tier or not any(found.values()), f"served from {found}, not computed"
            assert output.outputs[0].token_ids == expected, "the answer changed"
            return output.metrics.ttft_s

        def cold():
            return ttft(cached.document(text, prefill=False, cache_salt=f"run {next(salts)}"))

        def device():
            kept.ask(QUESTION, params)
            return ttft(kept, "device")

        def host():
            for document in pushing:
                document.ask(QUESTION, params)
            return ttft(moved, "host")

        def disk():
            cached.reset_prefix_cache("device")
            return ttft(kept, "disk")

        samples = alternate(
            {
                "off": lambda: ttft(plain),
                "cold": cold,
                "device": device,
                "host": host,
                "disk": disk,
            },
            arguments.runs,
        )
        cached.close()
        child = json.dumps([text, QUESTION, cache, arguments.model, settings])
        restarts, colds = [], []
        for _ in range(arguments.restarts):
            run = subprocess.run(
                [sys.executable, "-c", RESTART, child], capture_output=True, text=True, check=True
            )
            seconds, found, token_ids = json.loads(run.stdout)
            assert found["disk"] > 0.9 * num_tokens, f"served from {found}"
            assert token_ids == expected, "the answer changed after a restart"
            restarts.append(seconds)
            colds.append(ttft(plain))
        off.close()
        hosted.close()
    ratios = {
        "device": paired_ratio(samples["device"], samples["cold"]),
        "host": paired_ratio(samples["host"], samples["cold"]),
        "disk": paired_ratio(samples["disk"], samples["cold"]),
        "overhead": paired_ratio(samples["cold"], samples["off"]),
    }
    if restarts:
        samples["restart"] = restarts
        ratios["restart"] = paired_ratio(restarts, colds)
    records = [
        {"case": name, "prompt_tokens": num_tokens, "ttft_s": summarize(times)["median"]}
        | summarize(times)
        | ({"ratio": ratios[name], "over": "cold"} if name in ratios else {})
        | ({"goal": GOALS[name], "goal_is": "at most"} if name in GOALS else {})
        for name, times in samples.items()
    ]
    overhead = {"case": "cold", "over": "off", "ratio": ratios["overhead"]}
    return [*records, overhead | {"goal": GOALS["overhead"], "goal_is": "at most"}]


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
