"""Where the ``kvstore`` command starts: what must be in place before the first slow import.

Ctrl-C is a ``KeyboardInterrupt``, and whoever it meets cleans up. Inside an import it is a menace:
it surfaces as a traceback of modules that are no user's business, and some of them turn it into an
error of their own. So there it ends the process at once. Nothing is lost: what a command changes
survives ``kill -9``.

Imports nothing slow, or the time before that is in place would grow.
"""

import io
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry point of the console script."""
    # A shell without job control starts background jobs with SIGINT ignored: so it stays.
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if is_heeded:
            signal.signal(signal.SIGINT, _interrupt)
        _open_standard_streams()
        if isinstance(sys.stdout, io.TextIOWrapper):  # file names need not be text
            sys.stdout.reconfigure(errors="backslashreplace")
        from tools.commands import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    if is_heeded:  # the interpreter's end is no place for an exception either
        signal.signal(signal.SIGINT, _leave)
    sys.exit(status)


def _open_standard_streams() -> None:
    """Those that were closed: else the next file that is opened would be stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest free one
            assert fd == number
            setattr(sys, name, os.fdopen(fd, "w" if number else "r"))


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    if _is_importing(frame):
        _leave()
    signal.default_int_handler(signal_number, frame)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
