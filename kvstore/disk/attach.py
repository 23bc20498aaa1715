"""Who holds a cache directory now, who vanished while holding it, and who writes.

``D/attached`` is the meeting point of all processes, one fixed slot of text each::

    slot 0   header: boot of the last unsynced writer, vanished holders in a row, a suspicion
    slot 1…  one holder: pid, boot id, pid namespace, role; then a mark for each of its threads,
             "!" while that is inside liblmdb, "." otherwise
    behind   what each holder publishes of itself: a checksum, a length, and so many bytes

A holder keeps up to three kernel locks on it, which all end with the process, however it ends:
``flock(LOCK_SH)`` on the file (``LOCK_EX`` to compact, check or set aside); a record lock on its
slot, so that a slot with text but without a lock belongs to one that vanished; and, while it
writes, a record lock far behind the end. The writer's lock exists beside LMDB's own because that
has no time limit: a writer that is stopped while holding it would hang every other one.

Record locks are open-file-description locks: closing another descriptor of the same file does not
drop them, as it would POSIX locks. Does not know LMDB.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import TierBrokenError

ATTACH_FILE = "attached"
SLOT_BYTES = 256
NUM_SLOTS = 256
NUM_MARKS = 48
_MAX_SUSPICION = 24  # a label, not a message: the slot is small
_MARKS = SLOT_BYTES - NUM_MARKS - 1
_WRITER_LOCK = 1 << 40  # a byte no slot reaches
_PUBLISHED = SLOT_BYTES * NUM_SLOTS  # where what is published begins; holes take no room
MAX_PUBLISHED_BYTES = (16 << 10) - 8
_PUBLISHED_HEAD = struct.Struct("<II")  # crc32 of the bytes, their number
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid
INSIDE, OUTSIDE = ord("!"), ord(".")


def boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"


def pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return "unknown"


def _parse_slot(raw: bytes) -> tuple[dict[str, Any], bool] | None:
    """A slot's fields, and whether a thread is marked inside.

    None for an empty slot, no fields for an unreadable one.
    """
    text = raw[:_MARKS].strip(b"\0 \n")
    if not text:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    return (fields if isinstance(fields, dict) else {}), INSIDE in raw[_MARKS:]


@dataclass(frozen=True, slots=True)
class Holder:
    slot: int
    pid: int
    namespace: str
    role: str
    was_inside: bool  # inside liblmdb: it died there, if it vanished
    since: float | None = None  # seconds since 1970

    def __str__(self) -> str:
        elsewhere = "" if self.namespace == pid_namespace() else " of another container"
        return f"pid {self.pid}{elsewhere} ({self.role})"


@dataclass(frozen=True, slots=True)
class Header:
    unsynced_boot: str | None = None
    num_vanished: int = 0  # in a row, since the last orderly end
    suspicion: str | None = None  # liblmdb reported damage


class Attachment:
    """This process's hold on one directory. Not thread-safe, except for writing ``marks``.

    A process that a damaged file kills leaves its marks behind: its successor knows why it died.
    """

    def __init__(self, directory: Path, role: str, *, read_only: bool = False) -> None:
        """Open the file, create it where it is missing; takes no lock yet. Raises ``OSError``.

        With ``read_only`` a directory that cannot be written is held without a slot, or, where the
        file is missing, not at all.
        """
        self.role = role
        self._fd: int | None = None
        self._slot: int | None = None
        self._map: mmap.mmap | None = None
        self.marks: memoryview | None = None  # NUM_MARKS bytes of our slot
        self.can_write = True
        path = directory / ATTACH_FILE
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            if not read_only:
                raise
            self.can_write = False
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return
        if os.fstat(self._fd).st_size < SLOT_BYTES * NUM_SLOTS:
            os.ftruncate(self._fd, SLOT_BYTES * NUM_SLOTS)

    # --- the directory as a whole --------------------------------------------------------------

    def try_exclusive(self) -> bool:
        """Take the directory for this process alone, without waiting.

        On failure an earlier hold is gone (the kernel does not convert atomically): share anew.
        """
        return self._flock(fcntl.LOCK_EX)

    def share(self, timeout_s: float) -> bool:
        """Hold the directory together with others; False when one kept it alone all the time."""
        deadline = time.monotonic() + timeout_s
        while not self._flock(fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def _flock(self, kind: int) -> bool:
        if self._fd is None:
            return True
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # --- slots ----------------------------------------------------------------------------------

    def claim_slot(self) -> None:
        """Write down who we are. Raises ``TierBrokenError`` when no slot is left."""
        if not self.can_write or self._slot is not None:
            return
        for slot in range(1, NUM_SLOTS):
            if self._read_slot(slot) or not self._lock(slot * SLOT_BYTES, SLOT_BYTES):
                continue
            if self._read_slot(slot):  # claimed and left behind between the two
                self._lock(slot * SLOT_BYTES, SLOT_BYTES, fcntl.F_UNLCK)
                continue
            me = {"pid": os.getpid(), "boot": boot_id(), "pidns": pid_namespace()}
            self._write_slot(slot, {**me, "role": self.role, "since": int(time.time())})
            assert self._fd is not None
            self._map = mmap.mmap(self._fd, SLOT_BYTES * NUM_SLOTS)
            start = slot * SLOT_BYTES + _MARKS
            self.marks = memoryview(self._map)[start : start + NUM_MARKS]
            self._slot = slot
            return
        raise TierBrokenError(f"{ATTACH_FILE}: more than {NUM_SLOTS - 1} holders", tier="disk")

    def holders(self) -> list[Holder]:
        """The other processes that hold the directory now."""
        return [holder for holder, is_alive in self._others() if is_alive]

    def describe_holders(self) -> str:
        """For a message that says who is in the way."""
        return ", ".join(map(str, self.holders())) or "another process"

    def vanished(self) -> list[Holder]:
        """Those that ended without saying so."""
        return [holder for holder, is_alive in self._others() if not is_alive]

    def forget_vanished(self) -> None:
        for holder in self.vanished():
            self._clear_slot(holder.slot)

    def _others(self) -> list[tuple[Holder, bool]]:
        if self._fd is None:
            return []
        found = []
        raw = os.pread(self._fd, SLOT_BYTES * NUM_SLOTS, 0)
        for slot in range(1, NUM_SLOTS):
            text = _parse_slot(raw[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])
            if slot == self._slot or not text:
                continue
            fields, was_inside = text
            holder = Holder(
                slot,
                int(fields.get("pid", 0)),
                str(fields.get("pidns", "")),
                str(fields.get("role", "unknown")),
                was_inside,
                fields.get("since"),
            )
            found.append((holder, self._is_locked(slot * SLOT_BYTES)))
        return found

    # --- what holders say of themselves -----------------------------------------------------------

    def publish(self, body: bytes) -> None:
        """Let others read ``body``, at most ``MAX_PUBLISHED_BYTES``, while we hold a slot.

        In place, without fsync: a reader that meets half of it notices, and reads again.
        """
        if self._slot is None or self._fd is None or len(body) > MAX_PUBLISHED_BYTES:
            return
        head = _PUBLISHED_HEAD.pack(zlib.crc32(body), len(body))
        os.pwrite(self._fd, head + body, self._published_at(self._slot))

    def published(self, holder: Holder) -> bytes | None:
        """What a holder lets others read; None for nothing, and while it is being written."""
        assert self._fd is not None
        at = self._published_at(holder.slot)
        raw = os.pread(self._fd, _PUBLISHED_HEAD.size + MAX_PUBLISHED_BYTES, at)
        if len(raw) < _PUBLISHED_HEAD.size:
            return None
        checksum, length = _PUBLISHED_HEAD.unpack_from(raw)
        body = raw[_PUBLISHED_HEAD.size :][:length]
        return body if length and zlib.crc32(body) == checksum else None

    @staticmethod
    def _published_at(slot: int) -> int:
        return _PUBLISHED + slot * (MAX_PUBLISHED_BYTES + _PUBLISHED_HEAD.size)

    # --- header ---------------------------------------------------------------------------------

    def read_header(self) -> Header | None:
        """None where nobody ever wrote one: the directory's history is unknown."""
        text = self._read_slot(0) if self._fd is not None else None
        if not text:
            return None
        fields = text[0]
        return Header(
            fields.get("unsynced_boot"), int(fields.get("vanished", 0)), fields.get("suspicion")
        )

    def write_header(self, header: Header) -> None:
        """The caller holds the directory alone, or the writer's lock."""
        fields = {
            "unsynced_boot": header.unsynced_boot,
            "vanished": header.num_vanished,
            "suspicion": header.suspicion and header.suspicion[:_MAX_SUSPICION],
        }
        if self.can_write:
            self._write_slot(0, fields)

    # --- the writer's lock ----------------------------------------------------------------------

    def try_writer_lock(self) -> bool:
        return self._lock(_WRITER_LOCK, 1)

    def release_writer_lock(self) -> None:
        """Does nothing after ``detach``, which gives up every lock."""
        if self._fd is not None:
            self._lock(_WRITER_LOCK, 1, fcntl.F_UNLCK)

    # --- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leave in an orderly way: clear the slot, then give up every lock.

        One that cannot be cleared is that of a holder who vanished.
        """
        if self._fd is None:
            return
        if self._slot is not None:
            with contextlib.suppress(OSError):
                self._clear_slot(self._slot)
        self.abandon()

    def abandon(self) -> None:
        """Close without touching the file: in a forked child the slot is the parent's."""
        if self.marks is not None and self._map is not None:
            self.marks.release()
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._slot = self._map = self.marks = None

    # --- bytes and record locks -----------------------------------------------------------------

    def _read_slot(self, slot: int) -> tuple[dict[str, Any], int] | None:
        assert self._fd is not None
        return _parse_slot(os.pread(self._fd, SLOT_BYTES, slot * SLOT_BYTES))

    def _write_slot(self, slot: int, fields: dict[str, Any]) -> None:
        assert self._fd is not None
        text = json.dumps(fields).encode().ljust(_MARKS)
        assert len(text) == _MARKS, text
        os.pwrite(self._fd, text + bytes([OUTSIDE]) * NUM_MARKS + b"\n", slot * SLOT_BYTES)

    def _clear_slot(self, slot: int) -> None:
        assert self._fd is not None
        os.pwrite(self._fd, bytes(SLOT_BYTES), slot * SLOT_BYTES)
        at = self._published_at(slot)
        if os.fstat(self._fd).st_size > at:
            # What was published has room on the volume; a hole needs some, and says nothing anyhow.
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, bytes(_PUBLISHED_HEAD.size), at)

    def _lock(self, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
        assert self._fd is not None
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _is_locked(self, start: int) -> bool:
        assert self._fd is not None
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, SLOT_BYTES, 0)
        answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request))
        return bool(answer[0] != fcntl.F_UNLCK)
