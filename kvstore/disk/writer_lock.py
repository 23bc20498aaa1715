"""The right to write: one thread of one process at a time, with a limit to the waiting.

Stands before LMDB's own lock, which knows no limit and would hang every writer behind one that was
stopped in the middle.
"""

import threading
import time

from kvstore.disk.attach import Attachment

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.005


class WriterBusyError(Exception):
    """Another writer held the lock for the whole time limit."""


class WriterLock:
    """``wait_s`` sums up waits that ended; ``waiting_since`` (monotonic) is one that has not."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self.waiting_since: float | None = None
        self._threads = threading.Lock()
        self._holder: Attachment | None = None

    def acquire(self, attachment: Attachment, timeout_s: float) -> None:
        """Raises ``WriterBusyError``. Record locks know no time limit either, hence the polling."""
        if self._try(attachment):
            return
        start = self.waiting_since = time.monotonic()
        pause = _FIRST_PAUSE_S
        try:
            while not self._try(attachment):
                if time.monotonic() - start >= timeout_s:
                    raise WriterBusyError("another process keeps the writer's lock")
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
        finally:
            self.wait_s += time.monotonic() - start
            self.waiting_since = None

    def release(self) -> None:
        assert self._holder is not None
        self._holder.release_writer_lock()
        self._holder = None
        self._threads.release()

    def _try(self, attachment: Attachment) -> bool:
        """The lock among our threads, then the one among processes."""
        if not self._threads.acquire(blocking=False):
            return False
        if attachment.try_writer_lock():
            self._holder = attachment
            return True
        self._threads.release()
        return False
