"""One write transaction's view of the databases: what keeps them true together.

Every change of a block goes through here, so that after each commit

    the parent record of every block is there (roots have none),
    ``children``, ``recency`` and the pins in ``meta`` say what ``index`` says,
    the counters are the sums over ``index``,
    every record that is not bad has its payload.

``finish`` writes what the ledger kept in memory; without it the transaction must be aborted.
Puts and deletes only: checksums and codecs are done before. Any method raises ``SealError`` when a
value in its way is damaged: abort, rebuild (``repair.py``), try again. Does not know files.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from kvstore.block import PutOutcome
from kvstore.disk import departures, schema
from kvstore.disk.departures import Departure
from kvstore.disk.environment import Environment
from kvstore.disk.schema import Head, Record, SealError, Usage


class Prepared(NamedTuple):
    """A block ready to be put: encoded and summed before the transaction begins."""

    key: bytes
    parent: bytes
    tokens: bytes
    depth: int
    namespace: bytes
    salt: bytes
    num_tokens: int
    stored: Any  # bytes-like, borrowed
    nbytes: int  # of ``stored``
    payload_bytes: int
    codec: str
    checksum: bytes


class Ledger:
    def __init__(self, env: Environment, txn: Any) -> None:
        """``txn`` is a write transaction with mapped values (``buffers=True``)."""
        self._env = env
        self._txn = txn
        self.head = Head.decode(txn.get(schema.HEAD_KEY, db=env.meta) or b"")
        self._usage: dict[tuple[bytes, bytes], Usage] = {}
        self._new_leaves: dict[bytes, bytes] = {}  # key → order, not yet in recency
        self._child_cursor = txn.cursor(db=env.children)
        self.num_evicted = 0
        self.num_changes = 0
        self.freed_pages = 0  # of payloads; usable by the transaction after the next
        self.removed: list[tuple[bytes, bytes, bytes]] = []  # namespace, salt, key of good blocks
        self._left: list[tuple[bytes, Departure]] = []

    # --- reading ----------------------------------------------------------------------------------

    def record(self, key: bytes) -> Record | None:
        value = self._txn.get(key, db=self._env.index)
        return None if value is None else schema.decode_record(key, value)

    def has_children(self, key: bytes) -> bool:
        return bool(self._child_cursor.set_key(key))

    def usage(self, namespace: bytes, salt: bytes) -> Usage:
        """Counters of one namespace and salt; changes to it are written by ``finish``."""
        usage = self._usage.get((namespace, salt))
        if usage is None:
            key = schema.usage_key(namespace, salt)
            value = self._txn.get(key, db=self._env.meta)
            usage = Usage.decode(key, value) if value is not None else Usage()
            self._usage[namespace, salt] = usage
        return usage

    def namespace_bytes(self, namespace: bytes) -> int:
        """Bytes that all salts of a namespace hold together."""
        prefix = schema.USAGE_PREFIX + namespace
        cursor = self._txn.cursor(db=self._env.meta)
        found = cursor.set_range(prefix)
        salts = {salt for space, salt in self._usage if space == namespace}
        while found and bytes(cursor.key()).startswith(prefix):
            salts.add(bytes(cursor.key())[len(prefix) :])
            found = cursor.next()
        return sum(self.usage(namespace, salt).num_bytes for salt in salts)

    def pages_used(self) -> tuple[int, int]:
        """Pages of all trees, and those of them that are not payload (liblmdb counts both).

        Free pages, and the tree that lists them, are not among them.
        """
        env, tree, overflow = self._env, 2, 0
        for db in (env.index, env.payload, env.children, env.recency, env.namespaces, env.meta):
            stat = self._txn.stat(db)
            tree += stat["branch_pages"] + stat["leaf_pages"]
            overflow += stat["overflow_pages"]
        return tree + overflow, tree

    # --- blocks -----------------------------------------------------------------------------------

    def next_orders(self, count: int) -> int:
        """Reserve ``count`` consecutive orders; the first of them."""
        first = self.head.next_order
        self.head.next_order += count
        return first

    def put(self, block: Prepared, order: int, now: float) -> PutOutcome:
        """Admit one block below its parent. ``order`` must be one that nothing else has."""
        env, txn, key = self._env, self._txn, block.key
        existing = self.record(key)
        if existing is not None and not existing.is_bad:
            return PutOutcome.PRESENT
        if block.depth > 0 and not self._becomes_parent(block.parent):
            return PutOutcome.ORPHAN
        record = Record(
            block.parent,
            block.tokens,
            block.depth,
            block.namespace,
            block.salt,
            block.num_tokens,
            block.nbytes,
            block.payload_bytes,
            block.codec,
            block.checksum,
            now,
            now,
            schema.encode_order(order),
            False,
            existing.hits if existing is not None else 0,
            *(existing[-2:] if existing is not None else ()),  # its pins
        )
        if existing is not None:  # bad: it has children or a pin, and its payload is gone
            self._count(key, existing, -1)
        value = schema.encode_record(key, record)
        txn.put(key, block.stored, db=env.payload)
        txn.put(key, value, db=env.index)
        if existing is None:
            txn.put(block.parent, key, db=env.children)
            self._new_leaves[key] = record.order
        self._count(key, record, 1, len(value))
        return PutOutcome.STORED

    def _becomes_parent(self, key: bytes) -> bool:
        """Take the block out of the leaves; False when there is no such block."""
        if self._new_leaves.pop(key, None) is not None:
            return True
        record = self.record(key)
        if record is None:
            return False
        self._txn.delete(record.order, db=self._env.recency)
        return True

    def drop(self, key: bytes, record: Record, why: Departure) -> bytes | None:
        """Remove a block without children and pins; its parent may become a leaf.

        A bad parent left without children goes too. Returns the order at which an ancestor became a
        leaf, or None.
        """
        env, txn = self._env, self._txn
        assert not record.num_pins, "a pinned block is not dropped"
        while True:
            txn.delete(key, db=env.payload)
            txn.delete(key, db=env.index)
            txn.delete(record.parent, key, db=env.children)
            txn.delete(record.order, db=env.recency)
            self._new_leaves.pop(key, None)
            self._leave(key, record, why)
            if record.depth == 0 or self.has_children(record.parent):
                return None
            key = record.parent
            parent = self.record(key)
            if parent is None or parent.num_pins:
                return None
            if not parent.is_bad:
                txn.put(parent.order, key, db=env.recency)
                return parent.order
            record = parent

    def discard(self, key: bytes, record: Record, why: Departure) -> None:
        """Remove a block's bytes: all of it when nothing needs the record, else it becomes bad."""
        if not self.has_children(key) and not record.num_pins:
            self.drop(key, record, why)
        elif not record.is_bad:
            self._txn.delete(key, db=self._env.payload)
            self._leave(key, record, why)
            bad = record._replace(is_bad=True)
            value = schema.encode_record(key, bad)
            self._txn.put(key, value, db=self._env.index)
            self._count(key, bad, 1, len(value))

    def touch(self, key: bytes, record: Record, order: int, now: float) -> None:
        """The block was used: ``order`` replaces its old one."""
        touched = record._replace(
            touched=now, order=schema.encode_order(order), hits=record.hits + 1
        )
        value = schema.encode_record(key, touched)
        self._txn.put(key, value, db=self._env.index)
        grown = len(value) - len(schema.encode_record(key, record))
        if grown:
            self.head.total.num_bytes += grown
            self.usage(record.namespace, record.salt).num_bytes += grown
        if self._txn.delete(record.order, db=self._env.recency):  # a leaf
            self._txn.put(touched.order, key, db=self._env.recency)

    def change_pins(
        self,
        key: bytes,
        record: Record,
        num_pins: int,
        pinned_until: float,
        holds: bytes | None = None,
    ) -> None:
        """Rewrite a record's pins. A leaf leaves ``recency`` with its first and returns with its
        last; a bad one goes with it. ``holds`` are those of its own, None where that stays."""
        new = record._replace(num_pins=num_pins, pinned_until=pinned_until)
        old_bytes, value = len(schema.encode_record(key, record)), schema.encode_record(key, new)
        self.num_changes += 1
        self._txn.put(key, value, db=self._env.index)
        for usage in (self.head.total, self.usage(record.namespace, record.salt)):
            usage.add(record, old_bytes, -1)
            usage.add(new, len(value))
        if record.pinned_until and holds is not None:
            self._txn.delete(schema.pin_key(record.pinned_until, key), db=self._env.meta)
        if pinned_until and holds is not None:
            row = schema.pin_key(pinned_until, key)
            self._txn.put(row, schema.seal(row, holds), db=self._env.meta)
        if bool(num_pins) == bool(record.num_pins) or self.has_children(key):
            return
        if num_pins:
            self._txn.delete(record.order, db=self._env.recency)
        elif record.is_bad:
            self.drop(key, new, Departure.CORRUPT)
        else:
            self._txn.put(record.order, key, db=self._env.recency)

    def pin_holds(self, key: bytes, record: Record) -> bytes:
        """What ``change_pins`` was given as the holds of a block's own pin."""
        row = schema.pin_key(record.pinned_until, key)
        return schema.unseal(row, self._txn.get(row, db=self._env.meta) or b"")

    def first_pin(self) -> tuple[float, bytes] | None:
        """The pin that ends first: when, and the key of its block."""
        cursor = self._txn.cursor(db=self._env.meta)
        if not cursor.set_range(schema.PIN_PREFIX):
            return None
        row = bytes(cursor.key())
        if not row.startswith(schema.PIN_PREFIX):
            return None
        schema.unseal(row, cursor.value())
        return schema.read_pin_key(row)

    def evict(
        self,
        num_pages: int,
        protect: Collection[bytes],
        *,
        namespace: bytes | None = None,
        salt: bytes | None = None,
    ) -> int:
        """Drop least recently used leaves until their pages sum to ``num_pages``; what they sum to.

        Spares ``protect``; with ``namespace`` (and ``salt``) takes only what counts for it.
        """
        freed, position = 0, b""
        cursor = self._txn.cursor(db=self._env.recency)
        while freed < num_pages and cursor.set_range(position):
            order, key = bytes(cursor.key()), bytes(cursor.value())
            position = _after(order)
            if key in protect:
                continue
            record = self.record(key)
            if record is None:
                raise SealError
            if namespace is not None and record.namespace != namespace:
                continue
            if salt is not None and record.salt != salt:
                continue
            freed += self.block_pages(record.nbytes)
            self.num_evicted += 1
            new_leaf = self.drop(key, record, Departure.EVICTED)
            if new_leaf is not None and new_leaf < position:
                position = new_leaf
        return freed

    def block_pages(self, nbytes: int) -> int:
        """Pages one block takes, an estimate from above for small payloads, which share theirs."""
        page = self._env.page_size
        if nbytes < page // 2:
            return 1
        return -(-(nbytes + 16) // page) + 1

    def name_namespace(self, namespace: bytes, body: bytes) -> None:
        """Write down what a namespace is, unless that is there already."""
        value = schema.seal(namespace, body)
        if bytes(self._txn.get(namespace, db=self._env.namespaces) or b"") != value:
            self._txn.put(namespace, value, db=self._env.namespaces)

    def set_capacity(self, capacity_bytes: int) -> None:
        """Attached processes see the new generation at their next transaction."""
        if self.head.capacity_bytes != capacity_bytes:
            self.head.capacity_bytes = capacity_bytes
            self.head.generation += 1

    # --- counters ---------------------------------------------------------------------------------

    def _leave(self, key: bytes, record: Record, why: Departure) -> None:
        """Count a block out. Of a bad one there was nothing left to lose."""
        self._count(key, record, -1)
        if not record.is_bad:
            self.freed_pages += self.block_pages(record.nbytes)
            self.removed.append((bytes(record.namespace), bytes(record.salt), bytes(key)))
            self._left.append((bytes(key), why))

    def _count(
        self, key: bytes, record: Record, sign: int, record_bytes: int | None = None
    ) -> None:
        self.num_changes += 1
        if record_bytes is None:
            record_bytes = len(schema.encode_record(key, record))
        self.head.total.add(record, record_bytes, sign)
        self.usage(record.namespace, record.salt).add(record, record_bytes, sign)

    def finish(self) -> None:
        """Write leaves and counters. The last call before the commit."""
        env, txn = self._env, self._txn
        for key, order in self._new_leaves.items():
            txn.put(order, key, db=env.recency)
        self._new_leaves.clear()
        for (namespace, salt), usage in self._usage.items():
            key = schema.usage_key(namespace, salt)
            if usage.num_blocks or usage.num_bad:
                txn.put(key, usage.encode(key), db=env.meta)
            else:
                txn.delete(key, db=env.meta)
        self._usage.clear()
        if self._left:
            departures.note(txn, env.meta, self._left, cache_pages=env.map_pages)
            self._left.clear()
        self.head.evicted += self.num_evicted
        txn.put(schema.HEAD_KEY, self.head.encode(), db=env.meta)


def _after(order: bytes) -> bytes:
    return schema.encode_order(int.from_bytes(order, "big") + 1)
