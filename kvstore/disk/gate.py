"""Who is inside liblmdb in this process, so that nothing is unmapped under a reader.

Does not know LMDB.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator

from kvstore.disk.attach import INSIDE, NUM_MARKS, OUTSIDE


class Gate:
    """Threads inside liblmdb, counted; a remap closes the gate and waits until all have left.

    No lock on the way in, for it is on the path of every read: a list's append and pop are atomic,
    and whoever leaves looks at ``_is_closed`` after it has left, as whoever closes looks at
    ``_inside`` after it has closed.
    """

    def __init__(self) -> None:
        self._inside: list[None] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.local()
        self._thread_numbers = itertools.count()
        self.marks: memoryview | None = None  # of the attachment, a byte per thread

    def enter(self) -> None:
        self._inside.append(None)
        while self._is_closed:
            self._step_back()
        if self.marks is not None:
            self.marks[self._mark()] = INSIDE

    def leave(self) -> None:
        if self.marks is not None:
            self.marks[self._mark()] = OUTSIDE
        self._inside.pop()
        if self._is_closed:
            with self._changed:
                self._changed.notify_all()

    def _step_back(self) -> None:
        self._inside.pop()
        with self._changed:
            self._changed.notify_all()
            while self._is_closed:
                self._changed.wait()
        self._inside.append(None)

    def _mark(self) -> int:
        try:
            number: int = self._thread.number
        except AttributeError:
            number = self._thread.number = next(self._thread_numbers) % NUM_MARKS
        return number

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody is inside during the block, and whoever comes waits. The caller is not inside."""
        with self._changed:
            while self._is_closed:
                self._changed.wait()
            self._is_closed = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()
