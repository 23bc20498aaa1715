"""Pins: holds on disk blocks that outlive the process, until their end or until they are released.

A pin is put on the last block of a sequence and protects all that it continues. Its block's record
says when it ends; the records of both say how many pins protect them. So a block is pinned exactly
while that number is not 0, whatever else was pinned, ended or released on the way, and the counters
know how much is pinned without looking.

A pin belongs to the directory: every process spares what it protects, and any may release it. There
is one a block, and it is made of holds: each caller has a name of its own for its hold and gives
back that one, the others' stay. A pin ends with the last of its holds.
"""

import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from kvstore.disk import schema
from kvstore.disk.environment import Environment
from kvstore.disk.ledger import Ledger
from kvstore.disk.schema import Record, SealError
from kvstore.errors import CapacityError

NAMELESS = bytes(8)  # the hold of a caller who never releases it alone

_HOLD = struct.Struct(">8sd")  # name, end
_MOST_HOLDS = 64  # that are told apart: whoever pins at each start and never releases adds one each


def pin(ledger: Ledger, key: bytes, until: float, hold: bytes, now: float) -> None:
    """Hold a block that is there; a hold that is there keeps its later end.

    Raises ``CapacityError`` when more than half would be pinned.
    """
    record = _record(ledger, key)
    holds = _holds(ledger, key, record, now)
    holds[hold] = max(until, holds.get(hold, 0.0))
    if len(holds) > _MOST_HOLDS:
        oldest = next(name for name in holds if name != NAMELESS)
        holds[NAMELESS] = max(holds.pop(oldest), holds.get(NAMELESS, 0.0))
    if record.pinned_until:
        ledger.change_pins(key, record, record.num_pins, max(holds.values()), _encode(holds))
        return
    _change_chain(ledger, key, record, 1, until, _encode(holds))
    pinned_bytes = ledger.head.total.pinned_pages * schema.PAGE_BYTES
    if pinned_bytes > ledger.head.capacity_bytes // 2:
        raise CapacityError(
            f"pins would hold {pinned_bytes} of {ledger.head.capacity_bytes} bytes on disk; at "
            "most half may be pinned: raise disk_cache_size, or unpin"
        )


def release(ledger: Ledger, key: bytes, hold: bytes, now: float) -> bool:
    """Give back one hold of a block's own pin; whether it was there."""
    record = ledger.record(key)
    if record is None or not record.pinned_until:
        return False
    holds = _holds(ledger, key, record, now)
    if holds.pop(hold, None) is None:
        return False
    if holds:
        ledger.change_pins(key, record, record.num_pins, max(holds.values()), _encode(holds))
    else:
        unpin(ledger, key)
    return True


def unpin(ledger: Ledger, key: bytes) -> bool:
    """Release a block's own pin, whoever holds it; whether it had one."""
    record = ledger.record(key)
    if record is None or not record.pinned_until:
        return False
    _change_chain(ledger, key, record, -1, 0.0, b"")
    return True


def expire(ledger: Ledger, now: float, most: int = sys.maxsize) -> None:
    """Release the pins that have ended, at most so many."""
    for _ in range(most):
        first = ledger.first_pin()
        if first is None or first[0] > now:
            return
        if not unpin(ledger, first[1]):
            raise SealError


def _holds(ledger: Ledger, key: bytes, record: Record, now: float) -> dict[bytes, float]:
    """The holds of a block's own pin that have not ended: name to end, oldest first."""
    if not record.pinned_until:
        return {}
    body = ledger.pin_holds(key, record)
    holds = _HOLD.iter_unpack(body) if body else [(NAMELESS, record.pinned_until)]
    return {name: end for name, end in holds if end > now}


def _encode(holds: Mapping[bytes, float]) -> bytes:
    return b"".join(_HOLD.pack(name, end) for name, end in holds.items())


def _change_chain(
    ledger: Ledger, key: bytes, record: Record, step: int, until: float, holds: bytes
) -> None:
    """One pin more or less on a block, whose own it is, and on all that it continues."""
    ledger.change_pins(key, record, record.num_pins + step, until, holds)
    while record.depth > 0:
        key = record.parent
        record = _record(ledger, key)
        ledger.change_pins(key, record, record.num_pins + step, record.pinned_until)


def _record(ledger: Ledger, key: bytes) -> Record:
    record = ledger.record(key)
    if record is None:
        raise SealError
    return record


def rows(env: Environment, txn: Any) -> Iterator[tuple[float, bytes]]:
    """When each pin ends and the block it was put on, the first to end first.

    Raises ``SealError``.
    """
    cursor = txn.cursor(db=env.meta)
    is_there = cursor.set_range(schema.PIN_PREFIX)
    while is_there and bytes(cursor.key()).startswith(schema.PIN_PREFIX):
        row = bytes(cursor.key())
        schema.unseal(row, cursor.value())
        yield schema.read_pin_key(row)
        is_there = cursor.next()


def ended(env: Environment, txn: Any, now: float) -> Counter[bytes]:
    """By block, pins that have ended and are counted all the same: nobody has written since.

    Raises ``SealError``.
    """
    counts: Counter[bytes] = Counter()
    for until, key in rows(env, txn):
        if until > now:
            break
        record = schema.decode_record(key, txn.get(key, db=env.index) or b"")
        counts[key] += 1
        while record.depth > 0:
            key = record.parent
            record = schema.decode_record(key, txn.get(key, db=env.index) or b"")
            counts[key] += 1
    return counts


def ended_blocks(env: Environment, txn: Any, now: float) -> Counter[bytes]:
    """By namespace, blocks that count as pinned although all their pins have ended.

    Raises ``SealError``.
    """
    counts: Counter[bytes] = Counter()
    for key, num_ended in ended(env, txn, now).items():
        record = schema.decode_record(key, txn.get(key, db=env.index) or b"")
        counts[record.namespace] += record.num_pins == num_ended
    return counts


class EndedPins:
    """How many blocks have only pins that have ended, for whoever asks often.

    A walk over all of their records, and so done again only when a pin more has ended or somebody
    has written. Any thread.
    """

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._counted: tuple[tuple[int, int], int] = ((0, 0), 0)

    def num_blocks(self, txn: Any, now: float) -> int:
        """0 where a record or a pin is damaged: that is for ``verify`` to say."""
        try:
            num_ended = sum(1 for _ in takewhile(lambda row: row[0] <= now, rows(self._env, txn)))
            state = txn.id(), num_ended
            if num_ended and self._counted[0] != state:
                self._counted = state, ended_blocks(self._env, txn, now).total()
        except SealError:
            return 0
        return self._counted[1] if num_ended else 0
