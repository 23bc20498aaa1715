"""Events in a file: one msgpack map an event, one after another, with its kind under ``type``."""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack

from kvstore.errors import ConfigError
from kvstore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, RequestMatched

_KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared, RequestMatched)
}
_HEAD = msgpack.packb("type")
_MOST_BYTES = 1 << 30  # of one event


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
    for values, _ in _maps(Path(path)):
        kind = _KINDS.get(values.pop("type"))
        if kind is not None:
            known = {each.name for each in fields(kind)}
            yield kind(**{name: value for name, value in values.items() if name in known})


def _as_map(event: Event) -> dict[str, Any]:
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    return {"type": type(event).__name__, **values}


def _end_of_events(path: Path) -> int:
    return max((end for _, end in _maps(path)), default=0)


def _maps(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Each whole map of a file, and where it ends."""
    with path.open("rb") as file:
        head = file.read(1 + len(_HEAD))[1:]  # the first byte counts the map's entries
        if head != _HEAD[: len(head)]:
            raise ConfigError(f"{path} is not a file of events; name another file")
        file.seek(0)
        unpacker = msgpack.Unpacker(file, max_buffer_size=_MOST_BYTES)
        while True:
            try:
                value = unpacker.unpack()
            except (ValueError, msgpack.UnpackException):  # the end, or not written whole
                return
            if not isinstance(value, dict) or "type" not in value:
                return
            yield value, unpacker.tell()
