"""Carry blocks from one cache to another, in one file or through a pipe (``archive``).

A file is read twice, and nothing of it is stored before all of it has passed; what comes through a
pipe is stored as it comes, each block once it has passed. What an import cannot know is whether the
values are what the model would have computed: import files as you would model weights, from people
you trust.
"""

import contextlib
import fcntl
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from kvstore.block import PutOutcome
from kvstore.disk import schema
from kvstore.disk.environment import Environment, State
from kvstore.disk.ledger import Prepared
from kvstore.disk.offline.archive import (
    ForeignError,
    Namespace,
    RefusedError,
    TreePath,
    begins_one,
    read_items,
    write_block,
    write_end,
    write_namespace,
    write_start,
)
from kvstore.disk.offline.selection import ancestors, find_block, matching_namespaces
from kvstore.disk.places import TEMPORARY_MARK
from kvstore.disk.schema import Head, SealError
from kvstore.disk.slices import reading
from kvstore.disk.store import DiskStore, open_for_change
from kvstore.disk.tree import Visit, walk_tree
from kvstore.errors import CapacityError, ConfigError, CorruptBlockError

Progress = Callable[[int, int | None], None]

_GROUP_BYTES = 16 << 20


def export_documents(
    path: str | Path,
    file: str | Path | IO[bytes],
    *,
    namespace: str | None = None,
    document: str | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write blocks of the cache to ``file``, parents first: ``{"blocks", "bytes", "left_out"}``.

    namespace  the beginning of an id, or a model's name; None for all
    document   the beginning of a block's key (hex): that block, what it continues and what
               continues it; None for all

    Each payload is verified; ``left_out`` counts bad ones, and what is below them. A path appears
    complete or not at all; only its owner can read it, for it holds the documents' tokens.
    ``progress(blocks, of)`` is called for each block, with those of the whole cache.
    """
    with reading(path) as env:
        meant = None if env is None else _what_is_meant(env, namespace, document)
        with _opened_for_writing(file) as out:
            export = _Export(out)
            write_start(out)
            out.flush()  # what a kill leaves behind can be told from anybody's file
            if env is not None and meant is not None:
                export.run(env, meant, progress)
            write_end(out, export.num_blocks, export.num_bytes)
    return {
        "blocks": export.num_blocks,
        "bytes": export.num_bytes,
        "left_out": export.num_left_out,
    }


def _what_is_meant(
    env: Environment, namespace: str | None, document: str | None
) -> Iterable[Visit]:
    """Raises ``ConfigError`` at once, before anything is written."""
    namespaces = matching_namespaces(env, namespace)
    if document is None:
        return walk_tree(env, namespaces)
    start = find_block(env, document)
    return chain(ancestors(env, start), walk_tree(env, namespaces, start))


class _Export:
    """What has been written so far."""

    def __init__(self, out: IO[bytes]) -> None:
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_left_out = 0
        self._out = out
        self._path = TreePath()
        self._named: set[bytes] = set()

    def run(self, env: Environment, meant: Iterable[Visit], progress: Progress | None) -> None:
        total = _num_blocks(env)
        for visit in meant:
            if not visit.is_leaving:
                self._write_block(env, visit.key)
                if progress is not None:
                    progress(self.num_blocks, total)

    def _write_block(self, env: Environment, key: bytes) -> None:
        with env.read() as txn:
            value = txn.get(key, db=env.index)
            value = None if value is None else bytes(value)
            payload = bytes(txn.get(key, db=env.payload) or b"")
        try:
            record = schema.decode_record(key, value or b"")
        except SealError:
            return  # it went meanwhile
        is_good = not record.is_bad and schema.checksum(payload) == record.checksum
        if not is_good or not self._path.admit(key, record):
            self.num_left_out += 1
            return
        self._write_namespace(env, record.namespace)
        write_block(self._out, record, payload)
        self.num_blocks += 1
        self.num_bytes += len(payload)

    def _write_namespace(self, env: Environment, namespace: bytes) -> None:
        """Before the first of its blocks."""
        if namespace in self._named:
            return
        self._named.add(namespace)
        with env.read() as txn:
            identity = schema.decode_identity(namespace, txn.get(namespace, db=env.namespaces))
        if identity:
            write_namespace(self._out, Namespace(namespace, identity))


def _num_blocks(env: Environment) -> int | None:
    with env.read() as txn:
        try:
            return Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"").total.num_blocks
        except SealError:
            return None


@contextlib.contextmanager
def _opened_for_writing(file: str | Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """A stream as it is, or a file that only its owner reads, in its place when it is complete."""
    if not isinstance(file, str | Path):
        yield file
        file.flush()
        return
    target = Path(file)
    if target.exists() and not target.is_file():  # a named pipe, /dev/stdout
        with target.open("wb") as out:
            try:
                yield out
            except BaseException:
                out.raw.close()  # else its buffer waits for a reader, who may never read again
                raise
        return
    temporary = target.with_name(f"{target.name}{TEMPORARY_MARK}{os.getpid()}")
    try:
        _remove_leftovers(target)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(fd, "wb") as out:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(out, fcntl.LOCK_EX)  # until it has its name, or we are gone
            yield out
            out.flush()
            os.fsync(out.fileno())
            temporary.rename(target)
    except OSError as error:  # a full volume, most likely
        temporary.unlink(missing_ok=True)
        raise CapacityError(f"{target}: cannot be written: {error.strerror}") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_leftovers(target: Path) -> None:
    """What exports to the same file left there when they were killed: nobody holds its lock."""
    for leftover in target.parent.glob(f"{glob.escape(target.name)}{TEMPORARY_MARK}*"):
        number = leftover.name.rpartition(TEMPORARY_MARK)[2]
        if not number.isdecimal() or leftover.is_symlink() or not leftover.is_file():
            continue
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if begins_one(file.read(64)):
                leftover.unlink()


def import_documents(
    path: str | Path,
    file: str | Path | IO[bytes],
    *,
    capacity_bytes: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Put what an export holds into the cache at ``path``.

    Returns ``{"blocks", "present", "refused", "evicted", "obstacle"}``: stored; already there;
    found no room; gave way to those stored; why there was no room. The cache is created where there
    is none; what it already knows of a namespace stays. ``progress(blocks, None)`` is called for
    each group of blocks.

    Raises ``ConfigError`` for what is no export, ``CorruptBlockError`` for one that is cut or
    damaged. Of a file nothing was stored then; of a stream that cannot be read twice, all blocks
    before the damage.
    """
    counts: dict[str, Any] = dict.fromkeys(("blocks", "present", "refused", "evicted"), 0)
    counts["obstacle"] = None
    with _opened_for_reading(file) as source:
        if source.seekable():
            start = source.tell()
            for _ in read_items(source):
                pass
            source.seek(start)
        items = read_items(source)
        first = list(islice(items, 1))  # before a cache is created for it
        try:
            with open_for_change(path, "import", capacity_bytes=capacity_bytes) as store:
                _store(store, chain(first, items), counts, progress)
        except RefusedError as error:
            stored = counts["blocks"] + counts["present"]
            raise RefusedError(f"{error}; blocks before that, which were kept: {stored}") from error
    return counts


@contextlib.contextmanager
def _opened_for_reading(file: str | Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream; what is wrong with its bytes is raised with its name."""
    name = file if isinstance(file, str | Path) else "the input"
    try:
        if isinstance(file, str | Path):
            with Path(file).open("rb") as source:
                yield source
        else:
            yield file
    except ForeignError as error:
        raise ConfigError(f"{name}: not an export: {error}") from error
    except RefusedError as error:
        message = f"{name}: not a valid export: {error}"
        raise CorruptBlockError(message, reason="export") from error
    except OSError as error:
        if isinstance(file, str | Path) and error.filename == str(file):
            raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
        raise


def _store(
    store: DiskStore,
    items: Iterable[Prepared | Namespace],
    counts: dict[str, Any],
    progress: Progress | None,
) -> None:
    """In groups; what came before a damaged item is stored, too."""
    known = store.namespaces()
    group: list[Prepared] = []
    group_bytes = 0
    try:
        for item in items:
            if isinstance(item, Namespace):
                if item.id not in known:
                    store.register_namespace(item.id, item.identity)
                continue
            group.append(item)
            group_bytes += item.nbytes
            if group_bytes >= _GROUP_BYTES:
                _put(store, group, counts)
                group_bytes = 0
                if progress is not None:
                    progress(counts["blocks"] + counts["present"] + counts["refused"], None)
    finally:
        _put(store, group, counts)


def _put(store: DiskStore, group: list[Prepared], counts: dict[str, Any]) -> None:
    for outcome in store.put_encoded(group).values():
        if outcome is PutOutcome.STORED:
            counts["blocks"] += 1
        else:
            counts["present" if outcome is PutOutcome.PRESENT else "refused"] += 1
    group.clear()
    stats = store.stats()
    counts["evicted"] = stats.evictions
    if counts["refused"]:
        if stats.state != State.OK.value:
            raise store.refusal()
        counts["obstacle"] = store.why_not()
