"""The same documents and the same model through other systems: transformers, vLLM, llama.cpp.

first      the first question about a document, by time to the first token: it is read
second     another question about it: what a system keeps of the document shows here
restart    the first question after the system was stopped and started again, and what it took to
           be ready; only a system that keeps blocks on disk has any left

Each system runs in a process of its own (``peers/``; ``make peers`` builds the environments), they
take turns, and those that are not installed are left out with a word. Ratios are ours over theirs.
Answers are compared with those of transformers in the same run: how many differ is reported, and
one in four may, for matrix products of other shapes round differently. In float32 hardly any do.
"""

import tempfile
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import workload
from harness import Record, main, paired_ratio, say, summarize
from peers.client import SYSTEMS, Peer, installed
from peers.client import start as start_peers
from peers.plain_gguf import write_plain_gguf

OPTIONS = {
    "model": "demo",
    "dtype": "float32",
    "documents": 4,
    "document_tokens": 2000,
    "new_tokens": 8,
    "restarts": 1,
    "systems": ",".join(SYSTEMS),
}
QUESTIONS = ("\n\nWhat is this text about?\n", "\n\nWho is mentioned first?\n")


class Contender:
    """A system that can be started again, and what it was seen to do."""

    def __init__(self, peer: Peer, settings: dict[str, Any]) -> None:
        self.name = peer.name
        self._settings = settings
        self.peer = peer
        self.seconds: dict[str, list[float]] = {"first": [], "second": [], "restart": []}
        self.answers: list[list[int]] = []
        self.cached: dict[str, int | None] = {}

    def ask(self, case: str, prompt: list[int], new_tokens: int) -> None:
        output = self.peer.generate([prompt], new_tokens)["outputs"][0]
        self.seconds[case].append(output["ttft_s"])
        self.answers.append(output["token_ids"])
        self.cached[case] = output["cached_tokens"]

    def restart(self) -> None:
        self.peer.close()
        self.peer = Peer(self.name, **self._settings)


def measure(arguments: Namespace) -> list[Record]:
    from transformers import AutoTokenizer

    from engine.model.source import resolve_model

    path = resolve_model(arguments.model).path
    tokenizer = AutoTokenizer.from_pretrained(path)
    documents = [
        tokenizer(workload.document(number, 2 * arguments.document_tokens))["input_ids"]
        for number in range(arguments.documents)
    ]
    first, second = (tokenizer(question)["input_ids"] for question in QUESTIONS)
    length = arguments.document_tokens
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = start(arguments, path, folder)
        for each in contenders:
            stack.callback(lambda each=each: each.peer.close())
            each.peer.generate([first], 2)  # the first forward of a process is slower
        for number, document in enumerate(documents):
            say(f"document {number + 1} of {len(documents)}")
            for case, question in (("first", first), ("second", second)):
                for each in contenders:
                    each.ask(case, document[:length] + question, arguments.new_tokens)
        for document in documents[: arguments.restarts]:
            for each in contenders:
                each.restart()
                say(f"{each.name} was ready again after {each.peer.load_s:.1f} s")
                each.ask("restart", document[:length] + first, arguments.new_tokens)
        return [record for each in contenders for record in records(each, contenders)]


def start(arguments: Namespace, path: Path, folder: Path) -> list[Contender]:
    """Those systems of the wanted ones that start."""
    limit = {"max_model_len": arguments.document_tokens + 256}
    more: dict[str, dict[str, Any]] = {
        "ours": limit | {"disk_cache": folder / "cache"},
        "transformers": {},
        "vllm": limit,
        "llama-cpp": limit | {"model": folder / "model.gguf"},
    }
    wanted = {
        name: {"model": path, "dtype": arguments.dtype} | more[name]
        for name in arguments.systems.split(",")
    }
    if "llama-cpp" in wanted and "llama-cpp" in installed():
        try:
            write_plain_gguf(path, folder / "model.gguf")
        except ValueError as error:
            say(f"llama-cpp left out: {error}")
            del wanted["llama-cpp"]
    return [Contender(peer, wanted[name]) for name, peer in start_peers(wanted).items()]


def records(each: Contender, contenders: list[Contender]) -> list[Record]:
    """One row a case; answers are those of the whole run."""
    referee = next((c for c in contenders if c.name == "transformers"), contenders[0])
    ours = next((c for c in contenders if c.name == "ours"), None)
    pairs = list(zip(each.answers, referee.answers, strict=True))
    differ = sum(mine != theirs for mine, theirs in pairs)
    assert differ <= len(pairs) / 4, f"{each.name}: {differ} of {len(pairs)} answers differ"
    rows = []
    for case, seconds in each.seconds.items():
        if not seconds:
            continue
        row = {"case": case, "system": each.name, "ttft_s": summarize(seconds)}
        row |= {"cached_tokens": each.cached[case], "differing_answers": differ}
        if case == "restart":
            row["ready_s"] = each.peer.load_s
        if ours is not None and ours is not each:
            row |= {"over": each.name, "ratio": paired_ratio(ours.seconds[case], seconds)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
