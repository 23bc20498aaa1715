"""Which sequences take part in the next forward, and with how many tokens.

Continuous batching: every step first gives each decoding sequence its one token, then the rest of
the token budget to prefill chunks, oldest request first, then admits waiting sequences. A sequence
that waits for disk or for blocks on their way holds up nobody.

    fcfs            admits in order of arrival
    longest_prefix  admits first what has most of its prompt cached. A second of waiting counts as
                    much as ``ageing_tokens_per_s`` cached tokens, so that whoever finds nothing is
                    passed over for at most the longest prompt divided by that

Does not know how a prompt is cut into chunks (``engine.scheduling.chunking``).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from engine.scheduling.being_computed import BlocksBeingComputed
from engine.scheduling.chunking import Chunking
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.waiting import FRONT, WaitingQueue
from kvstore.block import TierName
from kvstore.errors import OutOfBlocksError
from kvstore.store import BlockStore

SchedulingPolicy = Literal["fcfs", "longest_prefix"]

AGEING_TOKENS_PER_S = 1000.0

# A lookup hashes a whole prompt. So many a step, so that a long queue delays no running sequence.
_LOOKUPS_A_STEP = 16
_MOST_PROBING = 256  # of disk at once


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_tokens`` of the sequence's uncomputed tokens are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """Owned by the step thread.

    waiting     not admitted yet; preempted and forked sequences stand in front
    probing     of them, those that wait for an answer from disk
    promoting   admitted, their blocks are on their way to the device
    running     admitted, in order of admission
    paused      not read by their readers; they hold no blocks and queue again in front

    ``chunking`` says how many tokens of a sequence a step computes. ``on_start`` is called with
    each sequence that runs for the first time.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        use_cache: bool,
        clock: Callable[[], float],
        chunking: Chunking,
        policy: SchedulingPolicy = "fcfs",
        ageing_tokens_per_s: float = AGEING_TOKENS_PER_S,
        on_start: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self._store = store
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._use_cache = use_cache
        self._clock = clock
        self._chunking = chunking
        self._policy = policy
        self._ageing_tokens_per_s = ageing_tokens_per_s
        self._on_start = on_start
        self.waiting = WaitingQueue()
        self.probing: dict[Sequence, None] = {}
        self.promoting: dict[Sequence, None] = {}
        self.running: dict[Sequence, None] = {}
        self.paused: dict[Sequence, None] = {}
        self._forked: dict[Sequence, None] = {}  # waiting, with their blocks
        self._unranked: deque[Sequence] = deque()
        self._being_computed = BlocksBeingComputed()
        self.has_more = False  # to look at; the next ``schedule`` goes on
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.promoting or self.running or self.paused)

    def counts(self) -> dict[str, int]:
        """Sequences by where they stand."""
        return {
            "waiting": len(self.waiting),
            "promoting": len(self.promoting),
            "running": len(self.running),
            "num_preemptions": self.num_preemptions,
        }

    def add(self, sequence: Sequence) -> None:
        sequence.times.queued_at = self._clock()
        self._queue(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Add a sequence that begins with the tokens a running one has computed: it shares their
        blocks. Where there is no room for a copy of the last one, it waits like any other."""
        assert parent.lease is not None
        child.arrival = parent.arrival
        try:
            child.lease = self._store.fork(parent.lease, parent.num_computed)
        except OutOfBlocksError:
            self._queue(child, in_front=True)
            return
        child.lookup = child.lease.lookup
        child.num_computed = parent.num_computed
        child.cached_tokens = {TierName.DEVICE: parent.num_computed}
        self._forked[child] = None
        self.waiting.put(child, FRONT)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's batch; empty when everything waits for a transfer."""
        self._pause_and_resume()
        self._collect_promoted()
        self._collect_probed()
        self._start_forked()
        budget = self._max_num_batched_tokens
        batch: list[ScheduledSequence] = []
        # Decoding sequences first, so that a long prefill never starves them.
        for sequence in sorted(self.running, key=lambda each: each.num_uncomputed > 1):
            if sequence not in self.running:  # preempted in this loop
                continue
            num_tokens = self._chunking.num_next(sequence, budget)
            if num_tokens and self._extend(sequence, num_tokens, batch):
                batch.append(ScheduledSequence(sequence, num_tokens))
                budget -= self._chunking.num_positions(num_tokens)
        return batch + self._admit(budget)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and give its blocks back."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        for place in (self.probing, self._forked, self.promoting, self.running, self.paused):
            place.pop(sequence, None)
        self._let_go(sequence)
        sequence.state = SequenceState.FINISHED

    def commit(self, scheduled: ScheduledSequence) -> None:
        """The step has computed these tokens."""
        sequence = scheduled.sequence
        sequence.num_computed += scheduled.num_tokens
        if self._use_cache:
            assert sequence.lease is not None
            num_cacheable = self._chunking.num_cacheable(sequence)
            self._store.commit(sequence.lease, sequence.token_bytes, num_cacheable)
            self._wake(self._being_computed.end(sequence, len(sequence.lease.slots)))

    # ---- waiting -------------------------------------------------------------------------------

    def _queue(self, sequence: Sequence, *, in_front: bool = False) -> None:
        sequence.state = SequenceState.WAITING
        if in_front:
            self.waiting.put(sequence, FRONT)
        elif self._policy == "fcfs":
            self.waiting.put(sequence)
        else:
            self.waiting.set_aside(sequence)
            self._unranked.append(sequence)

    def _rank_some(self) -> bool:
        """Look up sequences that have come, or whose prefix has just been computed; whether more
        of them can be looked up at once."""
        for _ in range(_LOOKUPS_A_STEP):
            if not self._unranked or len(self.probing) >= _MOST_PROBING:
                return False
            sequence = self._unranked.popleft()
            if sequence not in self.waiting or not self._knows_prefix(sequence):
                continue
            assert sequence.lookup is not None
            keys = sequence.lookup.keys
            num_cached = self._store.num_reusable_blocks(sequence.lookup)
            num_tokens = num_cached * self._store.layout.block_size
            rank = self._ageing_tokens_per_s * sequence.times.queued_at - num_tokens
            # Whenever somebody computes its next block, it is worth more.
            next_key = keys[num_cached] if num_cached < len(keys) else None
            self.waiting.put(sequence, rank, next_key)
        return bool(self._unranked)

    def _knows_prefix(self, sequence: Sequence) -> bool:
        """Whether it is known where the sequence's prefix lies, and nobody is computing its next
        block. If not, the sequence is put where it is found once that has changed."""
        is_known = self._look_up(sequence)
        if is_known and sequence.lookup is not None and self._store.has_lost(sequence.lookup):
            sequence.lookup = None
            is_known = self._look_up(sequence, is_first=False)
        if not is_known:
            self.waiting.set_aside(sequence)
            self.probing[sequence] = None
            return False
        key = self._key_being_computed(sequence)
        if key is not None:
            self.waiting.park(sequence, key)
        return key is None

    def _look_up(self, sequence: Sequence, *, is_first: bool = True) -> bool:
        if sequence.lookup is None:
            tokens = bytes(sequence.token_bytes) if self._use_cache else b""
            sequence.lookup = self._store.lookup(
                tokens,
                sequence.cache.salt,
                num_reusable=self._chunking.num_reusable(sequence),
                peek=not is_first or sequence.cached_tokens is not None,  # counted already
            )
            if not sequence.lookup.is_ready:
                self._begin_promoting(sequence, SequenceState.PROBING)
        return sequence.lookup.is_ready

    def _collect_probed(self) -> None:
        for sequence in list(self.probing):
            if self._is_late(sequence):
                assert sequence.lookup is not None
                self._store.stop_probing(sequence.lookup)
            if self._look_up(sequence):
                del self.probing[sequence]
                sequence.times.end_promoting(self._clock())
                self._queue(sequence)

    def _key_being_computed(self, sequence: Sequence) -> bytes | None:
        """The last of the next blocks of a sequence that running prefills are about to make."""
        if not self._being_computed:
            return None
        assert sequence.lookup is not None
        start = self._store.num_reusable_blocks(sequence.lookup)
        return self._being_computed.last_of_run(sequence.lookup.keys, start)

    # ---- admission -----------------------------------------------------------------------------

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        batch: list[ScheduledSequence] = []
        self.has_more = self._rank_some()
        for _ in range(_LOOKUPS_A_STEP + self._max_num_seqs):
            sequence = self.waiting.first()
            if sequence is None or not self._has_seat or len(self.probing) >= _MOST_PROBING:
                return batch
            if not self._knows_prefix(sequence):
                continue
            if budget < self._chunking.least_budget:
                return batch
            if not self._reserve(sequence, budget):
                return batch  # no room: those behind must not overtake for ever
            self.waiting.remove(sequence)
            if sequence.state is SequenceState.PROMOTING:
                self.promoting[sequence] = None
                continue
            num_tokens = self._start(sequence, budget)
            if num_tokens:
                batch.append(ScheduledSequence(sequence, num_tokens))
                budget -= self._chunking.num_positions(num_tokens)
        self.has_more = True
        return batch

    @property
    def _has_seat(self) -> bool:
        return len(self.running) + len(self.promoting) < self._max_num_seqs

    def _reserve(self, sequence: Sequence, budget: int) -> bool:
        assert sequence.lookup is not None
        num_tokens, chunk = self._chunking.num_at_first(sequence, budget)
        try:
            sequence.lease = self._store.reserve(sequence.lookup, num_tokens, chunk_tokens=chunk)
        except OutOfBlocksError:
            return False
        self._being_computed.begin(sequence)
        if not sequence.lease.is_ready:
            self._begin_promoting(sequence, SequenceState.PROMOTING)
        return True

    def _collect_promoted(self) -> None:
        """Start the sequences whose blocks have arrived. Those whose load failed or takes too long,
        or only tried how fast a tier is, reserve again."""
        for sequence in list(self.promoting):
            assert sequence.lease is not None
            is_late = not sequence.lease.is_ready and self._is_late(sequence)
            if is_late:
                self._store.give_up(sequence.lease)
            elif not sequence.lease.is_ready:
                continue
            del self.promoting[sequence]
            sequence.times.end_promoting(self._clock())
            if is_late or sequence.lease.is_provisional:
                self._let_go(sequence, keep_lookup=True)
                self._queue(sequence, in_front=True)
            else:
                self._start(sequence, 0)

    def _start_forked(self) -> None:
        """Forked sequences have their blocks already."""
        for sequence in list(self._forked):
            if not self._has_seat:
                return
            del self._forked[sequence]
            self.waiting.remove(sequence)
            self._run(sequence)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Make a sequence with all its blocks run; tokens it computes in this step."""
        lease, lookup = sequence.lease, sequence.lookup
        assert lease is not None
        assert lookup is not None
        size = self._store.layout.block_size
        sequence.num_computed = lease.num_cached_tokens(size)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = lease.cached_tokens(size)
            sequence.load_decision = lookup.decision
        self._run(sequence)
        return self._chunking.num_next(sequence, budget)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        if not sequence.times.running_at:
            sequence.times.begin_running(self._clock())
            # Before it has a seat: whoever submits meanwhile must not find it waiting beside that.
            self._on_start(sequence)
        self.running[sequence] = None

    def next_deadline(self) -> float:
        """Clock time at which a sequence stops waiting for its blocks; infinity for none."""
        waiting = [*self.probing, *self.promoting]
        return min(map(self._is_late_at, waiting), default=math.inf)

    def _is_late_at(self, sequence: Sequence) -> float:
        return sequence.times.late_at(self._store.config.promote_deadline_s)

    def _is_late(self, sequence: Sequence) -> bool:
        return self._clock() >= self._is_late_at(sequence)

    def _begin_promoting(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        sequence.times.begin_promoting(self._clock())

    # ---- room ----------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, num_tokens: int, batch: list[ScheduledSequence]) -> bool:
        """Room for the next tokens, preempting the youngest sequences if nothing else helps."""
        while True:
            try:
                assert sequence.lease is not None
                end = sequence.num_computed + self._chunking.num_positions(num_tokens)
                self._store.extend(sequence.lease, end)
                return True
            except OutOfBlocksError as error:
                if error.available_blocks >= error.needed_blocks:
                    return False  # victims are being copied out: their room comes
                scheduled = {each.sequence for each in batch}
                young_first = (*reversed(self._forked), *reversed(self.running))
                victim = next((each for each in young_first if each not in scheduled), sequence)
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; what is cached of them is found again when it resumes."""
        self.num_preemptions += 1
        self.running.pop(sequence, None)
        self._forked.pop(sequence, None)
        self._let_go(sequence)
        self._queue(sequence, in_front=True)

    def _pause_and_resume(self) -> None:
        """Whose reader is far behind leaves its room to others until it has been read."""
        for sequence in [each for each in self.running if each.is_ahead]:
            del self.running[sequence]
            self._let_go(sequence)
            sequence.state = SequenceState.PAUSED
            self.paused[sequence] = None
        for sequence in [each for each in self.paused if not each.is_ahead]:
            del self.paused[sequence]
            self._queue(sequence, in_front=True)

    def _let_go(self, sequence: Sequence, *, keep_lookup: bool = False) -> None:
        if sequence.lease is not None:
            self._wake(self._being_computed.end(sequence, None))
            if sequence.cache.priority:
                cache = sequence.cache
                self._store.prefer(sequence.lease, cache.priority, cache.priority_ttl_s)
            self._store.release(sequence.lease)
            sequence.lease = None
        if not keep_lookup:
            sequence.lookup = None
        sequence.num_computed = 0

    def _wake(self, keys: Iterable[bytes]) -> None:
        """These blocks are computed, or will not be: whoever waits for one goes on."""
        for sequence in self.waiting.wake(keys):
            self._queue(sequence)
