"""An LRU prefix cache in plain Python: the rules of ``stack_distance``, one request at a time."""

from collections.abc import Iterable, Sequence

from kvstore.planning import RequestBatch, RequestBatcher


def lru_hits(requests: Iterable[Sequence[int]], capacity: int) -> list[int]:
    """Blocks of each request's longest cached prefix, in a cache of ``capacity`` blocks."""
    cached: list[int] = []  # the most recent first
    hits = []
    for blocks in requests:
        known = set(cached)
        found = next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
        hits.append(found)
        for block in reversed(blocks):
            if block in known:
                cached.remove(block)
            known.add(block)
            cached.insert(0, block)
        del cached[capacity:]
    return hits


def batch_of(requests: Iterable[Sequence[int]], block_tokens: int = 512) -> RequestBatch:
    """Requests whose last block is full, one second apart."""
    batcher = RequestBatcher(block_tokens)
    for second, blocks in enumerate(requests):
        assert batcher.add(list(blocks), block_tokens * len(blocks), float(second)) is None
    batch = batcher.flush()
    assert batch is not None
    return batch
