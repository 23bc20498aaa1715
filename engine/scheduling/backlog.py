"""How many requests have been accepted, and when another one is too many."""

import threading
from collections.abc import Callable

from engine.scheduling.request import Request
from kvstore.errors import QueueFullError


class Backlog:
    """Requests from their acceptance to their end. Any thread.

    max_num_waiting   requests that wait for a seat, those for which there is one not counted;
                      None: no limit
    max_total_tokens  prompt and ``max_tokens`` of all that wait or run; None: no limit
    num_free_seats    sequences that could run beside those that do. One that is being promoted has
                      a seat and is counted as waiting still, so it makes no difference
    num_refused       requests that met a full queue
    """

    def __init__(
        self,
        max_num_waiting: int | None,
        max_total_tokens: int | None,
        num_free_seats: Callable[[], int],
    ) -> None:
        self._max_num_waiting = max_num_waiting
        self._max_total_tokens = max_total_tokens
        self._num_free_seats = num_free_seats
        self._lock = threading.Lock()
        self._waiting: set[Request] = set()
        self._num_tokens: dict[Request, int] = {}
        self._total_tokens = 0
        self.num_refused = 0

    @property
    def num_waiting(self) -> int:
        """Requests that none of their samples has begun to run."""
        return len(self._waiting)

    def enter(self, request: Request) -> None:
        """Accept a request. Raises ``QueueFullError``."""
        with self._lock:
            problem = self._problem(request)
            if problem is not None:
                self.num_refused += 1
                raise problem
            self._accept(request)

    def enter_if_room(self, request: Request) -> bool:
        """The same for one that can wait outside. Raises only for one that will never fit."""
        with self._lock:
            problem = self._problem(request)
            if problem is None:
                self._accept(request)
            elif not self._num_tokens:
                self.num_refused += 1
                raise problem
            return problem is None

    def start(self, request: Request) -> None:
        """It waits no longer."""
        with self._lock:
            self._waiting.discard(request)

    def leave(self, request: Request) -> None:
        with self._lock:
            self._waiting.discard(request)
            self._total_tokens -= self._num_tokens.pop(request, 0)

    def _accept(self, request: Request) -> None:
        self._waiting.add(request)
        self._num_tokens[request] = request.most_tokens
        self._total_tokens += request.most_tokens

    def _problem(self, request: Request) -> QueueFullError | None:
        most = self._max_num_waiting
        if most is not None and len(self._waiting) - self._num_free_seats() >= most:
            return QueueFullError(
                f"{most} requests wait, as many as max_num_waiting allows: try again later, or "
                "raise it",
                setting="max_num_waiting",
                limit=most,
            )
        most, total = self._max_total_tokens, self._total_tokens + request.most_tokens
        if most is not None and total > most:
            return QueueFullError(
                f"{request.most_tokens} tokens of prompt and answer beside {self._total_tokens} of "
                f"other requests are more than max_total_tokens ({most}): try again later, ask for "
                "fewer max_tokens, or raise it",
                setting="max_total_tokens",
                limit=most,
            )
        return None
