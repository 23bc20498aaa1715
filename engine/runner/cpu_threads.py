"""On a CPU: which parts of a decode step run on how many threads.

A decode step is some two hundred products of a few rows with large weights, and thousands of small
operators between them. The products gain from every core; the small ones lose, since most of them
wake threads that fell asleep since the last one and wait until these have found nothing to do.

``torch.set_num_threads`` would also set what threads get that come later, for good. OpenMP's own
setting is the calling thread's alone; torch asks for it before every parallel loop.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class _Width(threading.local):
    """wide   threads of what runs in ``on_all_threads``; 0 where nothing is narrowed"""

    wide: int = 0


_width = _Width()
_PAUSE_SOFT = 1  # OpenMP 5.0, omp_pause_soft: what a thread has set stays


@contextmanager
def on_threads(num_threads: int, *, is_narrow: bool = False) -> Iterator[None]:
    """The calling thread's operators run on ``num_threads`` threads.

    ``is_narrow``: on one, but for those in ``on_all_threads``. Changes nothing where torch's OpenMP
    cannot be reached.
    """
    before = torch.get_num_threads()
    narrow = 1 if is_narrow else num_threads
    if narrow == num_threads == before or _width.wide or _openmp() is None:
        yield
        return
    if is_narrow and num_threads > 1:
        _width.wide = num_threads
    _set_num_threads(narrow)
    try:
        yield
    finally:
        _width.wide = 0
        _set_num_threads(before)


def on_all_threads(
    call: Callable[_Arguments, _Result],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Result:
    """``call(*args, **kwargs)`` as it would run without ``is_narrow``; costs 0.5 µs."""
    wide = _width.wide
    if not wide:
        return call(*args, **kwargs)
    _set_num_threads(wide)
    try:
        return call(*args, **kwargs)
    finally:
        _set_num_threads(1)


def release_threads() -> None:
    """End the threads that wait for the calling thread's next operator.

    Threads of OpenMP wait awake for a moment, which makes them quick, but only while there are no
    more of them than cores. Those of a thread that has done its part would count for ever.
    """
    library = _openmp()
    if library is not None and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_PAUSE_SOFT)


@functools.cache
def _openmp() -> ctypes.PyDLL | None:
    """The library that torch's CPU operators take their threads from, found through torch."""
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("libtorch_cpu.*")):
        try:
            library = ctypes.PyDLL(str(path))  # keeps the interpreter lock: it is a store
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
            library.omp_set_num_threads.restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None


def _set_num_threads(num_threads: int) -> None:
    library = _openmp()
    assert library is not None
    library.omp_set_num_threads(num_threads)
