"""Which sequences take part in the next forward, and with how many tokens.

Continuous batching: every step first gives each decoding sequence its one token, then the rest of
the token budget to prefill chunks, oldest request first, then admits waiting sequences. A sequence
that waits for disk or for blocks on their way holds up nobody.

Does not know how a prompt is cut into chunks (``engine.chunking``).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.chunking import Chunking
from engine.sequence import Sequence, SequenceState
from kvstore.errors import OutOfBlocksError
from kvstore.lease import LookupState
from kvstore.store import BlockStore


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_tokens`` of the sequence's uncomputed tokens are computed in this step."""

    sequence: Sequence
    num_tokens: int


class Scheduler:
    """Owned by the step thread.

    waiting     not admitted yet, in order of arrival; preempted sequences stand in front
    promoting   admitted, their blocks are on their way to the device
    running     admitted, in order of admission
    paused      not read by their readers; they hold no blocks and queue again in front

    ``chunking`` says how many tokens of a sequence a step computes.
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
    ) -> None:
        self._store = store
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._use_cache = use_cache
        self._clock = clock
        self._chunking = chunking
        self.waiting: list[Sequence] = []
        self.promoting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.paused: list[Sequence] = []
        self._being_computed: Counter[bytes] = Counter()  # keys of blocks under way in prefills
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.promoting or self.running or self.paused)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's batch; empty when everything waits for a transfer."""
        self._pause_and_resume()
        self._collect_promoted()
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
        for queue in (self.waiting, self.promoting, self.running, self.paused):
            if sequence in queue:
                queue.remove(sequence)
        self._let_go(sequence)
        sequence.state = SequenceState.FINISHED

    def commit(self, scheduled: ScheduledSequence) -> None:
        """The step has computed these tokens."""
        sequence = scheduled.sequence
        sequence.num_computed += scheduled.num_tokens
        if self._use_cache:
            assert sequence.lease is not None
            before = len(sequence.lease.slots)
            num_cacheable = self._chunking.num_cacheable(sequence)
            self._store.commit(sequence.lease, sequence.token_bytes, num_cacheable)
            self._unregister(sequence, before)

    # ---- admission -----------------------------------------------------------------------------

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        batch: list[ScheduledSequence] = []
        for sequence in list(self.waiting):
            if len(self.running) + len(self.promoting) >= self._max_num_seqs:
                break
            if not self._look_up(sequence) or self._prefix_is_being_computed(sequence):
                continue
            if budget < self._chunking.least_budget:
                break
            if not self._reserve(sequence, budget):
                break  # no room: those behind must not overtake for ever
            self.waiting.remove(sequence)
            if sequence.state is SequenceState.PROMOTING:
                self.promoting.append(sequence)
                continue
            num_tokens = self._start(sequence, budget)
            if num_tokens:
                batch.append(ScheduledSequence(sequence, num_tokens))
                budget -= self._chunking.num_positions(num_tokens)
        return batch

    def _look_up(self, sequence: Sequence) -> bool:
        """Whether it is known where the sequence's prefix lies."""
        if sequence.lookup is None:
            tokens = bytes(sequence.token_bytes) if self._use_cache else b""
            sequence.lookup = self._store.lookup(
                tokens,
                sequence.cache.salt,
                num_reusable=self._chunking.num_reusable(sequence),
                peek=sequence.cached_tokens is not None,  # preempted: its hits were counted
            )
            if sequence.lookup.state is LookupState.PROBING:
                self._begin_promoting(sequence, SequenceState.PROBING)
        if sequence.lookup.state is LookupState.PROBING:
            return False
        if sequence.state is SequenceState.PROBING:
            self._end_promoting(sequence, SequenceState.WAITING)
        return True

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running prefill is about to make the next block this one would compute."""
        assert sequence.lookup is not None
        if not self._being_computed:
            return False
        num_cached = self._store.num_reusable_blocks(sequence.lookup)
        keys = sequence.lookup.keys
        return num_cached < len(keys) and keys[num_cached] in self._being_computed

    def _reserve(self, sequence: Sequence, budget: int) -> bool:
        assert sequence.lookup is not None
        num_tokens, chunk_tokens = self._chunking.num_at_first(sequence, budget)
        try:
            lease = self._store.reserve(sequence.lookup, num_tokens, chunk_tokens=chunk_tokens)
        except OutOfBlocksError:
            return False
        sequence.lease = lease
        self._being_computed.update(self._uncomputed_keys(sequence))
        if not lease.is_ready:
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
            self.promoting.remove(sequence)
            self._end_promoting(sequence, SequenceState.WAITING)
            if is_late or sequence.lease.is_provisional:
                self._let_go(sequence, keep_lookup=True)
                self.waiting.insert(0, sequence)
            else:
                self._start(sequence, 0)

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
        sequence.state = SequenceState.RUNNING
        sequence.times.running_at = sequence.times.running_at or self._clock()
        self.running.append(sequence)
        return self._chunking.num_next(sequence, budget)

    def next_deadline(self) -> float:
        """Clock time at which a sequence stops waiting for its blocks; infinity for none."""
        deadline = self._store.config.promote_deadline_s
        since = [sequence.times.promote_since for sequence in self.promoting]
        return math.inf if deadline is None or not since else min(since) + deadline

    def _is_late(self, sequence: Sequence) -> bool:
        deadline = self._store.config.promote_deadline_s
        waited = self._clock() - sequence.times.promote_since
        return deadline is not None and waited >= deadline

    def _begin_promoting(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        sequence.times.promote_since = self._clock()

    def _end_promoting(self, sequence: Sequence, state: SequenceState) -> None:
        sequence.state = state
        sequence.times.promote_s += self._clock() - sequence.times.promote_since

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
                youngest = next(
                    (each for each in reversed(self.running) if each not in scheduled), sequence
                )
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; what is cached of them is found again when it resumes."""
        self.num_preemptions += 1
        self.running.remove(sequence)
        self._let_go(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.insert(0, sequence)

    def _pause_and_resume(self) -> None:
        """Whose reader is far behind leaves its room to others until it has been read."""
        for sequence in [each for each in self.running if each.is_ahead]:
            self.running.remove(sequence)
            self._let_go(sequence)
            sequence.state = SequenceState.PAUSED
            self.paused.append(sequence)
        for sequence in [each for each in self.paused if not each.is_ahead]:
            self.paused.remove(sequence)
            sequence.state = SequenceState.WAITING
            self.waiting.insert(0, sequence)

    def _let_go(self, sequence: Sequence, *, keep_lookup: bool = False) -> None:
        if sequence.lease is not None:
            self._unregister(sequence, len(sequence.lease.slots), to_end=True)
            if sequence.cache.priority:
                cache = sequence.cache
                self._store.prefer(sequence.lease, cache.priority, cache.priority_ttl_s)
            self._store.release(sequence.lease)
            sequence.lease = None
        if not keep_lookup:
            sequence.lookup = None
        sequence.num_computed = 0

    def _uncomputed_keys(self, sequence: Sequence) -> list[bytes]:
        assert sequence.lookup is not None
        assert sequence.lease is not None
        return list(sequence.lookup.keys[len(sequence.lease.slots) :])

    def _unregister(self, sequence: Sequence, start: int, *, to_end: bool = False) -> None:
        """Blocks from ``start`` on are computed now, or will not be by this sequence."""
        if not self._being_computed:
            return
        assert sequence.lookup is not None
        assert sequence.lease is not None
        end = None if to_end else len(sequence.lease.slots)
        for key in sequence.lookup.keys[start:end]:
            self._being_computed[key] -= 1
            if self._being_computed[key] <= 0:
                del self._being_computed[key]
