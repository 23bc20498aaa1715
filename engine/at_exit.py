"""Engines that nobody has closed are closed when the interpreter ends.

Held weakly: one that runs is kept by its step thread, also when nobody else has it any more.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its own hook, before ours
import threading
import weakref
from typing import Protocol

_TIMEOUT_S = 30.0  # to write what is dirty


class Closable(Protocol):
    def close(self, timeout: float | None = None) -> None: ...


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def close_at_exit(engine: Closable) -> None:
    """Unless ``is_closed_now`` is told of it before."""
    _open.add(engine)


def is_closed_now(engine: Closable) -> None:
    _open.discard(engine)


def _close_all() -> None:
    for engine in list(_open):
        engine.close(_TIMEOUT_S)


# Thread pools end before ``atexit`` runs, and closing needs them. What ends them is a hook of
# threading's, registered when they are imported; hooks that were registered later run earlier.
getattr(threading, "_register_atexit", atexit.register)(_close_all)
