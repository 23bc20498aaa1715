"""Traces of requests in the forms they come in, read as a stream of batches.

    mooncake   JSON lines: ``input_length``, ``hash_ids`` of blocks (512 tokens each, the last one
               of a request partial), ``timestamp`` in milliseconds; the format published with
               Mooncake (Qin et al., FAST 2025)
    tokens     JSON lines: a list of token ids, or an object with ``token_ids`` and a ``timestamp``
    text       JSON lines: a string, or an object with ``prompt`` and a ``timestamp``
    events     an event file of ours (``event_file``): what requests were matched against

Of token ids and texts only full blocks count, as in the store; a block's identity is a hash of all
tokens up to its end. Nothing of a trace is kept but the batch that is being made. Anything may be
gzipped; ``-`` is standard input.
"""

import gzip
import json
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, cast

import xxhash

from kvstore.errors import ConfigError, TraceError
from kvstore.planning.request_batch import RequestBatch, RequestBatcher
from kvstore.reports.event_file import unpack_events
from kvstore.reports.events import RequestMatched

FORMATS = ("mooncake", "tokens", "text", "events")
_BLOCK_TOKENS = {"mooncake": 512, "tokens": 16, "text": 16}
_GZIP = b"\x1f\x8b"
_BAD_LINE = (ValueError, TypeError, OverflowError, AttributeError, RecursionError)
_TOKENS_KEYS = ("token_ids", "prompt_token_ids")
_TEXT_KEYS = ("prompt", "text")

Encode = Callable[[str], Sequence[int]]


class _Stream(Protocol):
    """A binary file that can be looked into."""

    def peek(self, size: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


def read_trace(
    source: str | Path,
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    encode: Encode | None = None,
) -> Iterator[RequestBatch]:
    """The batches of a trace.

    source         a path, or ``-``
    format         one of ``FORMATS``; found out by default
    block_tokens   positions of a block: by default 512 for ``mooncake`` and 16 for tokens and
                   texts; event files have their own
    encode         text to token ids; texts need it

    Raises ``ConfigError`` when the source cannot be opened or a setting is missing, ``TraceError``
    for a line that cannot be used, with its number.
    """
    name = "standard input" if str(source) == "-" else str(source)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_size: expected at least 1, got {block_tokens}")
    with _opened(source, name) as raw:
        stream = raw
        if raw.peek(2)[:2] == _GZIP:
            stream = cast(BufferedReader, gzip.GzipFile(fileobj=raw))
        try:
            found = format or _format_of(stream, name)
            if found == "events":
                yield from _event_batches(stream, name)
            else:
                size = block_tokens or _BLOCK_TOKENS[found]
                yield from _LineReader(found, size, encode, name).batches(stream)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{name}: damaged gzip data: {error}") from error


def _opened(source: str | Path, name: str) -> AbstractContextManager[BufferedReader]:
    if str(source) == "-":
        return nullcontext(cast(BufferedReader, sys.stdin.buffer))
    try:
        return Path(source).open("rb")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}; name a trace, or - for stdin") from error


def _format_of(stream: BufferedReader, name: str) -> str:
    """By the first byte, and of JSON by the first line's keys. Reads nothing."""
    start = stream.peek(1)
    if not start:
        raise TraceError(f"{name}: empty")
    if start[0] & 0xF0 == 0x80 or start[0] == 0xDE:  # a msgpack map
        return "events"
    line = start.lstrip()[: 1 << 16]
    if line[:1] == b"[":
        return "tokens"
    if line[:1] == b'"':
        return "text"
    keys_of = {"mooncake": ("hash_ids",), "tokens": _TOKENS_KEYS, "text": _TEXT_KEYS}
    if line[:1] == b"{":
        first = line.partition(b"\n")[0]
        for found, keys in keys_of.items():
            if any(f'"{key}"'.encode() in first for key in keys):
                return found
    raise TraceError(
        f"{name}: the first line is of no known trace: expected hash_ids (Mooncake), token_ids, a "
        "prompt, or an event file; see --format"
    )


class _LineReader:
    """JSON lines of one format into batches."""

    def __init__(self, format: str, block_tokens: int, encode: Encode | None, name: str) -> None:
        if format == "text" and encode is None:
            raise ConfigError(f"{name}: texts have tokens only by a tokenizer; name --tokenizer")
        self._encode = encode
        self._name = name
        self._size = block_tokens
        self._parse = {
            "mooncake": self._mooncake,
            "tokens": self._tokens,
            "text": self._text,
        }[format]

    def batches(self, lines: BufferedReader) -> Iterator[RequestBatch]:
        batcher, number, now_s = RequestBatcher(self._size), 0, 0.0
        while line := lines.readline():
            number += 1
            if line.isspace():
                continue
            try:
                record = json.loads(line)
                blocks, num_tokens = self._parse(record)
                if isinstance(record, dict) and "timestamp" in record:
                    now_s = max(now_s, _number(record, "timestamp") / 1000)
                batch = batcher.add(blocks, num_tokens, now_s)
            except _BAD_LINE as error:
                raise TraceError(f"{self._name} line {number}: {_reason(error)}") from None
            if batch is not None:
                yield batch
        if (batch := batcher.flush()) is not None:
            yield batch

    def _mooncake(self, record: Any) -> tuple[list[int], int]:
        if not isinstance(record, dict):
            raise ValueError("expected an object with input_length and hash_ids")  # noqa: TRY004
        ids = record.get("hash_ids")
        if not isinstance(ids, list):
            raise ValueError("expected hash_ids, a list of block ids")  # noqa: TRY004
        num_tokens = int(_number(record, "input_length"))
        if ids and isinstance(ids[0], str):
            ids = [xxhash.xxh3_64_intdigest(each.encode()) for each in ids]
        return ids, num_tokens

    def _tokens(self, record: Any) -> tuple[list[int], int]:
        ids = _first_of(record, _TOKENS_KEYS, list, "a list of token ids")
        return self._chained(ids), len(ids)

    def _text(self, record: Any) -> tuple[list[int], int]:
        assert self._encode is not None
        ids = list(self._encode(_first_of(record, _TEXT_KEYS, str, "a text")))
        return self._chained(ids), len(ids)

    def _chained(self, ids: list[int]) -> list[int]:
        """Identities of the full blocks: each hashes its tokens and the block before."""
        tokens = array("I")
        tokens.fromlist(ids)
        data, run = tokens.tobytes(), 4 * self._size
        blocks, parent = [], 0
        for start in range(0, len(data) - run + 1, run):
            parent = xxhash.xxh3_64_intdigest(data[start : start + run], seed=parent)
            blocks.append(parent)
        return blocks


def _first_of(record: Any, keys: tuple[str, ...], kind: type, what: str) -> Any:
    if isinstance(record, dict):
        record = next((record[key] for key in keys if key in record), None)
    if not isinstance(record, kind):
        raise ValueError(f"expected {what}, or an object with it under {' or '.join(keys)}")  # noqa: TRY004
    return record


def _number(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 60:
        raise ValueError(f"expected {key}, a number of at least 0, got {value!r}")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, TypeError | OverflowError | AttributeError):
        return f"expected ids that are unsigned integers of at most 64 bits: {error}"
    return str(error)


def _event_batches(stream: BufferedReader, name: str) -> Iterator[RequestBatch]:
    batcher: RequestBatcher | None = None
    size, began_s, now_s = 0, 0.0, 0.0
    for event in unpack_events(stream, name):
        if not isinstance(event, RequestMatched):
            continue
        if batcher is None:
            size, began_s = event.block_size, event.ts
            batcher = RequestBatcher(size)
        if event.block_size != size:
            raise TraceError(
                f"{name}: blocks of {size} and of {event.block_size} tokens in one file; write the "
                "events of engines with different block sizes to different files"
            )
        now_s = max(now_s, event.ts - began_s)
        # A key is 32 bytes of sha256: its first eight tell a billion blocks apart.
        ids = [int.from_bytes(key[:8], "little") for key in event.block_hashes]
        if (batch := batcher.add(ids, event.num_tokens, now_s)) is not None:
            yield batch
    if batcher is not None and (batch := batcher.flush()) is not None:
        yield batch
