"""The index: which blocks are known in memory, where their copies lie, and who uses them.

A *slot* is a small integer that stands for one block while any memory tier holds it. What is known
of a block lies in parallel arrays indexed by slot, so that a million blocks cost bytes and not
objects. The blocks form a forest: each names its parent by key, and the children of one key are a
linked list of slots. Roots are the children of their namespace's seed. A parent may be gone from
memory while its children stay, and come back: the list hangs on the key, not on the slot.

The index is plain data owned by one thread. It does not know what a copy is made of, moves no
bytes and does not decide who is evicted.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from kvstore.block import BlockRef
from kvstore.order import LinkedOrder

NONE = -1  # no slot, no block id
VALID, LOADING, FAILED = 0, 1, 2  # states of a device copy


class BlockIndex:
    """Slots and what is known of each. Arrays are read directly; changes go through the methods.

    key, parent_key, tokens   as in ``BlockRef``; an unused slot has the empty key
    salt           the salt's digest, shared between blocks
    depth          block number within its sequence
    device, host   id of the copy in that tier, NONE without one
    loading        VALID; LOADING while the device copy is being filled, neither readable nor
                   evictable; FAILED when that failed and somebody still holds it
    refcount       sequences that use the device copy now
    transfers      copies from or to this block that are under way
    hits           requests that found the block so far
    is_written     1 when disk is believed to hold the block
    used_at        counts uses: larger is more recent, and a parent's is larger than its child's
    touched_s      when disk was last told of a use
    host_lru       blocks in host memory, least recently used first
    dirty          blocks the slowest tier does not hold, oldest first
    dirty_since    when a block became dirty
    cut_off        blocks whose parent is not in memory, roots left out
    """

    def __init__(self) -> None:
        self.slots: dict[bytes, int] = {}
        self.key: list[bytes] = []
        self.parent_key: list[bytes] = []
        self.tokens: list[bytes] = []
        self.salt: list[bytes] = []
        self.depth = array("i")
        self.device = array("i")
        self.host = array("i")
        self.loading = array("b")
        self.refcount = array("i")
        self.transfers = array("i")
        self.hits = array("i")
        self.is_written = array("b")
        self.used_at = array("q")
        self.touched_s = array("d")
        self.dirty_since = array("d")
        self.host_lru = LinkedOrder()
        self.dirty = LinkedOrder()
        self.cut_off: dict[int, None] = {}
        self._first_child: dict[bytes, int] = {}  # by the parent's key
        self._next_sibling = array("i")
        self._previous_sibling = array("i")
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self.slots)

    def match(self, keys: Sequence[bytes], runs: Sequence[bytes], start: int = 0) -> list[int]:
        """Slots of the longest run of known blocks from position ``start`` on.

        Each is confirmed by its tokens, so that a hash collision costs a miss and never a wrong
        answer. Changes nothing.
        """
        find, tokens = self.slots.get, self.tokens
        found = []
        for i in range(start, len(keys)):
            slot = find(keys[i])
            if slot is None or tokens[slot] != runs[i]:
                break
            found.append(slot)
        return found

    def find(self, ref: BlockRef) -> int:
        """The slot of a block, or NONE."""
        slot = self.slots.get(ref.key, NONE)
        return slot if slot != NONE and self.tokens[slot] == ref.tokens else NONE

    def ref(self, slot: int) -> BlockRef:
        return BlockRef(self.key[slot], self.parent_key[slot], self.tokens[slot], self.depth[slot])

    def has_bytes(self, slot: int) -> bool:
        """Whether memory holds the block, and does not only wait for it; False for NONE."""
        return slot != NONE and (self.host[slot] != NONE or self.loading[slot] == VALID)

    def add(self, ref: BlockRef, salt: bytes) -> int:
        """A slot for a block that has none. It has no copy yet: give it one at once."""
        assert ref.key not in self.slots, "the block has a slot already"
        slot = self._unused.pop() if self._unused else self._grow()
        self.slots[ref.key] = slot
        self.key[slot] = ref.key
        self.parent_key[slot] = ref.parent
        self.tokens[slot] = ref.tokens
        self.salt[slot] = salt
        self.depth[slot] = ref.depth
        self.hits[slot] = self.is_written[slot] = 0
        self.touched_s[slot] = 0.0
        first = self._first_child.get(ref.parent, NONE)
        self._previous_sibling[slot] = NONE
        self._next_sibling[slot] = first
        if first != NONE:
            self._previous_sibling[first] = slot
        self._first_child[ref.parent] = slot
        if ref.depth and ref.parent not in self.slots:
            self.cut_off[slot] = None
        if ref.key in self._first_child:
            for child in self.children(ref.key):
                self.cut_off.pop(child, None)
        return slot

    def drop(self, slot: int) -> None:
        """Forget a block without copies and users."""
        assert self.device[slot] == self.host[slot] == NONE, "the block still has a copy"
        assert self.refcount[slot] == self.transfers[slot] == 0, "the block is in use"
        self.dirty.discard(slot)
        self.cut_off.pop(slot, None)
        if self.key[slot] in self._first_child:
            self.cut_off.update(dict.fromkeys(self.children(self.key[slot])))
        following, previous = self._next_sibling[slot], self._previous_sibling[slot]
        if following != NONE:
            self._previous_sibling[following] = previous
        if previous != NONE:
            self._next_sibling[previous] = following
        elif following != NONE:
            self._first_child[self.parent_key[slot]] = following
        else:
            del self._first_child[self.parent_key[slot]]
        del self.slots[self.key[slot]]
        self.key[slot] = self.parent_key[slot] = self.tokens[slot] = b""
        self._unused.append(slot)

    def children(self, key: bytes) -> Iterator[int]:
        """Slots of the known children of a block or seed. The one just yielded may be dropped."""
        child = self._first_child.get(key, NONE)
        while child != NONE:
            following = self._next_sibling[child]
            yield child
            child = following

    def subtrees(self, roots: Iterable[int]) -> Iterator[int]:
        """These blocks and all that continues them in memory, each after what it continues."""
        queue = list(roots)
        while queue:
            slot = queue.pop()
            yield slot
            queue.extend(self.children(self.key[slot]))

    def used_slots(self) -> Iterator[int]:
        return iter(self.slots.values())

    def _grow(self) -> int:
        slot = len(self.key)
        for strings in (self.key, self.parent_key, self.tokens, self.salt):
            strings.append(b"")
        for ids in (self.device, self.host, self._next_sibling, self._previous_sibling):
            ids.append(NONE)
        for counts in (self.depth, self.refcount, self.transfers, self.hits):
            counts.append(0)
        self.loading.append(VALID)
        self.is_written.append(0)
        self.used_at.append(0)
        self.touched_s.append(0.0)
        self.dirty_since.append(0.0)
        for order in (self.host_lru, self.dirty):
            order.reserve(slot + 1)
        return slot
