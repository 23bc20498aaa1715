"""Behind ``make demo``: eight questions about two documents, each answered from every tier.

    cold     caching is off: the whole prompt is computed
    device   the document's blocks are where attention reads them
    host     the device cache is too small for both documents, so each question finds its own
             pushed out to host memory, most of it or all of it
    disk     another process had read the documents and ended; their blocks are in LMDB

Tables go to stdout, progress to stderr; DEMO_JSON=file also writes the rows.
"""

import argparse
import fcntl
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.config import cache_home
from kvstore.errors import KVStoreError

EXAMPLES = Path(__file__).resolve().parent
QUESTIONS = {
    "people.md": [
        "What is the age of Marta Lindqvist?",
        "Which country is Aiko Tanabe from?",
        "What is the occupation of Elena Popescu?",
        "What is the email address of Wanda Kowalska?",
    ],
    "long.txt": [
        "What is the name of the girl?",
        "What animal did Alice see running by?",
        "What does Alice want to enter?",
        "Who is the author of this story?",
    ],
}
IN_ORDER = [(name, question) for name, asked in QUESTIONS.items() for question in asked]
IN_TURNS = [(name, asked[i]) for i in range(4) for name, asked in QUESTIONS.items()]

# The longer document, a question and its answer fit into the small device cache; both documents do
# not. 23,040 bytes is one token of the demo model in bfloat16.
SMALL_LEN = 3200
SMALL_CACHE = {
    "max_model_len": SMALL_LEN,
    "device_cache": SMALL_LEN * 23_040,
    "host_cache": "256MiB",
}
SAMPLING = {"temperature": 0.0, "max_tokens": 40}


def answer_cold(_: Path) -> list[dict[str, Any]]:
    with _engine(enable_prefix_caching=False) as llm:
        return _ask(llm, IN_ORDER)


def answer_from_memory(_: Path) -> list[dict[str, Any]]:
    with _engine(load_policy="always", **SMALL_CACHE) as llm:
        rows = []
        for name in QUESTIONS:
            llm.document(EXAMPLES / name)
            rows += _ask(llm, [asked for asked in IN_ORDER if asked[0] == name])
        return rows + _ask(llm, IN_TURNS)


def read_documents(cache_dir: Path) -> list[dict[str, Any]]:
    with _engine(disk_cache=cache_dir) as llm:
        for name in QUESTIONS:
            llm.document(EXAMPLES / name)
    return []


def answer_from_disk(cache_dir: Path) -> list[dict[str, Any]]:
    with _engine(disk_cache=cache_dir, load_policy="always") as llm:
        rows = []
        for asked in IN_ORDER:
            rows += _ask(llm, [asked])
            llm.reset_prefix_cache(tier="device")  # the next question is to find it on disk again
        return rows


STEPS: dict[str, tuple[str, Callable[[Path], list[dict[str, Any]]]]] = {
    "cold": ("answering without a cache", answer_cold),
    "memory": ("answering from device and host memory", answer_from_memory),
    "read": ("reading both documents into an empty cache directory", read_documents),
    "disk": ("answering in a new process", answer_from_disk),
}


def _engine(**settings: Any) -> Any:
    from engine import LLM  # only in the steps: it takes seconds, and the parent needs no model

    return LLM("demo", **settings)


def _ask(llm: Any, asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row a question: where its prompt came from, how long it took, what it said."""
    from engine import SamplingParams

    rows = []
    for name, question in asked:
        document = llm.document(EXAMPLES / name, prefill=False)
        output = document.ask(question, SamplingParams(**SAMPLING))
        cached = output.metrics.cached_tokens
        used = [tier for tier in ("device", "host", "disk") if cached[tier]]
        rows.append(
            {
                "document": name,
                "question": question,
                "served_from": used[-1] if used else "cold",
                "prompt_tokens": len(output.prompt_token_ids),
                "cached_tokens": cached,
                "ttft_s": output.metrics.ttft_s,
                "text": output.outputs[0].text.strip(),
            }
        )
    return rows


def run_in_new_process(step: str, cache_dir: Path) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--step", step, "--cache-dir", str(cache_dir)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)  # it has said why
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def print_tables(rows: list[dict[str, Any]]) -> None:
    for (document, question), reference in zip(IN_ORDER, rows, strict=False):
        print(f"{document}: {question}\n  {reference['text']}\n")
        print("  served from  prompt  cached                  first token   speed-up  same answer")
        for row in rows:
            if (row["document"], row["question"]) == (document, question):
                print(f"  {_table_line(row, reference)}")
        print()
    print("Median time to the first token, and the part of cold that it is:")
    for document in QUESTIONS:
        medians = {
            source: statistics.median(row["ttft_s"] for row in group)
            for source in ("cold", "device", "host", "disk")
            if (
                group := [
                    row
                    for row in rows
                    if (row["document"], row["served_from"]) == (document, source)
                ]
            )
        }
        shown = [f"{name} {s:.3f} s (1/{medians['cold'] / s:.1f})" for name, s in medians.items()]
        print(f"  {document:10}{', '.join(shown)}")


def _table_line(row: dict[str, Any], reference: dict[str, Any]) -> str:
    cached = [f"{count} {tier}" for tier, count in row["cached_tokens"].items() if count]
    return (
        f"{row['served_from']:11}  {row['prompt_tokens']:6}  {', '.join(cached) or '0':22}"
        f"  {row['ttft_s']:9.3f} s  {reference['ttft_s'] / row['ttft_s']:7.1f}x"
        f"  {'yes' if row['equal_uncached'] else 'no: ' + row['text']}"
    )


def run_demo() -> int:
    json_path = os.environ.get("DEMO_JSON")
    if json_path and not Path(json_path).absolute().parent.is_dir():
        print(f"demo: DEMO_JSON={json_path}: its directory does not exist", file=sys.stderr)
        return 2
    home = cache_home()
    home.mkdir(parents=True, exist_ok=True)
    lock = (home / "demo.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"demo: another demo is using {home}; wait for it to end", file=sys.stderr)
        return 1
    cache_dir = home / "demo-cache"
    shutil.rmtree(cache_dir, ignore_errors=True)  # cold means cold
    rows = []
    for number, (step, (doing, _)) in enumerate(STEPS.items(), 1):
        print(f"[{number}/{len(STEPS)}] {doing}", file=sys.stderr, flush=True)
        rows += run_in_new_process(step, cache_dir)
    uncached = {key: row["text"] for key, row in zip(IN_ORDER, rows, strict=False)}
    for row in rows:
        row["equal_uncached"] = row["text"] == uncached[row["document"], row["question"]]
    if json_path:
        Path(json_path).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print_tables(rows)
    command = Path(sys.executable).with_name("kvstore")
    shown = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command)
    print(f"\nThe cache is in {cache_dir}. To look into it:")
    print(f"  {shlex.quote(shown)} inspect {shlex.quote(str(cache_dir))}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.step is None:
            return run_demo()
        json.dump(STEPS[arguments.step][1](arguments.cache_dir), sys.stdout)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"demo: {error}; KVSTORE_HOME names a directory for its files", file=sys.stderr)
        return 1
    except KVStoreError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
