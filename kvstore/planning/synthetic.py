"""Traces for what no published one covers: popular documents, sessions that grow, fashions.

    python -m kvstore.planning.synthetic --requests 10000 --documents 500 --zipf 1.1 > trace.jsonl

A request is one turn of a session. A session begins with a document, drawn by Zipf's law from as
many as there are, and each turn's prompt is the one before and ``turn_blocks`` more. Turns of
``sessions`` sessions are mixed; one that has had its turns makes room for a new one. With drift the
popularity moves on through the documents, by so many ranks a request. Block ids name prefixes, as
in the published traces, and every block is full.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TextIO

import numpy as np

from kvstore.errors import ConfigError
from kvstore.planning.request_batch import TARGET_BLOCKS, Ints, RequestBatch

_SESSION_IDS = 1 << 40  # above the blocks of all documents
_MOST_SESSION_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a synthetic trace is like.

    documents         how many there are
    document_blocks   mean length; lengths are geometric, at least one block
    zipf              exponent of their popularity, 0 for all alike
    drift             ranks that popularity moves on a request
    sessions          that take turns at one time
    turns             mean number a session has; numbers are geometric, at least one
    turn_blocks       that a turn adds
    requests_per_s    mean; the time between two is exponential
    block_tokens      positions of a block
    seed              the same one gives the same trace
    """

    documents: int = 1000
    document_blocks: float = 20.0
    zipf: float = 1.0
    drift: float = 0.0
    sessions: int = 100
    turns: float = 4.0
    turn_blocks: int = 2
    requests_per_s: float = 1.0
    block_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "document_blocks", "sessions", "turns", "block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("zipf", "drift", "turn_blocks", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if not self.requests_per_s > 0:
            raise ConfigError(f"requests_per_s: expected more than 0, got {self.requests_per_s}")


def generate(workload: Workload, num_requests: int) -> Iterator[RequestBatch]:
    """The trace in batches. Memory is that of the documents' lengths and the open sessions."""
    rng = np.random.default_rng(workload.seed)
    lengths = rng.geometric(1 / workload.document_blocks, workload.documents)
    starts = np.cumsum(lengths) - lengths
    weights = np.arange(1, workload.documents + 1, dtype=float) ** -workload.zipf
    popularity = np.cumsum(weights) / weights.sum()
    sessions = _Sessions(workload)
    blocks_per_request = workload.document_blocks + workload.turn_blocks * workload.turns
    chunk = max(1, int(TARGET_BLOCKS / blocks_per_request))
    now_s = 0.0
    for first in range(0, num_requests, chunk):
        count = min(chunk, num_requests - first)
        ranks = np.searchsorted(popularity[:-1], rng.random(count))
        moved = (np.arange(first, first + count) * workload.drift).astype(np.int64)
        fresh = (ranks + moved) % workload.documents
        documents, numbers, turns = sessions.take_turns(
            rng.integers(workload.sessions, size=count),
            fresh,
            rng.geometric(1 / workload.turns, count),
        )
        arrival_s = now_s + np.cumsum(rng.exponential(1 / workload.requests_per_s, count))
        now_s = float(arrival_s[-1])
        grown = np.minimum(turns * workload.turn_blocks, _MOST_SESSION_BLOCKS)
        yield _batch(
            np.stack([starts[documents], _SESSION_IDS + numbers * _MOST_SESSION_BLOCKS], axis=1),
            np.stack([lengths[documents], grown], axis=1),
            arrival_s,
            workload.block_tokens,
        )


def write_mooncake(batches: Iterable[RequestBatch], file: TextIO) -> None:
    """As JSON lines of Mooncake's format."""
    for batch in batches:
        for blocks, num_tokens, arrival_s in batch.prompts():
            record = {
                "timestamp": round(1000 * arrival_s),
                "input_length": num_tokens,
                "output_length": 1,
                "hash_ids": blocks.tolist(),
            }
            file.write(json.dumps(record) + "\n")


class _Sessions:
    """Those that are open: the document, the number and the turns of each."""

    def __init__(self, workload: Workload) -> None:
        self._documents = [0] * workload.sessions
        self._numbers = [0] * workload.sessions
        self._turns = [0] * workload.sessions
        self._turns_left = [0] * workload.sessions
        self._num_begun = 0

    def take_turns(self, which: Ints, fresh: Ints, turns: Ints) -> tuple[Ints, Ints, Ints]:
        """All [n]: the session whose turn it is; the document and the number of turns it has if it
        begins with this one. Returns document, session number and turn of each request."""
        taken = []
        for session, document, most in zip(
            which.tolist(), fresh.tolist(), turns.tolist(), strict=True
        ):
            if not self._turns_left[session]:
                self._documents[session] = document
                self._numbers[session] = self._num_begun
                self._num_begun += 1
                self._turns[session], self._turns_left[session] = 0, most
            self._turns[session] += 1
            self._turns_left[session] -= 1
            taken.append((self._documents[session], self._numbers[session], self._turns[session]))
        documents, numbers, turn = np.array(taken, np.int64).reshape(-1, 3).T
        return documents, numbers, turn


def _batch(starts: Ints, lengths: Ints, arrival_s: np.ndarray, block_tokens: int) -> RequestBatch:
    """Requests of consecutive runs of ids: ``starts`` and ``lengths`` are [r, runs]."""
    flat = lengths.reshape(-1)
    before = np.cumsum(flat) - flat
    blocks = np.repeat(starts.reshape(-1) - before, flat) + np.arange(flat.sum())
    per_request = lengths.sum(axis=1)
    offsets = np.concatenate(([0], np.cumsum(per_request)))
    return RequestBatch(
        blocks.astype(np.uint64), offsets, per_request * block_tokens, arrival_s, block_tokens
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m kvstore.planning.synthetic",
        description="Write a synthetic trace of requests to stdout, for kvstore plan.",
    )
    parser.add_argument("--requests", type=int, default=10_000, help="default: 10000")
    for field in fields(Workload):
        kind = type(field.default)
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            option, type=kind, default=field.default, help=f"default: {field.default}"
        )
    arguments = vars(parser.parse_args())
    num_requests = arguments.pop("requests")
    try:
        workload = Workload(**arguments)
    except ConfigError as error:
        parser.error(str(error))
    try:
        write_mooncake(generate(workload, num_requests), sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
