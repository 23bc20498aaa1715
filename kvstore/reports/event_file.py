"""Events in a file: one msgpack map an event, one after another, with its kind under ``type``."""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from kvstore.errors import ConfigError
from kvstore.reports.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    RequestMatched,
)

_KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared, RequestMatched)
}
_HEAD = msgpack.packb("type")
_MOST_BYTES = 1 << 30  # of one event
_READ_BYTES = 1 << 20


class EventFile:
    """A sink for ``EventLog.subscribe`` that appends to a file. One process may write it.

    Raises ``ConfigError`` when the file cannot be opened, holds something else, or is being written
    by somebody else. A half event that a killed writer left at its end is cut off.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"event_file: {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = _end_of_events(self.path)
            os.ftruncate(self._file, self._size)
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(
                f"event_file: {path} is being written by another engine; name another file"
            ) from None
        except BaseException:
            os.close(self._file)
            raise

    def __call__(self, events: Sequence[Event]) -> None:
        """Append. What does not fit the volume leaves no half event behind, and raises."""
        data = b"".join(msgpack.packb(_as_map(event)) for event in events)
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._file)


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events of a file, oldest first; a half one ends it.

    Passes over kinds and fields that this version does not know. Raises ``ConfigError`` for a file
    that holds something else.
    """
    with Path(path).open("rb") as file:
        yield from unpack_events(file, str(path))


def unpack_events(file: BinaryIO, name: str) -> Iterator[Event]:
    """The same of an open file or pipe at its start; ``name`` is what errors call it."""
    for values, _ in _maps(file, name):
        kind = _KINDS.get(values.pop("type"))
        if kind is not None:
            known = {each.name for each in fields(kind)}
            yield kind(**{name: value for name, value in values.items() if name in known})


def _as_map(event: Event) -> dict[str, Any]:
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    return {"type": type(event).__name__, **values}


def _end_of_events(path: Path) -> int:
    with path.open("rb") as file:
        return max((end for _, end in _maps(file, str(path))), default=0)


def _maps(file: BinaryIO, name: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole map of a file, and where it ends."""
    start = file.read(1 + len(_HEAD))
    head = start[1:]  # the first byte counts the map's entries
    if head != _HEAD[: len(head)]:
        raise ConfigError(f"{name} is not a file of events; name another file")
    unpacker = msgpack.Unpacker(max_buffer_size=_MOST_BYTES)
    while start:
        unpacker.feed(start)
        try:
            for value in unpacker:
                if not isinstance(value, dict) or "type" not in value:
                    return
                yield value, unpacker.tell()
        except (ValueError, msgpack.UnpackException):  # no msgpack: the rest of a broken write
            return
        start = file.read(_READ_BYTES)
