"""The disk tier's library: blocks in one LMDB environment, checked, bounded, shared by processes.

``probe`` and ``read_into`` may be called from any thread; what changes the cache belongs to one
writer thread. Everything blocks; nothing here knows asyncio or torch.

Losing the disk is not an error of the caller's request: reading methods answer with a miss, putting
ones with ``FULL``, and ``stats()`` says why. Only when the environment is gone for good does
``put_group`` raise ``TierBrokenError``.
"""

import contextlib
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.config import DiskConfig
from kvstore.disk import places, registry, schema
from kvstore.disk.changes import Changes
from kvstore.disk.codec import get_codec
from kvstore.disk.environment import Environment, State
from kvstore.disk.forget import own_blocks
from kvstore.disk.ledger import Prepared
from kvstore.disk.pins import NAMELESS, EndedPins
from kvstore.disk.reader import Reader
from kvstore.disk.schema import DiskEntry, Head, Record, SealError
from kvstore.disk.slices import wait_until_open
from kvstore.disk.space import Space
from kvstore.disk.writer import Writer
from kvstore.errors import KVStoreError, StoreClosedError, TierBrokenError

_SHORT_WAIT_S = 0.5
_FORGET_SLICE = 256  # blocks a transaction
COMMAND_WAIT_S = 10.0  # for another writer, before a command says who keeps it waiting


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counters as last committed; those marked * count this store since it was opened."""

    blocks: int
    tokens: int
    used_bytes: int  # payloads as stored, and index records
    file_bytes: int  # allocated on the volume
    capacity_bytes: int
    pinned_blocks: int
    bad_blocks: int  # records without payload, waiting to be written anew
    corrupt: Mapping[str, int]  # * bad blocks met, by reason
    evictions: int  # *
    lock_wait_s: float  # * waited for other writers, the wait in progress included
    state: str  # "ok" | "read_only" | "checking" | "off"
    reason: str | None  # why the state is not ok, or why the cache does not grow


class DiskStore:
    """Use ``open``; one per directory and process is enough, more share one environment."""

    def __init__(
        self,
        env: Environment,
        config: DiskConfig,
        capacity_bytes: int | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        lock_timeout_s: float,
    ) -> None:
        self._env = env
        self._config = config
        self._is_closed = False
        self._last_head = Head(0, env.capacity_bytes, 0, 0, schema.Usage())
        self._clock, self._ended_pins = clock, EndedPins(env)
        self._reader = Reader(env)
        space = Space(env, config, monotonic)
        self._changes = Changes(env, space, self._reader.suspects, lock_timeout_s, clock)
        self._writer = Writer(env, self._changes, config, capacity_bytes)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        capacity_bytes: int | None = None,
        config: DiskConfig | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        lock_timeout_s: float = 30.0,
        role: str = "engine",
    ) -> "DiskStore":
        """Open the cache at ``path``, create it where there is none. O(1): nothing is loaded.

        ``capacity_bytes`` belongs to the directory: None keeps what it has (50 GiB for a new one),
        another value changes it for every attached process. After ``lock_timeout_s`` of waiting for
        another writer the store is read-only until it gets the lock. ``role`` is what others read
        of us in ``attached``.

        Raises ``ConfigError`` for a path or size that cannot be meant, before anything is created,
        and ``TierBrokenError`` when the directory cannot be used. A cache whose file is in doubt
        opens in the state "checking" and serves nothing until a child process has checked it.
        """
        config = config if config is not None else DiskConfig()
        places.check_capacity(capacity_bytes)
        get_codec(config.codec)
        is_read_only = config.disk_mode == "ro"
        directory = places.prepare_directory(Path(path), is_read_only=is_read_only)
        env = registry.acquire(
            directory,
            role="read only" if is_read_only else role,
            durability=config.durability,
            is_read_only=is_read_only,
            raise_on_damage=config.on_corruption == "raise",
            capacity_bytes=capacity_bytes,
        )
        store = cls(env, config, capacity_bytes, clock, monotonic, lock_timeout_s)
        if store._can_write():
            store._writer.tidy(wait_s=_SHORT_WAIT_S)
        return store

    # --- reading: any thread ----------------------------------------------------------------------

    def probe(self, refs: Sequence[BlockRef]) -> list[DiskEntry]:
        """The leading ``refs`` that are here: up to the first miss, or bad or wrong record.

        Checks records, not payloads. One short read transaction, about 3 µs a block.
        """
        self._check_open()
        return self._reader.probe(refs)

    def find(self, parent: bytes, keys: Sequence[bytes]) -> list[BlockRef]:
        """The leading blocks with these keys that are here, the first below ``parent`` (a key, or
        the seed for roots), each of the others below the one before.

        A key has to follow from what its record says. As fast as ``probe``.
        """
        self._check_open()
        return self._reader.find(parent, keys)

    def read_into(self, ref: BlockRef, dst: memoryview) -> None:
        """Fill ``dst`` (writable, exactly the decoded size) with a block's verified bytes.

        Copy and checksum run inside a short read transaction, without the interpreter lock; what
        is summed is the copy, not the mapped page. Raises ``BlockMissingError`` when the block is
        not here, ``CorruptBlockError`` when it is not what was asked for or not what was stored;
        then ``dst`` holds anything, and the writer will mark the block bad.
        """
        self._check_open()
        self._reader.read_into(ref, dst)

    def read_many(self, reads: Sequence[tuple[BlockRef, memoryview]]) -> list[KVStoreError | None]:
        """Several blocks in one transaction; for each None, or what ``read_into`` would raise.

        Give a few megabytes at a time: the transaction is open until the last is copied.
        """
        self._check_open()
        return self._reader.read_many(reads)

    def children(self, parent: bytes, limit: int = 64) -> list[BlockRef]:
        """Blocks that continue ``parent`` (a key, or the seed for roots), at most ``limit``."""
        self._check_open()
        return self._reader.children(parent, limit)

    def stats(self) -> DiskStats:
        """A snapshot; changes nothing."""
        env = self._env
        head, num_ended = self._last_head, 0
        if not self._is_closed and env.state is State.OK:
            try:
                with env.read() as txn:
                    head = Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
                    num_ended = self._ended_pins.num_blocks(txn, self._clock())
                self._last_head = head
            except (SealError, TierBrokenError, lmdb.Error):
                head = self._last_head
        since = env.writer_lock.waiting_since
        waiting_s = time.monotonic() - since if since is not None else 0.0
        state, reason = self._state()
        return DiskStats(
            blocks=head.total.num_blocks,
            tokens=head.total.num_tokens,
            used_bytes=head.total.num_bytes,
            file_bytes=places.allocated_bytes(env.data_file),
            capacity_bytes=head.capacity_bytes,
            pinned_blocks=head.total.num_pinned - num_ended,
            bad_blocks=head.total.num_bad,
            corrupt=self._reader.corrupt,
            evictions=self._changes.num_evicted,
            lock_wait_s=env.writer_lock.wait_s + waiting_s,
            state=state,
            reason=reason,
        )

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Let ``kvstore inspect --watch`` read this until the store is closed. JSON, a few KB."""
        if not self._is_closed:
            self._env.publish(id(self), snapshot)

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """The registered namespaces and what they are."""
        with self._env.read() as txn:
            return {
                bytes(namespace): schema.decode_identity(bytes(namespace), value)
                for namespace, value in txn.cursor(db=self._env.namespaces)
            }

    @property
    def is_checking(self) -> bool:
        """Whether our own check of the file is in progress: ``close`` waits for its end."""
        return self._env.state is State.CHECKING and not self._env.waits_for_others

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until a check in progress has ended; False when the time ran out."""
        return self._env.wait_ready(timeout_s)

    # --- changing: the writer thread --------------------------------------------------------------

    def register_namespace(self, namespace: bytes, identity: Mapping[str, Any]) -> None:
        """Write down what a namespace is: model, dtype, block_size, …; ``inspect`` prints it."""
        self._writer.register_namespace(namespace, identity)
        if self._can_write():
            self._writer.tidy(wait_s=_SHORT_WAIT_S)

    def put_group(
        self, writes: Sequence[BlockWrite], *, count_tokens: bool = True
    ) -> list[PutOutcome]:
        """Store blocks, parents before children; one outcome each, in order.

        One transaction, with the evictions it needs; several only when the group is large for the
        cache. ``FULL`` also when another process keeps the writer's lock, the store is read-only or
        being checked. Never raises for a full volume or map. Raises ``TierBrokenError`` when the
        environment is gone, ``StoreClosedError`` after ``close``. Without ``count_tokens`` the
        ``tokens`` of the blocks are opaque and not counted.
        """
        if self._can_write():
            return self._writer.put_group(writes, count_tokens=count_tokens)
        if self._env.state is State.OFF and self._config.disk_mode == "rw":
            raise TierBrokenError(self._env.reason or "the disk tier is off", tier="disk")
        return [PutOutcome.FULL] * len(writes)

    def put_encoded(self, blocks: Sequence[Prepared]) -> dict[bytes, PutOutcome]:
        """Like ``put_group``, for blocks that went through a codec already."""
        if not self._can_write():
            raise TierBrokenError(self._env.reason or "the disk tier is read-only", tier="disk")
        return self._writer.put_encoded(blocks)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that these blocks were used: leaf first, root last, so that the leaf is the older.

        A block whose last recorded use is younger than ``touch_interval_s`` is passed over.
        """
        if self._can_write():
            self._writer.touch(keys)

    def pin(
        self, keys: Sequence[bytes], *, ttl_s: float | None = None, hold: bytes = NAMELESS
    ) -> list[bytes]:
        """Keep a sequence, given from its root on, from being evicted, by any process.

        It lasts ``ttl_s`` seconds (None: until ``unpin``), also over restarts; pinning again keeps
        the later end. With a name of 8 bytes as ``hold``, ``release`` gives back this hold alone.
        All or nothing: returns the keys that are not here, none when all is pinned.
        Raises ``CapacityError`` when pins would hold more than half of the capacity,
        ``TierBrokenError`` when nothing can be written.
        """
        if not self._can_write():
            raise TierBrokenError(self._state()[1] or "the disk tier is off", tier="disk")
        return self._writer.pin(keys, ttl_s, hold)

    def release(self, key: bytes, hold: bytes) -> bool:
        """Give back one hold of the sequence that ends with this block; whether it was there.

        What others hold stays pinned, to the last end of theirs. Raises as ``unpin``.
        """
        return self._can_write() and self._writer.unpin(key, hold)

    def unpin(self, key: bytes) -> bool:
        """Release the pin of the sequence that ends with this block, all holds of it; whether there
        was one.

        Raises ``TierBrokenError`` when it cannot be released now.
        """
        return self._can_write() and self._writer.unpin(key, None)

    def remove(self, keys: Sequence[bytes]) -> Removal:
        """Drop these blocks. One with remaining children keeps its record; pinned ones stay, all
        of them when nothing can be changed."""
        removal = self._writer.remove(keys) if self._can_write() else None
        return removal or Removal(0, 0)

    def evict(self, seen: Mapping[bytes, bytes], *, with_pinned: bool = False) -> set[bytes]:
        """Drop the blocks, given as key and order, that were not used or continued since.

        Give deeper ones first. Pinned ones stay, unless ``with_pinned``: then their pins go, too.
        One transaction; returns the keys of those that went. Raises ``TierBrokenError`` when it
        cannot be made.
        """
        gone = None
        if self._can_write():
            gone = self._writer.evict(seen, with_pinned=with_pinned)
        if gone is None:
            raise self.refusal()
        return gone

    def clear(self, ancestor: bytes) -> Removal:
        """Drop every block below this key or seed, also those below bad ones, but no pinned one.

        Raises ``TierBrokenError`` when nothing can be changed now.
        """
        removal = self._writer.clear(ancestor) if self._can_write() else None
        if removal is None:
            raise self.refusal()
        return removal

    def forget(
        self, keys: Sequence[bytes], end: bytes, beginning: bytes, spared: Container[bytes]
    ) -> int:
        """Drop the sequence ``keys``, root first, and what continues ``end``, its last key or the
        seed, with tokens that begin so; how many blocks went.

        What else continues them stays, as do pinned blocks, spared ones, and all that leads to
        them. Raises ``TierBrokenError`` when nothing can be changed now.
        """
        if not self._can_write():
            raise self.refusal()
        own = own_blocks(self._env, keys, end, beginning, spared)
        count = 0
        while some := list(islice(own, _FORGET_SLICE)):
            gone = self.evict({key: record.order for key, record in some})
            count += sum(key in gone and not record.is_bad for key, record in some)
        return count

    def take_removed(self) -> list[tuple[bytes, bytes, bytes]]:
        """(namespace, salt, key) of blocks this store has evicted, removed or marked bad since the
        last call. Begins to collect them with the first."""
        removed, self._changes.removed = self._changes.removed, []
        return removed or []

    def repair(self, bad: Sequence[tuple[BlockRef, Record]], *, rebuild: bool) -> bool:
        """Mark blocks bad, and rebuild what is derived from the index; False when it must wait."""
        return self._can_write() and self._writer.repair(bad, rebuild=rebuild)

    def flush(self) -> None:
        """Everything put is committed already; with durability "power" it is on the medium, too.

        Raises ``TierBrokenError`` when it cannot be brought there.
        """
        if self._can_write():
            self._writer.tidy(wait_s=_SHORT_WAIT_S)
            if self._config.durability == "power":
                try:
                    self._env.sync()
                except lmdb.Error as error:
                    message = f"{self._env.directory} cannot be synced: {error}"
                    raise TierBrokenError(message, tier="disk") from error

    def close(self) -> None:
        """Give the directory back; waits for our own check in progress. May be called twice."""
        if self._is_closed:
            return
        if self._env.is_inherited:
            self._is_closed = True
            return
        while not self._env.wait_ready(_SHORT_WAIT_S) and not self._env.waits_for_others:
            pass
        if self._can_write():
            self._writer.tidy(wait_s=_SHORT_WAIT_S)
        self.stats()
        self._env.publish(id(self), None)
        self._is_closed = True
        registry.release(self._env)

    def __enter__(self) -> "DiskStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- state ------------------------------------------------------------------------------------

    def refusal(self) -> TierBrokenError:
        """What to raise for a change that could not be made."""
        path = self._env.directory
        return TierBrokenError(f"{path} cannot be changed now: {self.why_not()}", tier="disk")

    def why_not(self) -> str:
        """After a change that could not be made: what is in the way."""
        if self._changes.is_locked_out():
            who = self._env.attachment.describe_holders()
            return f"it is being written by {who}; try again, or end that"
        return self._state()[1] or "it is full"

    def _state(self) -> tuple[str, str | None]:
        env = self._env
        if self._is_closed:
            return State.OFF.value, "closed"
        if env.state is not State.OK:
            return env.state.value, env.reason
        if env.is_read_only or self._config.disk_mode == "ro":
            return "read_only", "opened with disk_mode='ro'"
        if self._changes.is_locked_out():
            return "read_only", "another process keeps the writer's lock"
        return State.OK.value, self._changes.space.reason

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError(f"{self._env.directory}: the store is closed")

    def _can_write(self) -> bool:
        self._check_open()
        if self._env.is_inherited:
            self._env.begin_read()  # says why not
        is_read_only = self._env.is_read_only or self._config.disk_mode == "ro"
        return self._env.state is State.OK and not is_read_only


@contextlib.contextmanager
def open_for_change(
    path: str | Path, role: str, *, capacity_bytes: int | None = None
) -> Iterator[DiskStore]:
    """A store that can write, for a command. Raises ``TierBrokenError`` when it cannot."""
    config = DiskConfig(on_corruption="raise")
    with DiskStore.open(
        path,
        capacity_bytes=capacity_bytes,
        config=config,
        role=role,
        lock_timeout_s=COMMAND_WAIT_S,
    ) as store:
        wait_until_open(store._env)
        stats = store.stats()
        if stats.state != State.OK.value:
            raise TierBrokenError(f"{path}: {stats.reason}", tier="disk")
        yield store
