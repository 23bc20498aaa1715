"""How many cores a forward on a CPU finds free beside whatever else runs on the machine.

Threads of OpenMP meet after every operator, and all wait for the last. One whose core a transfer,
another engine or somebody's compiler has makes every meeting late: a busy thread beside two that
compute makes a decode step three times as long, where one thread alone takes a quarter longer. So a
forward takes a thread fewer when threads had to wait for a core, and tries one more now and then.

Linux counts for how long each thread could have run and did not. Where nothing counts it, all cores
are taken to be free, and threads sleep until the next operator instead of waiting awake.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_THREADS = Path("/proc/self/task")
# How far a container may use the cores that it sees: "max 100000" where it may use all.
_RATIONS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))

# Between two looks; one takes some 10 µs a thread.
_LOOK_S = 0.05
# Threads that wanted a core and had none, on average since the last look. Two threads that computed
# on two cores: less than 0.05 in nine looks of ten; beside a third that was always busy: over 0.7.
_CONTENDED = 0.4
# Before a thread that was given up is tried again. Doubled each time that it was in vain.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 8.0


def spin_count() -> str:
    """``GOMP_SPINCOUNT``: rounds in which a thread of GNU OpenMP waits awake, then it sleeps.

    To wake one takes 50 µs, and a forward has hundreds of operators. 10,000 rounds, some 0.2 ms,
    last until the next one; its default, about fifteen times as many, was slower. Awake threads are
    in the way of others, so it takes ``FreeCores``; and they use up a ration of CPU time.
    """
    is_rationed = False
    for path in _RATIONS:
        with contextlib.suppress(OSError, IndexError):
            is_rationed |= path.read_text().split()[0] not in ("max", "-1")
    return "0" if is_rationed or not core_waits() else "10000"


def core_waits() -> dict[str, float]:
    """Seconds for which each thread of this process has waited for a core so far."""
    waits = {}
    with contextlib.suppress(OSError):
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError, IndexError):  # it has ended, or nobody counts
                waits[thread.name] = int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    return waits


class FreeCores:
    """Not thread-safe: who runs the forwards asks before each.

    most   threads that a forward takes when nobody else is there
    waits  as ``core_waits``
    clock  seconds
    """

    def __init__(
        self,
        most: int,
        waits: Callable[[], Mapping[str, float]] = core_waits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = self._count = most
        self._read_waits = waits
        self._clock = clock
        self._looked_at = clock()
        self._waits = waits()
        self._pause_s = _FIRST_PAUSE_S
        self._try_at = self._looked_at

    def count(self) -> int:
        """Threads for the forward that comes next: at least one, at most ``most``."""
        now = self._clock()
        if self._most > 1 and now - self._looked_at >= _LOOK_S:
            waits = self._read_waits()
            waited_s = sum(wait - self._waits.get(name, 0.0) for name, wait in waits.items())
            self._follow(waited_s / (now - self._looked_at), now)
            self._looked_at, self._waits = now, waits
        return self._count

    def _follow(self, num_waiting: float, now: float) -> None:
        if num_waiting > _CONTENDED:
            if self._count > 1:
                self._count = max(1, self._count - max(1, round(num_waiting)))
                self._try_at = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        elif self._count == self._most:
            self._pause_s = _FIRST_PAUSE_S
        elif now >= self._try_at:
            self._count += 1
