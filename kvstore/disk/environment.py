"""One LMDB environment of this process: opened once, shared by every store on the same directory.

Adds to liblmdb what it does not do: a second open in one process shares the first; a writer's
lock with a time limit; a remap waits for the read transactions of this process (liblmdb would
unmap under them); a forked child is refused; a file that was replaced or grown by another process
is followed; a file in doubt is checked before liblmdb sees it, in the background, and until then
the environment is ``CHECKING``.

Does not know blocks.
"""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import lmdb

from kvstore.disk import opening, startup
from kvstore.disk.attach import MAX_PUBLISHED_BYTES, Attachment, Header, boot_id
from kvstore.disk.gate import Gate
from kvstore.disk.schema import Head
from kvstore.disk.structure import DATA_FILE
from kvstore.disk.writer_lock import WriterBusyError, WriterLock
from kvstore.errors import KVStoreError, StoreClosedError, TierBrokenError

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY_BYTES = 50 << 30
# lock.mdb, attached, and the blocks in which a file system keeps a large file's extents
OVERHEAD_BYTES = 128 << 10
_SHARE_WAIT_S = 0.5  # for another process's start; a longer wait goes to the background
_CREATE_WAIT_S = 10.0


class State(Enum):
    OK = "ok"
    CHECKING = "checking"  # the file is being judged, or another process holds it alone
    OFF = "off"


class Environment:
    """Made and closed by ``registry`` only: one per directory and process.

    index, payload, children, recency, namespaces, meta
                      handles of the databases; others after the file was opened anew
    generation        of the capacity that was adopted last
    page_size         liblmdb's, bytes
    reason            why the state is not ``OK``
    waits_for_others  to open: another process checks or compacts
    """

    def __init__(
        self,
        directory: Path,
        *,
        role: str,
        durability: str,
        is_read_only: bool,
        raise_on_damage: bool,
        capacity_bytes: int | None,
    ) -> None:
        self.directory = directory
        self.data_file = directory / DATA_FILE
        self.durability = durability
        self.is_read_only = is_read_only
        self.num_users = 0
        self.is_inherited = False  # by a forked child
        self.waits_for_others = False
        self.reason: str | None = None
        self.generation = 0
        self.capacity_bytes = capacity_bytes or DEFAULT_CAPACITY_BYTES
        self.page_size = os.sysconf("SC_PAGE_SIZE")
        self._role = role
        self._raise_on_damage = raise_on_damage
        self._pid = os.getpid()
        self._gate = Gate()
        self.writer_lock = WriterLock()
        self._reopening = threading.Lock()
        self._publishing = threading.Lock()
        self._published: dict[int, Mapping[str, Any]] = {}
        self._lmdb: Any = None
        self._identity: tuple[int, int] | None = None
        self._is_marked_unsynced = False
        self._is_closing = False
        self._ready = threading.Event()
        self._state = State.CHECKING
        self._attach()

    # --- coming up --------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Take our place in the directory and open it, or leave that to a thread."""
        self._ready.clear()
        self._state = State.CHECKING
        self._is_marked_unsynced = False
        try:
            attachment = Attachment(self.directory, self._role, read_only=self.is_read_only)
        except OSError as error:
            raise self._explain(error) from error
        self.attachment = attachment
        try:
            later = None
            if not self.is_read_only and attachment.try_exclusive():
                later = startup.settle(
                    attachment, self.data_file, raise_on_damage=self._raise_on_damage
                )
            if later is None and not attachment.share(_SHARE_WAIT_S):
                later = self._held_alone()
            if later is None:
                self._open()
        except OSError as error:
            attachment.detach()
            raise self._explain(error) from error
        except BaseException:
            attachment.detach()
            raise
        if later is not None:
            self.reason = later
            threading.Thread(target=self._attach_later, name="kv-disk-check", daemon=True).start()

    def _attach_later(self) -> None:
        """Thread: check the file if the directory is ours alone, wait if it is another's, open."""
        try:
            if not self.is_read_only and self.attachment.try_exclusive():
                startup.settle_by_deep_check(
                    self.attachment, self.data_file, raise_on_damage=self._raise_on_damage
                )
            while not self.attachment.share(_SHARE_WAIT_S):
                if self._is_closing:
                    raise StoreClosedError(f"{self.directory}: closed before it was opened")
                self.reason = self._held_alone()
                self.waits_for_others = True
            self._open()
        except (KVStoreError, OSError, lmdb.Error) as error:
            self.turn_off(str(error))
        finally:
            self.waits_for_others = False
            self._ready.set()

    def _held_alone(self) -> str:
        return f"{self.directory} is held alone by {self.attachment.describe_holders()}"

    def _open(self) -> None:
        """Open the environment under the shared lock, create it where it is empty."""
        finding = startup.require_sound(self.attachment, self.data_file)
        is_new = finding.main_root is None
        if is_new and self.is_read_only:
            self.turn_off(f"{self.directory} is empty")
            return
        self.page_size = finding.page_size or self.page_size
        self.attachment.claim_slot()
        self._gate.marks = self.attachment.marks
        self._gate.enter()
        try:
            self._lmdb = opening.open_file(
                self.directory,
                is_read_only=self.is_read_only,
                is_synced=self.durability == "power",
                has_locks=self.attachment.can_write,
            )
            stat = self.data_file.stat()
            self._identity = (stat.st_dev, stat.st_ino)
            if is_new:
                with self._writing(self._lmdb.begin, _CREATE_WAIT_S) as txn:
                    opening.create_databases(self._lmdb, txn, self.capacity_bytes)
            head = self._take_handles()
        except (lmdb.Error, OSError, WriterBusyError) as error:
            self._close_lmdb()
            raise self._explain(error) from error
        except BaseException:
            self._close_lmdb()
            raise
        finally:
            self._gate.leave()
        if head is not None:
            self.adopt(head)
        self._state, self.reason = State.OK, None
        self._ready.set()

    def _take_handles(self) -> Head | None:
        opened = opening.take_handles(self._lmdb, self.directory)
        self.index, self.payload, self.children = opened.index, opened.payload, opened.children
        self.recency, self.namespaces = opened.recency, opened.namespaces
        self.meta = opened.meta
        return opened.head

    def _explain(self, error: Exception) -> TierBrokenError:
        return opening.explain(self.directory, self._pid, error)

    # --- state ------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Until the environment is up or has failed; False when the time ran out."""
        return self._ready.wait(timeout_s)

    def turn_off(self, reason: str) -> None:
        """Nothing more is read or written; logged once."""
        if self._state is not State.OFF:
            logger.warning("disk tier off path=%s reason=%s", self.directory, reason)
        self._state, self.reason = State.OFF, reason
        self._ready.set()

    def report_damage(self, error: BaseException) -> None:
        """liblmdb found its own file damaged: off now, checked and set aside at the next start."""
        header = self.attachment.read_header() or Header()
        self.attachment.write_header(replace(header, suspicion=type(error).__name__))
        self.turn_off(f"the database is damaged: {error}")

    def _refuse(self) -> NoReturn:
        if self.is_inherited:
            raise StoreClosedError(
                f"{self.directory}: this process was forked from the one that opened the cache; "
                "open it again here"
            )
        raise TierBrokenError(self.reason or "the disk tier is off", tier="disk")

    def follow_file(self) -> None:
        """Reopen when the file at our path is not the one we hold. Raises ``TierBrokenError``."""
        try:
            stat = self.data_file.stat()
        except OSError as error:
            self.turn_off(f"{self.data_file} is gone: {error.strerror}")
            raise TierBrokenError(self.reason or "", tier="disk") from error
        if (stat.st_dev, stat.st_ino) == self._identity:
            return
        with self._reopening:
            if (stat.st_dev, stat.st_ino) != self._identity:  # no other thread was faster
                logger.warning("cache file was replaced, reopening path=%s", self.data_file)
                self._reopen()

    def recover(self) -> None:
        """Reopen after a failure that left liblmdb unable to go on. Raises ``TierBrokenError``."""
        with self._reopening:
            self._reopen()

    def _reopen(self) -> None:
        with self._gate.alone():
            self._state = State.CHECKING  # who waits at the gate finds no environment behind it
            self._close_lmdb()
            self.attachment.detach()
        try:
            self._attach()
        except KVStoreError as error:
            self.turn_off(str(error))
            raise TierBrokenError(str(error), tier="disk") from error

    # --- transactions -----------------------------------------------------------------------------

    def begin_read(self) -> Any:
        """A read transaction with mapped values; end it with ``end_read``, soon, same thread."""
        while True:
            self._gate.enter()
            try:
                if self._state is not State.OK:
                    self._refuse()
                return self._lmdb.begin(buffers=True)
            except lmdb.MapResizedError:
                self._gate.leave()
                self.resize(self.map_bytes(self.capacity_bytes), at_least_file=True)
            except BaseException:
                self._gate.leave()
                raise

    def end_read(self, txn: Any) -> None:
        try:
            txn.abort()
        finally:
            self._gate.leave()

    @contextlib.contextmanager
    def read(self) -> Iterator[Any]:
        txn = self.begin_read()
        try:
            yield txn
        finally:
            self.end_read(txn)

    def write(self, timeout_s: float) -> contextlib.AbstractContextManager[Any]:
        """A write transaction: committed at the end of the block, aborted by an exception.

        Begin and commit happen in the calling thread. Raises ``WriterBusyError`` when another
        writer holds the lock for ``timeout_s``, ``TierBrokenError`` without an environment.
        """
        if self._state is not State.OK:
            self._refuse()
        return self._writing(self._begin_write, timeout_s)

    def _begin_write(self, *, write: bool) -> Any:
        try:
            return self._lmdb.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            self._gate.leave()
            try:
                self.resize(self.map_bytes(self.capacity_bytes), at_least_file=True)
            finally:
                self._gate.enter()
            return self._lmdb.begin(write=write, buffers=True)

    @contextlib.contextmanager
    def _writing(self, begin: Any, timeout_s: float) -> Iterator[Any]:
        self.writer_lock.acquire(self.attachment, timeout_s)
        try:
            if not self._is_marked_unsynced and self.durability == "process":
                header = self.attachment.read_header() or Header()
                self.attachment.write_header(replace(header, unsynced_boot=boot_id()))
                self._is_marked_unsynced = True
            self._gate.enter()
            try:
                with begin(write=True) as txn:
                    yield txn
            finally:
                self._gate.leave()
        finally:
            self.writer_lock.release()

    # --- size -------------------------------------------------------------------------------------

    def adopt(self, head: Head) -> None:
        """Take over the directory's capacity, outside any transaction of this thread."""
        self.generation, self.capacity_bytes = head.generation, head.capacity_bytes
        self.resize(self.map_bytes(head.capacity_bytes))

    def map_bytes(self, capacity_bytes: int) -> int:
        pages = (capacity_bytes - OVERHEAD_BYTES) // self.page_size
        return max(pages, 16) * self.page_size

    @property
    def map_pages(self) -> int:
        """Pages the file may grow to now. It is larger than the capacity after that was lowered."""
        return int(self._lmdb.info()["map_size"]) // self.page_size

    @property
    def file_pages(self) -> int:
        """Pages of the file that were ever used, as last committed."""
        return int(self._lmdb.info()["last_pgno"]) + 1

    def resize(self, map_bytes: int, *, at_least_file: bool = False) -> None:
        """Remap with this size, or the size in use if that is larger; waits for our readers."""
        with self._gate.alone():
            if self._lmdb is None:
                return
            if int(self._lmdb.info()["map_size"]) != map_bytes or at_least_file:
                self._lmdb.set_mapsize(map_bytes)

    def free_stale_readers(self) -> int:
        """Give up the slots of readers that were killed: they would keep freed pages for ever."""
        self._gate.enter()
        try:
            return int(self._lmdb.reader_check()) if self._state is State.OK else 0
        finally:
            self._gate.leave()

    def trim(self) -> None:
        """Give back what a commit that failed for lack of space wrote behind the last page."""
        with contextlib.suppress(WriterBusyError, OSError):
            self.writer_lock.acquire(self.attachment, _CREATE_WAIT_S)
            try:
                end = self.file_pages * self.page_size
                if self.data_file.stat().st_size > end:
                    os.truncate(self.data_file, end)
            finally:
                self.writer_lock.release()

    def sync(self) -> None:
        """fsync the file."""
        self._gate.enter()
        try:
            if self._lmdb is not None and not self.is_read_only:
                self._lmdb.sync(True)
        finally:
            self._gate.leave()

    # --- what others read of us -------------------------------------------------------------------

    def publish(self, user: int, snapshot: Mapping[str, Any] | None) -> None:
        """Let others read what a user of this environment says of itself; None for no more.

        Any thread. What does not fit, there or on the volume, is left out.
        """
        with self._publishing:
            before = self._published.pop(user, None)
            if snapshot is not None:
                self._published[user] = snapshot
            elif before is None:
                return
            body = json.dumps(list(self._published.values())).encode()
            if self._state is State.OK and len(body) <= MAX_PUBLISHED_BYTES:
                with contextlib.suppress(OSError):
                    self.attachment.publish(body)

    # --- going down -------------------------------------------------------------------------------

    def close(self) -> None:
        """The last one out syncs the file and notes that it did; waits for a check in progress."""
        self._is_closing = True
        self._ready.wait()
        is_sound = self._state is State.OK and not self.is_read_only
        if is_sound:
            with contextlib.suppress(lmdb.Error):
                self.sync()
        with self._gate.alone():
            self._state, self.reason = State.OFF, "closed"
            self._close_lmdb()
        attachment = self.attachment
        if is_sound and attachment.try_exclusive() and not attachment.vanished():
            attachment.write_header(Header())
        attachment.detach()

    def _close_lmdb(self) -> None:
        self._gate.marks = None
        if self._lmdb is not None:
            self._lmdb.close()
            self._lmdb = None

    def abandon(self) -> None:
        """In a forked child: let go of the directory without touching what the parent uses."""
        self.is_inherited = True
        self._state, self.reason = State.OFF, "opened by the parent process"
        self._gate.marks = None
        self.attachment.abandon()
