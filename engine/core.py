"""The step thread: the one thread that owns the store, the scheduler and the model.

Fronts (``LLM`` and others) post commands to it from any thread. It works in steps as long as there
are requests, and otherwise sleeps on one condition that a new command, a finished transfer or the
next cleaning deadline wakes.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from engine.computation import compute, make_steps
from engine.measuring.calibration import Calibration
from engine.measuring.step_meter import StepMeter
from engine.runner.model_runner import ModelRunner
from engine.scheduling.backlog import Backlog
from engine.scheduling.chunking import AsFits, Chunking
from engine.scheduling.request import Request
from engine.scheduling.roster import Roster
from engine.scheduling.scheduler import ScheduledSequence, Scheduler, SchedulingPolicy
from engine.scheduling.sequence import Sequence
from kvstore.config import check_seconds
from kvstore.errors import KVStoreError, StoreClosedError
from kvstore.store import BlockStore
from kvstore.tiers.host import HostPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILED_CLOSE_S = 10.0  # to write what is dirty when the engine ends by a failure
_LONGEST_SLEEP_S = 1.0  # bounds how late the dirty age and a clock that jumps are noticed


class BuildParts(Protocol):
    """Makes store and runner on the step thread; the store calls ``on_event`` from any thread."""

    def __call__(self, on_event: Callable[[], None]) -> tuple[BlockStore, ModelRunner]: ...


@dataclass(frozen=True, slots=True)
class CoreLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    use_cache: bool
    chunking: Chunking
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_waiting: int | None = None
    max_total_tokens: int | None = None


class EngineCore:
    """Runs requests. Every public method may be called from any thread."""

    def __init__(
        self,
        build: BuildParts,
        limits: CoreLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._awaited: list[tuple[Callable[[], bool], Future[None]]] = []
        self._backlog = Backlog(
            limits.max_num_waiting,
            limits.max_total_tokens,
            lambda: limits.max_num_seqs - len(self.scheduler.running),
        )
        self._has_store_event = False
        self._closing = False
        self._close_timeout: float | None = None
        self._is_closed = False
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(build, started), name="kv-step", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            raise

    # ---- any thread ----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request, when there is room; its ``result`` is set when it is finished."""
        self._post(lambda: self.roster.hold(request), request.result)

    def submit_nowait(self, request: Request) -> None:
        """Queue a request now. Raises ``QueueFullError``."""
        self._backlog.enter(request)
        try:
            self._post(lambda: self.roster.add(request), request.result)
        except StoreClosedError:
            self._backlog.leave(request)
            raise

    def fork(self, request: Request, index: int, make: Callable[[list[int]], Request]) -> Request:
        """Queue the request that ``make`` makes of a sample's tokens, prompt included, as they are
        now, on what of them has been computed. Raises ``QueueFullError``, and what ``make`` does.
        """
        return self.call(lambda: self.roster.fork(request.sequences[index], make))

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests where they are; finished ones are passed over, and an engine that is
        closed has no others.

        Garbage collection runs what a reader's ``with`` left to do on any thread; on the step
        thread that cannot be waited for.
        """
        with contextlib.suppress(StoreClosedError):
            done = self.post(lambda: self.roster.abort(requests))
            if threading.current_thread() is not self._thread:
                done.result()

    def abort_nowait(self, requests: Iterable[Request]) -> None:
        """The same, without waiting for it."""
        with contextlib.suppress(StoreClosedError):
            self.post(lambda: self.roster.abort(requests))

    def abort_all_nowait(self) -> None:
        """End every request where it is, without waiting for it."""
        with contextlib.suppress(StoreClosedError):
            self.post(self.roster.abort_all)

    def look_again(self) -> None:
        """A reader has caught up: what was paused for it may go on. Does not wait."""
        with contextlib.suppress(StoreClosedError):
            self.post(lambda: None)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function that does not wait on the step thread, between steps."""
        return self.post(function).result()

    def post(self, function: Callable[[], T]) -> "Future[T]":
        """The same, without waiting for it."""
        result: Future[T] = Future()

        def command() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._post(command, result)
        return result

    def wait_for(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition of the step thread's state holds; False when time runs out."""
        check_seconds("timeout", timeout, may_be_zero=True)
        reached: Future[None] = Future()
        self._post(lambda: self._awaited.append((is_true, reached)), reached)
        try:
            reached.result(timeout)
        except TimeoutError:
            if reached.cancel():  # it is looked at no more
                return False
            reached.result()
        return True

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, flush the store within ``timeout`` seconds, end the thread."""
        if os.getpid() != self._pid:
            return  # a forked child: neither the thread nor what it holds is here
        with self._wake:
            if not self._is_closed:
                self._closing = True
                self._close_timeout = timeout
                self._wake.notify_all()
        self._thread.join()

    @property
    def is_closed(self) -> bool:
        return self._closing or self._is_closed

    def check_running(self) -> None:
        """Raises ``StoreClosedError`` where the engine is closed, or what ended it."""
        if self.is_closed:
            raise self._closed_error()

    def _post(self, command: Callable[[], None], result: "Future[Any]") -> None:
        if os.getpid() != self._pid:
            # One made here would hang: torch's threads do not survive fork().
            raise StoreClosedError(
                "the engine belongs to the process that made it: start this process with "
                'multiprocessing\'s "spawn", not fork(), and make one in it'
            )
        with self._wake:
            if self._closing:
                raise self._closed_error()
            self._commands.append((command, result))
            self._wake.notify_all()

    def _closed_error(self) -> StoreClosedError:
        if self._failure is None:
            return StoreClosedError("the engine is closed")
        error = StoreClosedError(f"the engine ended by a failure of its own: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def _on_store_event(self) -> None:
        with self._wake:
            self._has_store_event = True
            self._wake.notify_all()

    # ---- step thread ---------------------------------------------------------------------------

    def _run(self, build: BuildParts, started: "Future[None]") -> None:
        store: BlockStore | None = None
        try:
            store, self.runner = build(self._on_store_event)
            self.store = store
            self.runner.warm_up()
            self.scheduler = Scheduler(
                self.store,
                max_num_seqs=self._limits.max_num_seqs,
                max_num_batched_tokens=self._limits.max_num_batched_tokens,
                use_cache=self._limits.use_cache,
                chunking=self._limits.chunking,
                clock=self._clock,
                policy=self._limits.scheduling_policy,
                on_start=lambda each: self.roster.start(each),
            )
            self.roster = Roster(
                self.scheduler,
                self._backlog,
                joins_anywhere=self._limits.chunking.joins_anywhere,
                clock=self._clock,
            )
            self.store.cost.chunk_tokens = self._limits.max_num_batched_tokens
            self.store.publisher.also = self.scheduler.counts
            self._meter = StepMeter(
                self.store.cost, is_device_awaited=isinstance(self.store.device, HostPool)
            )
            self._calibration = Calibration(
                self.store,
                self.runner,
                self._clock,
                chunk_tokens=self._limits.max_num_batched_tokens,
            )
            self.store.measure()
        except BaseException as error:
            self._is_closed = True
            if store is not None:
                store.close(0.0)
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the step thread failed; the engine ends")
            self._failure = error
        self._end()

    def _loop(self) -> None:
        progressed = True
        while True:
            if not progressed and self._sleep():
                self._use_idle_time()
            while self._commands:
                command, _ = self._commands.popleft()
                command()
            if self._closing:
                return
            progressed = self._turn()

    def _turn(self) -> bool:
        """One round: what transfers have finished, one step, what somebody waits for.

        Returns whether another round may get further without anything happening outside.
        """
        self._has_store_event = False
        self.store.poll(model_is_busy=bool(self.scheduler.running))
        self.roster.admit_held()
        batch = self.scheduler.schedule()
        self.roster.finish_prefilled()
        if batch:
            self._step(batch)
        elif (stuck := self._stuck()) is not None:
            self.roster.fail(stuck, self._no_room(stuck))
        self._awaited = [each for each in self._awaited if not self._is_over(*each)]
        return bool(batch) or self.scheduler.has_more

    @staticmethod
    def _is_over(is_true: Callable[[], bool], reached: "Future[None]") -> bool:
        """Whether nobody waits for a condition any more: it holds, or their time ran out."""
        if reached.cancelled():
            return True
        if not is_true():
            return False
        if reached.set_running_or_notify_cancel():
            reached.set_result(None)
        return True

    def _sleep(self) -> bool:
        """Until a command, a finished transfer or the next cleaning; whether none of them came."""
        deadline = min(self.store.next_deadline(), self.scheduler.next_deadline())
        pause = deadline - self._clock()
        with self._wake:
            is_woken = self._wake.wait_for(
                lambda: bool(self._commands or self._has_store_event or self._closing),
                max(0.0, min(pause, _LONGEST_SLEEP_S)),
            )
        return not is_woken and pause > _LONGEST_SLEEP_S

    def _use_idle_time(self) -> None:
        """Learn what loads and forwards cost, while nobody waits for either."""
        is_idle = not self.scheduler.has_work and self.store.num_pending == 0
        if is_idle and not self._calibration.is_done and isinstance(self._limits.chunking, AsFits):
            self.store.measure()
            self._calibration.advance()

    def _step(self, batch: list[ScheduledSequence]) -> None:
        now = self._clock()
        for each in batch:
            if not each.sequence.times.prefill_at:
                each.sequence.times.prefill_at = now
        steps = make_steps(batch)
        try:
            tokens = compute(self.runner, batch, steps)
        except Exception as error:
            logger.exception("a step failed; its requests end with the error")
            for each in batch:
                self.roster.fail(each.sequence, error)
            return
        began_at, now = now, self._clock()
        self._meter.add(steps, began_at, now, has_sampled=bool(tokens))
        for each in batch:
            self.scheduler.commit(each)
        self.roster.take(tokens)
        self.roster.finish_prefilled()

    def _stuck(self) -> Sequence | None:
        """The first sequence, if nothing runs, moves or will, and it still finds no room."""
        scheduler = self.scheduler
        is_quiet = (
            not scheduler.running
            and not scheduler.promoting
            and not scheduler.has_more
            and self.store.num_pending == 0
            and self.store.next_deadline() == math.inf
        )
        return scheduler.waiting.first() if is_quiet else None

    def _no_room(self, sequence: Sequence) -> KVStoreError:
        blocks = self.store.layout.blocks_for(len(sequence.token_ids))
        return KVStoreError(
            f"{len(sequence.token_ids)} tokens need {blocks} device blocks and the device has "
            f"{self.store.device.capacity}; raise device_cache"
        )

    def _end(self) -> None:
        """Nobody is left waiting: not those whose request runs, nor those who call just now."""
        with self._wake:
            self._closing = True
            left = [result for _, result in self._commands]
            self._commands.clear()
        left += [request.result for request in self.roster.requests.values()]
        left += [reached for _, reached in self._awaited]
        closed = self._closed_error()
        try:
            if self._failure is None:
                for request in self.roster.requests.values():
                    for sequence in request.sequences:
                        self.scheduler.finish(sequence)
            self.store.close(self._close_timeout if self._failure is None else _FAILED_CLOSE_S)
        except Exception:
            logger.exception("closing the store failed")
        finally:
            for result in left:
                with contextlib.suppress(InvalidStateError):  # who waited for it gave up
                    result.set_exception(closed)
            del self.runner
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._is_closed = True
