"""Write transactions of one writer, and what is done when one cannot be had, or fails.

another writer keeps the lock     give up for now; after the time limit the store is read-only
the capacity changed              adopt it, begin again
a sealed value is damaged         rebuild, then again
the map is full                   free what killed readers held, or evict; then again
the volume is full                recycle the pages there are, from now on; then again
liblmdb reports damage            turn the tier off; the next start checks the file
"""

import contextlib
import errno
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial

import lmdb

from kvstore.disk import pins
from kvstore.disk.environment import Environment
from kvstore.disk.ledger import Ledger
from kvstore.disk.reader import DAMAGE, Suspect
from kvstore.disk.repair import rebuild
from kvstore.disk.schema import SealError
from kvstore.disk.space import Space
from kvstore.disk.writer_lock import WriterBusyError
from kvstore.errors import KVStoreError, TierBrokenError

logger = logging.getLogger(__name__)

LOCKED_OUT_WAIT_S = 0.2
_ATTEMPTS = 3
_COMMITS_WITHOUT_PINS = 4
_PAGES_A_CHANGE = 3  # tree pages that are copied for one block
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Changes:
    """All methods belong to the writer's thread, except ``is_locked_out``.

    num_evicted  blocks evicted since this was made
    clock        seconds since 1970: which pins have ended
    removed      (namespace, salt, key) of good blocks that left, None while nobody takes them
    suspects     bad blocks that readers met, by key; readers add to it
    """

    def __init__(
        self,
        env: Environment,
        space: Space,
        suspects: dict[bytes, Suspect],
        lock_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.space = space
        self.clock = clock
        self.suspects = suspects
        self.num_evicted = 0
        self.removed: list[tuple[bytes, bytes, bytes]] | None = None
        self._env = env
        self._lock_timeout_s = lock_timeout_s
        self._is_locked_out = False
        self._is_short = False  # of pages: the map was full
        self._patience = 0  # commits until pins that have ended are released again
        self._has_warned_of_reader = False

    def is_locked_out(self) -> bool:
        """Another writer has kept the lock for longer than the limit."""
        since = self._env.writer_lock.waiting_since
        return self._is_locked_out or (
            since is not None and time.monotonic() - since > self._lock_timeout_s
        )

    @contextlib.contextmanager
    def ledger(self, wait_s: float | None = None) -> Iterator[Ledger]:
        """A ledger in a write transaction, finished and committed at the end of the block.

        Raises ``WriterBusyError``, ``TierBrokenError``, ``SealError`` and ``lmdb.Error``; then
        nothing has changed.
        """
        if wait_s is None:
            wait_s = LOCKED_OUT_WAIT_S if self._is_locked_out else self._lock_timeout_s
        while True:
            try:
                with self._env.write(wait_s) as txn:
                    self._is_locked_out = False
                    ledger = Ledger(self._env, txn)
                    if ledger.head.generation == self._env.generation:
                        self._expire_pins(ledger)
                        yield ledger
                        ledger.finish()
                        self.space.ends(ledger)
                        break
            except WriterBusyError:
                self._is_locked_out = self._is_locked_out or wait_s >= self._lock_timeout_s
                raise
            except lmdb.MapFullError:
                self._is_short, self._patience = True, _COMMITS_WITHOUT_PINS
                raise
            self._env.adopt(ledger.head)
            self.space.adopt()
        self._is_short = self._is_short and self._patience > 0
        self._patience = max(0, self._patience - 1)
        self.num_evicted += ledger.num_evicted
        if self.removed is not None:
            self.removed += ledger.removed

    def _expire_pins(self, ledger: Ledger) -> None:
        """Releasing a pin rewrites the records of its sequence, which takes pages: where they are
        scarce, what needs them goes first, and then one pin at a time."""
        if not self._patience:
            pins.expire(ledger, self.clock(), 1 if self._is_short else sys.maxsize)

    def attempt(
        self,
        change: Callable[[Ledger], int],
        wait_s: float | None = None,
        *,
        makes_room_for: Collection[bytes] = (),
    ) -> int:
        """Make one change in a transaction; its result, or 0 when it cannot be made now.

        A map that is too full for a change of the blocks ``makes_room_for`` is relieved of others.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self.ledger(wait_s) as ledger:
                    return change(ledger)
            except SealError:
                self.rebuild()
            except lmdb.MapFullError:
                need = _PAGES_A_CHANGE * len(makes_room_for)
                if not need or not self.relieve(need, makes_room_for):
                    return 0
            except (WriterBusyError, TierBrokenError):
                return 0
            except lmdb.Error as error:
                if not self.survive(error):
                    return 0
        return 0

    def relieve(self, need: int, spared: Collection[bytes]) -> bool:
        """After a full map that the accounts did not foresee: whether trying again may help."""
        if self._env.free_stale_readers():
            return True
        is_better = 0
        while need and not is_better:  # evicting takes pages, too: rather a few blocks than none
            pages, need = need, need // 4
            is_better = self.attempt(partial(self.space.relieve, need=pages, protect=spared))
        if not is_better and not self._has_warned_of_reader:
            self._has_warned_of_reader = True
            path = self._env.directory
            logger.warning("disk map full, freed pages cannot be reused yet path=%s", path)
        return bool(is_better)

    def survive(self, error: lmdb.Error) -> bool:
        """After a failed transaction: put things right where that is possible; whether to go on."""
        code = getattr(error, "code", 0)
        # liblmdb says EIO for a write that ended early, as the last one on a full volume does; when
        # it comes again on pages the file already has, it means what it says.
        is_short = code == errno.EIO and self.space.reason is None
        if is_short or code in _NO_SPACE or isinstance(error, lmdb.DiskError):
            self._env.trim()
            self.space.stop_growing(f"the volume is full: {error}")
            return True
        if isinstance(error, lmdb.PanicError):  # an earlier commit failed half-way
            with contextlib.suppress(KVStoreError):
                self._env.recover()
                return True
        elif isinstance(error, DAMAGE):
            self._env.report_damage(error)
        else:
            self._env.turn_off(str(error))
        return False

    def rebuild(self) -> bool:
        """Make everything follow from ``index`` and ``payload`` again; False when it must wait."""
        hints = [ref for ref, record in self.suspects.copy().values() if record is None]
        try:
            with self._env.write(self._lock_timeout_s) as txn:
                rebuilt = rebuild(self._env, txn, hints)
        except (WriterBusyError, lmdb.MapFullError, TierBrokenError):
            return False
        except lmdb.Error as error:
            self.survive(error)
            return False
        logger.warning("rebuilt the index path=%s result=%s", self._env.directory, rebuilt)
        return True
