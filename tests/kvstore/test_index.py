import sys

from kvstore.hashing import chain_keys, chain_refs, chain_seed, encode_tokens, namespace_id
from kvstore.index import NONE, BlockIndex

SEED = chain_seed(namespace_id({}))


def add_chain(index: BlockIndex, tokens: list[int], block_size: int = 4) -> list[int]:
    slots = []
    for ref in chain_refs(SEED, encode_tokens(tokens), 4 * block_size):
        slot = index.slots.get(ref.key, NONE)
        if slot == NONE:
            slot = index.add(ref, b"")
            index.device[slot] = slot
        slots.append(slot)
    return slots


def forget(index: BlockIndex, slot: int) -> None:
    index.device[slot] = NONE
    index.drop(slot)


def test_children_hang_on_their_parents_key_and_roots_on_the_seed():
    index = BlockIndex()
    first = add_chain(index, [1] * 4 + [2] * 4)
    second = add_chain(index, [1] * 4 + [3] * 4)
    assert first[0] == second[0]
    assert set(index.children(index.key[first[0]])) == {first[1], second[1]}
    assert list(index.children(SEED)) == [first[0]]


def test_a_parent_that_comes_back_finds_its_children():
    """A parent may be evicted before its child, and be loaded again later."""
    index = BlockIndex()
    parent, child = add_chain(index, [1] * 4 + [2] * 4)
    ref, key = index.ref(parent), index.key[parent]
    forget(index, parent)
    assert list(index.children(key)) == [child]
    again = index.add(ref, b"")
    index.device[again] = again
    assert list(index.children(index.key[again])) == [child]


def test_dropping_a_child_leaves_its_siblings():
    index = BlockIndex()
    chains = [add_chain(index, [1] * 4 + [last] * 4) for last in range(5)]
    parent = index.key[chains[0][0]]
    for gone in (2, 4, 0):
        forget(index, chains[gone][1])
        chains[gone] = []
        assert set(index.children(parent)) == {chain[1] for chain in chains if chain}
    for left in (1, 3):
        forget(index, chains[left][1])
    assert list(index.children(parent)) == []


def test_a_slot_is_used_again():
    index = BlockIndex()
    slots = add_chain(index, list(range(16)))
    forget(index, slots[3])
    assert add_chain(index, [9] * 4) == [slots[3]]


def test_memory_stays_within_its_bound():
    """At most 450 bytes a block beyond its tokens, counted object by object."""
    index, count, size = BlockIndex(), 20_000, 16
    tokens = encode_tokens(range(count * size))
    parent = SEED
    for ref in chain_refs(SEED, tokens, 4 * size):
        slot = index.add(ref, b"")
        index.device[slot] = slot
    total = 0
    for value in vars(index).values():
        total += sys.getsizeof(value)
        if hasattr(value, "_next"):
            total += sys.getsizeof(value._next) + sys.getsizeof(value._previous)
    total += sum(map(sys.getsizeof, index.key)) + sum(map(sys.getsizeof, index.slots.values()))
    total += count * sys.getsizeof(b"")  # the tokens' own object; parent keys are shared
    assert parent == SEED
    assert total / count <= 450
    assert chain_keys(SEED, tokens, 4 * size)[-1] in index.slots
