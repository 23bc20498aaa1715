"""A worker's side of the protocol: one JSON object a line on stdin, one answer a line on stdout.

Runs in the environments of other systems: standard library only.

    {"op": "generate", "prompts": [[token, …], …], "max_tokens": n}
        -> {"outputs": [{"token_ids", "ttft_s", "total_s", "cached_tokens"}, …], "total_s"}
           greedy, end-of-text ignored, all prompts submitted at once; times count from there;
           cached_tokens is null where the system does not say
    {"op": "reset"}     -> {}   forgets what is cached
    {"op": "info"}      -> {"system", "version", …}
    {"op": NAME, …}     -> what the worker's method NAME returns
Every answer has ``cpu_s``, processor time of all threads: what a busy machine leaves comparable.
Anything that goes wrong: {"error": text}. A worker's first line is {"ready": true}; it ends when
its stdin does.
"""

import json
import os
import sys
import time
from typing import Any, Protocol


class Worker(Protocol):
    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]: ...

    def reset(self) -> dict[str, Any]: ...

    def info(self) -> dict[str, Any]: ...


def take_stdout() -> int:
    """The descriptor to answer on. What libraries print goes to stderr from now on."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(worker: Worker, answers: int) -> None:
    with os.fdopen(answers, "w") as out:
        _send(out, {"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            before = time.process_time()
            try:
                result = getattr(worker, request.pop("op"))(**request)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            _send(out, result | {"cpu_s": time.process_time() - before})


def _send(out: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)
