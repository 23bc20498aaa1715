"""The roster: every request from its submission to its result.

It knows which requests there are, lets those in that are held back until there is room, puts what
steps sample where it is read, and ends requests: finished, aborted or failed. Does not know how
sequences get their turn and their blocks (``engine.scheduling.scheduler``).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from engine.sampling.sampler import SampledToken
from engine.scheduling.backlog import Backlog
from engine.scheduling.queue_stats import QueueStats
from engine.scheduling.request import Request
from engine.scheduling.request_stats import RequestMeter
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState
from kvstore.errors import ConfigError, QueueFullError


class Roster:
    """Step thread only.

    requests       by id, those that have no result yet
    joins_anywhere whether a sequence may begin in the middle of another one's block
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backlog: Backlog,
        *,
        joins_anywhere: bool,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._backlog = backlog
        self._joins_anywhere = joins_anywhere
        self._clock = clock
        self._held: deque[Request] = deque()  # until there is room in the backlog
        self._meter = RequestMeter()
        self.requests: dict[str, Request] = {}

    def stats(self) -> QueueStats:
        return QueueStats(
            waiting_requests=self._backlog.num_waiting,
            held_requests=len(self._held),
            running_sequences=len(self._scheduler.running),
            paused_requests=self._num_paused,
            refused_requests=self._backlog.num_refused,
            preemptions=self._scheduler.num_preemptions,
            requests=self._meter.stats(),
        )

    @property
    def _num_paused(self) -> int:
        """Requests that are neither held nor waiting, and have no sample that runs."""
        begun = {id for id, each in self.requests.items() if each.sequences[0].times.running_at}
        return len(begun - {each.request_id for each in self._scheduler.running})

    # ---- beginnings ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Schedule a request that has entered the backlog."""
        if self._register(request):
            self._schedule(request)

    def hold(self, request: Request) -> None:
        """Schedule a request when there is room."""
        if self._register(request):
            self._held.append(request)

    def admit_held(self) -> None:
        """In their order, those for which there is room."""
        while self._held:
            request = self._held[0]
            try:
                if not (request.is_finished or self._backlog.enter_if_room(request)):
                    return
            except QueueFullError as error:  # counted as refused
                self._end(request, error)
            self._held.popleft()
            self._schedule(request)

    def fork(self, parent: Sequence, make: Callable[[list[int]], Request]) -> Request:
        """Schedule the request that ``make`` makes of a sample's tokens, prompt included, as they
        are now, on what of them has been computed. Raises ``QueueFullError``, and what ``make``
        does."""
        request = make(parent.token_ids)
        self._backlog.enter(request)
        if not self._register(request):
            request.result.result()
        child, at = request.sequences[0], parent.num_computed
        is_computed = parent.state is SequenceState.RUNNING and parent.num_uncomputed <= 1
        may_join = child.is_scored and self._joins_anywhere
        if is_computed and may_join and child.token_ids[:at] == parent.token_ids[:at]:
            self._scheduler.fork(parent, child)
        else:
            self._schedule(request)
        return request

    def start(self, sequence: Sequence) -> None:
        """A sequence runs for the first time: its request waits no longer."""
        self._backlog.start(self.requests[sequence.request_id])

    def _register(self, request: Request) -> bool:
        """Whether its id is free; if not, its result says so."""
        if request.request_id in self.requests:
            message = f"request_id: {request.request_id!r} is running already; choose another"
            self._backlog.leave(request)
            request.result.set_exception(ConfigError(message))
            return False
        self.requests[request.request_id] = request
        return True

    def _schedule(self, request: Request) -> None:
        """Its other samples follow when the prompt has been computed."""
        if not request.is_finished:
            self._scheduler.add(request.sequences[0])

    # ---- progress and ends ---------------------------------------------------------------------

    def take(self, tokens: Mapping[Sequence, SampledToken]) -> None:
        """A step has sampled these tokens: append each, and end or hand on what has become of its
        sequence."""
        self._meter.generate(len(tokens))
        now = self._clock()
        for sequence, token in tokens.items():
            if not sequence.times.first_token_at:
                sequence.times.first_token_at = sequence.times.prefilled_at = now
                if sequence.index == 0:
                    metrics = self.requests[sequence.request_id].metrics(now)
                    self._meter.read(metrics, has_token=True)
            sequence.append(token)
        for sequence in tokens:
            others, sequence.others = sequence.others, []
            for other in others:
                if other.finish_reason is None:
                    self._scheduler.fork(sequence, other)
        for sequence in tokens:
            if sequence.finish_reason:
                self._finish(sequence)
            elif sequence.stream is not None:
                self._put(self.requests[sequence.request_id], sequence)

    def finish_prefilled(self) -> None:
        """End the requests that sample nothing and whose tokens are computed."""
        for sequence in list(self._scheduler.running):
            if sequence.prefill_only and sequence.num_uncomputed == 0:
                sequence.times.prefilled_at = self._clock()
                metrics = self.requests[sequence.request_id].metrics(self._clock())
                self._meter.read(metrics, has_token=False)
                self._finish(sequence)

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests where they are; finished ones are passed over."""
        for request in requests:
            if self.requests.get(request.request_id) is not request:
                continue  # it has ended; its id may be another's by now
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    self._finish(sequence)

    def abort_ids(self, request_ids: Iterable[str]) -> None:
        """End the requests that have these ids now; unknown ones are passed over."""
        self.abort([self.requests[each] for each in request_ids if each in self.requests])

    def abort_all(self) -> None:
        self.abort(list(self.requests.values()))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """The request of a sequence ends with an error."""
        request = self.requests.get(sequence.request_id)
        if request is not None:  # else another sample of it failed in the same step
            self._meter.fail()
            self._end(request, error)

    def _end(self, request: Request, error: Exception) -> None:
        del self.requests[request.request_id]
        self._backlog.leave(request)
        for each in request.sequences:
            self._scheduler.finish(each)
        request.result.set_exception(error)

    def _finish(self, sequence: Sequence) -> None:
        sequence.times.finished_at = self._clock()
        self._scheduler.finish(sequence)
        self._meter.finish_sample(sequence)
        request = self.requests[sequence.request_id]
        self._put(request, sequence)
        if request.is_finished:
            del self.requests[request.request_id]
            self._backlog.leave(request)
            self._meter.finish(request)
            request.result.set_result(request.output())

    def _put(self, request: Request, sequence: Sequence) -> None:
        """Hand what the sequence has got to whoever reads it as it comes."""
        if request.stream is not None:
            metrics = request.metrics(self._clock())
            request.stream.put(sequence.take_delta(), metrics, is_last=request.is_finished)
