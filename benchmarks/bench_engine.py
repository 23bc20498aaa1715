"""Our engine beside transformers' generate and, where installed, vLLM's CPU build and llama.cpp.

qa        8 documents of 3,000 tokens × 4 questions at once, greedy, 32 new tokens each: total time
ttft      first token of a new question about a document that is resident
decode    tokens per second of short prompts, first tokens not counted: 8 at once, 1 alone, and 8
          beside a process that keeps one core busy
overhead  part of our decode step at batch 1 outside the model's forward

Same model, same prompts as token ids. Each system runs in a process of its own that is loaded once
(``peers/``), and they take turns, so that a slow minute of the machine is everybody's.

Every answer of ``qa`` is compared with transformers' before a time counts. Where tokens differ,
both must be among the best by transformers' logits behind what they agree on: products of other
shapes round differently, and in bfloat16 the two best logits are sometimes equal. How many differ
is reported; with ``--dtype float32`` hardly any do. Systems that cache are asked to forget before
each ``qa``; transformers reads each document four times, as it does. llama.cpp takes part with
``--systems …,llama-cpp --gguf FILE``.

``cpu_s`` is processor time of the whole process, for machines that have other work.
"""

import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from harness import Record, main, paired_ratio, say, summarize
from peers.client import Peer, start
from workload import document

OPTIONS = {
    "runs": 7,
    "qa_runs": 2,
    "model": "demo",
    "dtype": "bfloat16",
    "documents": 8,
    "document_tokens": 3000,
    "new_tokens": 32,
    "decode_tokens": 64,
    "systems": "ours,transformers,vllm",
    "gguf": "",
}
# A token may lie so far below the best one, as a part of the logits' range, and still be right.
TIE = {"float32": 1e-4, "bfloat16": 2e-2}
QUESTIONS = (
    "\n\nWhat is this text about?\n",
    "\n\nWho is mentioned first, and why?\n",
    "\n\nName one place in this text.\n",
    "\n\nHow does the text end?\n",
)


class Workload:
    """Prompts as token ids, of the model's own tokenizer."""

    def __init__(self, model: str, num_documents: int, document_tokens: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]
        self._documents = [
            self._encode(document(number, 2 * document_tokens))[:document_tokens]
            for number in range(num_documents)
        ]
        self._count = 0

    def qa(self) -> list[list[int]]:
        questions = [self._encode(question) for question in QUESTIONS]
        return [text + question for text in self._documents for question in questions]

    def new_question(self) -> list[int]:
        self._count += 1
        return self._documents[0] + self._encode(f"\n\nWhat is said in sentence {self._count}?\n")

    def short(self, count: int, length: int = 48) -> list[list[int]]:
        text = self._documents[0]
        return [text[i : i + length] for i in range(0, count * 8, 8)]


def measure(arguments: Namespace) -> list[Record]:
    from engine.model.source import resolve_model

    path = str(resolve_model(arguments.model).path)
    work = Workload(path, arguments.documents, arguments.document_tokens)
    limit = {"max_model_len": arguments.document_tokens + 256}
    more: dict[str, Record] = {
        "ours": limit,
        "transformers": {},
        "vllm": limit | {"max_num_seqs": 8},
        "llama-cpp": limit | {"model": arguments.gguf},
    }
    with ExitStack() as stack:
        common = {"model": path, "dtype": arguments.dtype}
        peers = start({name: common | more[name] for name in arguments.systems.split(",")})
        for peer in peers.values():
            stack.enter_context(peer)
        return [
            *decode(peers, work, arguments.runs, arguments.decode_tokens),
            *overhead(peers, work, arguments.runs, arguments.decode_tokens),
            *ttft(peers, work, arguments.runs),
            *qa(peers, work, arguments),
        ]


def qa(peers: dict[str, Peer], work: Workload, arguments: Namespace) -> Iterable[Record]:
    prompts = work.qa()
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    cpu: dict[str, list[float]] = {name: [] for name in peers}
    answers: dict[str, list[list[int]]] = {}
    for run in range(arguments.qa_runs):
        for name, peer in peers.items():
            peer.ask("reset")
            result = peer.generate(prompts, arguments.new_tokens)
            seconds[name].append(result["total_s"])
            cpu[name].append(result["cpu_s"])
            say(f"qa {run + 1}: {name} {result['total_s']:.1f} s, {result['cpu_s']:.1f} s of cpu")
            answers.setdefault(name, [output["token_ids"] for output in result["outputs"]])
    referee = peers["transformers"]
    differing = {
        name: compare(referee, prompts, answers["transformers"], given, TIE[arguments.dtype])
        for name, given in answers.items()
        if name not in ("transformers", "llama-cpp")
    }
    for name in peers:
        record = {"case": "qa", "system": name, "requests": len(prompts)}
        record |= {"differ": differing.get(name)} | times(seconds[name], cpu[name])
        yield record
    yield from against("qa", seconds, {"transformers": 0.35, "vllm": 1.25})


def compare(
    referee: Peer,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    given: Sequence[list[int]],
    tie: float,
) -> int:
    """How many answers differ from the expected ones; raises when one is wrong."""
    count = 0
    for prompt, right, answer in zip(prompts, expected, given, strict=True):
        if answer == right:
            continue
        count += 1
        assert len(answer) == len(right), f"{len(answer)} tokens instead of {len(right)}"
        step = next(i for i in range(len(right)) if answer[i] != right[i])
        both = [right[step], answer[step]]
        gaps = referee.ask("gaps", token_ids=prompt + right[:step], candidates=both)["gaps"]
        assert max(gaps) <= tie, f"token {step}: {both} lie {gaps} below the best one"
    return count


def ttft(peers: dict[str, Peer], work: Workload, runs: int) -> Iterable[Record]:
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for run in range(-2, runs):  # the first reads the document, the second is not counted
        prompt = work.new_question()
        for name, peer in peers.items():
            if name == "transformers":  # keeps nothing
                continue
            result = peer.generate([prompt], 1)
            output = result["outputs"][0]
            if run >= 0:
                cached = output["cached_tokens"]
                assert cached is None or cached > 0.9 * len(prompt), f"{name}: {cached} cached"
                seconds.setdefault(name, []).append(output["ttft_s"])
                cpu.setdefault(name, []).append(result["cpu_s"])
    for name in seconds:
        tokens = {"prompt_tokens": len(prompt)}
        yield {"case": "ttft", "system": name} | tokens | times(seconds[name], cpu[name])
    yield from against("ttft", seconds, {"vllm": 1.0})


def decode(peers: dict[str, Peer], work: Workload, runs: int, count: int) -> Iterable[Record]:
    yield from decode_case("decode, batch 8", 8, peers, work, runs, count, goal=0.65)
    yield from decode_case("decode, batch 1", 1, peers, work, runs, count)
    with busy_core():
        name, runs, count = "decode, batch 8 beside a busy core", min(runs, 3), max(1, count // 4)
        yield from decode_case(name, 8, peers, work, runs, count)


@contextmanager
def busy_core() -> Iterator[None]:
    """As if somebody compiled something meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def decode_case(
    case: str,
    batch: int,
    peers: dict[str, Peer],
    work: Workload,
    runs: int,
    count: int,
    goal: float | None = None,
) -> Iterable[Record]:
    """``goal``: least part of vLLM's rate."""
    prompts = work.short(batch)
    rates: dict[str, list[float]] = {name: [] for name in peers}
    cpu: dict[str, list[float]] = {name: [] for name in peers}
    for run in range(-1, runs):
        for name, peer in peers.items():
            if name == "llama-cpp" and batch > 1:  # one sequence at a time
                continue
            rate, cpu_s = decode_rate(peer, prompts, count)
            if run >= 0:
                rates[name].append(rate)
                cpu[name].append(cpu_s)
    for name in peers:
        if rates[name]:
            record = {"case": case, "system": name, "tokens_per_s": statistics.median(rates[name])}
            record |= {"step_s": summarize([batch / rate for rate in rates[name]])}
            yield record | {"cpu_s_per_step": statistics.median(cpu[name])}
    yield from against(case, rates, {"vllm": goal, "transformers": None}, "at least")


def decode_rate(peer: Peer, prompts: list[list[int]], count: int) -> tuple[float, float]:
    """Tokens per second, and processor seconds of a step, behind the first tokens.

    Two requests, of one token and of all, because not every system tells when a batch's first
    tokens come."""
    more = {"batch": len(prompts)} if peer.name == "transformers" else {}
    arguments = {"prompts": prompts, **more}
    few = peer.ask("generate", max_tokens=2, **arguments)
    many = peer.ask("generate", max_tokens=2 + count, **arguments)
    took = many["total_s"] - few["total_s"]
    return len(prompts) * count / took, (many["cpu_s"] - few["cpu_s"]) / count


def overhead(peers: dict[str, Peer], work: Workload, runs: int, count: int) -> Iterable[Record]:
    if "ours" not in peers:
        return
    (prompt,) = work.short(1)
    parts = [peers["ours"].ask("overhead", prompt=prompt, max_tokens=count) for _ in range(runs)]
    share = statistics.median(1 - part["model_s"] / part["step_s"] for part in parts)
    step = summarize([part["step_s"] for part in parts])
    goal = {"goal": 0.10, "goal_is": "at most"}
    yield {"case": "overhead, batch 1", "step_s": step, "ratio": share, **goal}


def times(seconds: Sequence[float], cpu: Sequence[float]) -> Record:
    return {"cpu_s": statistics.median(cpu)} | summarize(seconds)


def against(
    case: str,
    samples: dict[str, list[float]],
    goals: dict[str, float | None],
    goal_is: str = "at most",
) -> Iterable[Record]:
    """Our samples as a part of each other system's, one taken beside the other."""
    for other, goal in goals.items():
        if samples.get(other) and samples.get("ours"):
            ratio = paired_ratio(samples["ours"], samples[other])
            judged = {} if goal is None else {"goal": goal, "goal_is": goal_is}
            yield {"case": f"{case}, ours of {other}", "ratio": ratio, **judged}


if __name__ == "__main__":
    main(__doc__, measure, OPTIONS)
