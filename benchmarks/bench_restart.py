"""A document across the end of a process: closed in order, and killed with SIGKILL.

cold      a first process reads the document and answers; it is computed
warm      the same process answers again; the device holds it
closed    a new process answers after the first one has closed its cache
killed    a new process answers after SIGKILL, sent when age has had everything written
at once   the same with SIGKILL straight after the answer: what was not yet on disk is computed

Every answer has the tokens of the cold one. ``most_computed_tokens`` is what was computed again in
the worst run; after "closed" and "killed" nothing but a partial block may be. Page cache warm.
"""

import json
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import workload
from harness import Record, main, paired_ratio, say, summarize

OPTIONS = {
    "runs": 5,
    "model": "demo",
    "dtype": "bfloat16",
    "document_tokens": 2000,
    "ends": "closed,killed,at once",
}
GOALS = {"closed": 1 / 6, "killed": 1 / 6}

# Answers each time a line comes in, and ends when there are no more.
CHILD = """
import json, sys
from engine import LLM, SamplingParams
model, directory, text, question, settings = json.loads(sys.argv[1])
params = SamplingParams(temperature=0.0, max_tokens=8)
with LLM(model, disk_cache=directory, load_policy="always", **settings) as llm:
    document = llm.document(text, prefill=False)
    for line in sys.stdin:
        if line == "wait\\n":  # until age has had all of it written: nobody flushes
            assert llm._core.wait_for(lambda: llm._core.store.is_clean, 60)
            print("null", flush=True)
            continue
        output = document.ask(question, params)
        row = [output.metrics.ttft_s, output.metrics.computed_tokens, output.outputs[0].token_ids]
        print(json.dumps(row), flush=True)
"""


class Child:
    """A process that answers the question."""

    def __init__(self, arguments: Namespace, directory: Path) -> None:
        settings = {"dtype": arguments.dtype, "max_model_len": arguments.document_tokens + 256}
        text = workload.document(1, arguments.document_tokens)
        given = json.dumps([arguments.model, str(directory), text, workload.QUESTION, settings])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self) -> tuple[float, int, list[int]]:
        """Seconds to the first token, prompt tokens computed, the answer."""
        return tuple(self._say(""))

    def wait_until_written(self) -> None:
        """As an idle engine does it: ``dirty_max_age_s``, and a commit and its pace on top."""
        self._say("wait")

    def _say(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


def one_run(arguments: Namespace) -> dict[str, tuple[float, int, list[int]]]:
    """Every case once, on fresh directories."""
    rows = {}
    for case in arguments.ends.split(","):
        with tempfile.TemporaryDirectory() as directory:
            writer = Child(arguments, Path(directory) / "cache")
            rows["cold"] = writer.ask()
            rows["warm"] = writer.ask()
            if case == "killed":
                writer.wait_until_written()
            if case == "closed":
                writer.close()
            else:
                writer.kill()
            reader = Child(arguments, Path(directory) / "cache")
            rows[case] = reader.ask()
            reader.close()
    return rows


def measure(arguments: Namespace) -> list[Record]:
    runs = []
    for number in range(arguments.runs):
        say(f"run {number + 1} of {arguments.runs}")
        rows = one_run(arguments)
        for case, row in rows.items():
            assert row[2] == rows["cold"][2], f"{case}: the answer changed"
        runs.append(rows)
    num_computed = runs[0]["cold"][1]
    records = []
    for case in runs[0]:
        seconds = [run[case][0] for run in runs]
        lost = max(run[case][1] for run in runs)
        if case in ("closed", "killed"):
            assert lost < 64, f"{case}: {lost} tokens had to be computed again"
        record = {
            "case": case,
            "document_tokens": num_computed,
            "ttft_s": summarize(seconds),
            "most_computed_tokens": lost,
        }
        if case != "cold":
            colds = [run["cold"][0] for run in runs]
            record |= {"over": "cold", "ratio": paired_ratio(seconds, colds)}
        if case in GOALS:
            record |= {"goal": GOALS[case], "goal_is": "at most"}
        records.append(record)
    return records


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
