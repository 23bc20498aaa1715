"""transformers without its progress bars and advice, for as long as we drive it."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Only exceptions come out; what the user had set is set again afterwards.

    Takes over ``sys.stderr`` too: the bar of the GGUF reader cannot be switched off otherwise.
    """
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
