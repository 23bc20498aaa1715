"""The suite that any disk tier must pass.

Subclass ``TierSuite``, say how the tier is made and how its medium is looked at past it, and pytest
runs every test below on it. The oracle is the raw medium: a tier cannot vouch for itself.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvstore.block import BlockRef, BlockWrite, PutOutcome, Removal
from kvstore.errors import BlockMissingError, CorruptBlockError
from kvstore.hashing import chain_refs, chain_seed, encode_tokens, namespace_id
from kvstore.tiers.base import BlockRead, DiskTier, RemovedBlock

T = TypeVar("T")

NAMESPACE = namespace_id({"model": "suite"})
SEED = chain_seed(NAMESPACE)
BLOCK_TOKENS, BLOCK_BYTES = 4, 4096


def chain(*blocks: int) -> list[BlockRef]:
    """A sequence of blocks, each of one repeated token."""
    tokens = encode_tokens([block for block in blocks for _ in range(BLOCK_TOKENS)])
    return chain_refs(SEED, tokens, 4 * BLOCK_TOKENS)


def payload(ref: BlockRef) -> bytes:
    return ref.key * (BLOCK_BYTES // len(ref.key))


class TierSuite(ABC):
    """Tests of one tier; a subclass's name begins with ``Test``."""

    @abstractmethod
    def make_tier(self, path: Path) -> DiskTier:
        """A tier on ``path``; made twice on one path, it must find what the first one left."""

    @abstractmethod
    def raw_get(self, path: Path, tier: DiskTier, key: bytes) -> bytes | None:
        """A block's bytes as they lie on the medium, read without the tier."""

    @abstractmethod
    def raw_flip(self, path: Path, tier: DiskTier, key: bytes) -> None:
        """Change one byte of a block on the medium, behind the tier's back."""

    def test_what_was_written_is_on_the_medium_and_is_read_back(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            refs = chain(1, 2, 3)
            assert await self.write(tier, refs) == [PutOutcome.STORED] * 3
            for ref in refs:
                assert self.raw_get(tmp_path, tier, ref.key) == payload(ref)
            assert await self.read(tier, refs) == [payload(ref) for ref in refs]

        self.run(tmp_path, body)

    def test_a_probe_finds_the_longest_run_from_the_first_block_on(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            await self.write(tier, chain(1, 2))
            found = await tier.probe(chain(1, 2, 3))
            assert [entry.key for entry in found] == [ref.key for ref in chain(1, 2)]
            assert await tier.probe(chain(9, 2)) == []
            assert await tier.probe([]) == []

        self.run(tmp_path, body)

    def test_blocks_are_found_by_their_keys_alone(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            refs = chain(1, 2, 3)
            keys = [ref.key for ref in refs]
            await self.write(tier, refs[:2])
            assert await tier.find(SEED, keys) == refs[:2]
            assert await tier.find(refs[0].key, keys[1:]) == refs[1:2]
            assert await tier.find(SEED, keys[1:]) == []
            assert await tier.find(chain_seed(NAMESPACE, "salt"), keys) == []

        self.run(tmp_path, body)

    def test_a_key_with_other_tokens_is_not_found(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            (ref,) = chain(1)
            await self.write(tier, [ref])
            collision = BlockRef(ref.key, ref.parent, chain(2)[0].tokens, 0)
            assert await tier.probe([collision]) == []

        self.run(tmp_path, body)

    def test_a_block_without_its_parent_leaves_nothing(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            first, second = chain(1, 2)
            assert await self.write(tier, [second]) == [PutOutcome.ORPHAN]
            assert self.raw_get(tmp_path, tier, second.key) is None
            assert await self.write(tier, [first, second]) == [PutOutcome.STORED] * 2

        self.run(tmp_path, body)

    def test_writing_again_changes_nothing(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            refs = chain(1, 2)
            await self.write(tier, refs)
            assert await self.write(tier, refs) == [PutOutcome.PRESENT] * 2
            assert tier.stats().blocks == 2

        self.run(tmp_path, body)

    def test_a_missing_block_is_an_error_in_its_place(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            first, second = chain(1, 2)
            await self.write(tier, [first])
            reads = [BlockRead(ref, memoryview(bytearray(BLOCK_BYTES))) for ref in (first, second)]
            good, missing = await tier.read(reads)
            assert good is None
            assert isinstance(missing, BlockMissingError)

        self.run(tmp_path, body)

    def test_a_flipped_byte_is_never_served_and_heals(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            refs = chain(1, 2)
            await self.write(tier, refs)
            self.raw_flip(tmp_path, tier, refs[0].key)
            buffer = memoryview(bytearray(BLOCK_BYTES))
            (error,) = await tier.read([BlockRead(refs[0], buffer)])
            assert isinstance(error, CorruptBlockError)
            assert await self.write(tier, refs[:1]) == [PutOutcome.STORED]
            assert await self.read(tier, refs) == [payload(ref) for ref in refs]

        self.run(tmp_path, body)

    def test_children_hang_on_their_parent_and_roots_on_the_seed(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            first, second = chain(1, 2)
            other = chain(1, 3)[1]
            await self.write(tier, [first, second, other])
            assert await tier.children(SEED) == [first]
            assert {ref.key for ref in await tier.children(first.key)} == {second.key, other.key}

        self.run(tmp_path, body)

    def test_clearing_drops_what_descends_from_a_seed_and_says_so(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            removed: list[RemovedBlock] = []
            tier.watch_removals(removed.extend)
            refs = chain(1, 2, 3)
            await self.write(tier, refs)
            salted = chain_refs(chain_seed(NAMESPACE, "salt"), refs[0].tokens, 16)
            await self.write(tier, salted)
            assert (await tier.clear(SEED)).num_blocks == 3
            assert {block.key for block in removed} == {ref.key for ref in refs}
            assert await tier.probe(refs) == []
            assert len(await tier.probe(salted)) == 1

        self.run(tmp_path, body)

    def test_forgetting_drops_what_only_one_sequence_needs(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            removed: list[RemovedBlock] = []
            tier.watch_removals(removed.extend)
            sequence = chain(1, 2, 3)
            first, second = chain(1, 2, 3, 4, 5), chain(1, 2, 3, 6)
            await self.write(tier, [*first, second[3]])
            keys = [ref.key for ref in sequence]

            async def forget(beginning: bytes, *spared: bytes) -> int:
                return await tier.forget(keys, keys[-1], beginning, set(spared))

            assert await forget(b"no such tokens") == 0  # something else continues it
            assert await forget(first[3].tokens, first[3].key) == 1
            assert len(await tier.probe(first)) == 4
            assert await forget(first[3].tokens) == 1  # another continues it still
            assert await tier.pin(keys[:2], None) == []
            assert await forget(second[3].tokens[:4]) == 2
            assert len(await tier.probe(sequence)) == 2
            assert await tier.unpin(keys[1])
            assert await forget(b"") == 2
            assert await tier.probe(sequence) == []
            assert [block.key for block in removed[:2]] == [first[4].key, first[3].key]
            assert await tier.forget([], SEED, b"", set()) == 0

        self.run(tmp_path, body)

    def test_a_pinned_sequence_survives_clearing_and_another_tier_releases_it(
        self, tmp_path: Path
    ) -> None:
        async def leave(tier: DiskTier) -> None:
            refs, other = chain(1, 2, 3), chain(1, 2, 4)
            await self.write(tier, refs[:2])
            assert await tier.pin([ref.key for ref in refs], None) == [refs[2].key]
            assert tier.stats().pinned_blocks == 0
            await self.write(tier, [refs[2], other[2]])
            assert await tier.pin([ref.key for ref in refs], None) == []
            assert tier.stats().pinned_blocks == 3
            assert await tier.clear(SEED) == Removal(1, 3)

        async def release(tier: DiskTier) -> None:
            refs = chain(1, 2, 3)
            assert await self.read(tier, refs) == [payload(ref) for ref in refs]
            assert not await tier.unpin(refs[1].key)
            assert await tier.unpin(refs[2].key)
            assert not await tier.unpin(refs[2].key)
            assert tier.stats().pinned_blocks == 0
            assert await tier.clear(SEED) == Removal(3, 0)

        self.run(tmp_path, leave)
        self.run(tmp_path, release)

    def test_a_hold_is_released_alone_and_a_pin_ends_with_its_last(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            refs = chain(1, 2)
            keys, last = [ref.key for ref in refs], refs[1].key
            await self.write(tier, refs)
            for hold in (b"hold one", b"hold two"):
                assert await tier.pin(keys, None, hold) == []
            assert await tier.release(last, b"hold two")
            assert not await tier.release(last, b"hold two")
            assert tier.stats().pinned_blocks == 2
            assert await tier.release(last, b"hold one")
            assert tier.stats().pinned_blocks == 0
            assert not await tier.unpin(last)

        self.run(tmp_path, body)

    def test_another_tier_on_the_same_medium_finds_what_one_left(self, tmp_path: Path) -> None:
        async def leave(tier: DiskTier) -> None:
            await self.write(tier, chain(1, 2))

        async def find(tier: DiskTier) -> None:
            assert await self.read(tier, chain(1, 2)) == [payload(ref) for ref in chain(1, 2)]

        self.run(tmp_path, leave)
        self.run(tmp_path, find)

    def test_touching_what_is_not_there_is_no_error(self, tmp_path: Path) -> None:
        async def body(tier: DiskTier) -> None:
            await tier.touch([ref.key for ref in chain(1, 2)])
            assert tier.stats().blocks == 0

        self.run(tmp_path, body)

    def run(self, path: Path, body: Callable[[DiskTier], Awaitable[None]]) -> None:
        async def scene() -> None:
            tier = self.make_tier(path)
            try:
                await body(tier)
            finally:
                await tier.aclose()

        asyncio.run(scene())

    @staticmethod
    async def write(tier: DiskTier, refs: Sequence[BlockRef]) -> list[PutOutcome]:
        return await tier.write([BlockWrite(ref, NAMESPACE, b"", payload(ref)) for ref in refs])

    @staticmethod
    async def read(tier: DiskTier, refs: Sequence[BlockRef]) -> list[bytes]:
        buffers = [bytearray(BLOCK_BYTES) for _ in refs]
        reads = [
            BlockRead(ref, memoryview(buffer)) for ref, buffer in zip(refs, buffers, strict=True)
        ]
        outcomes = await tier.read(reads)
        assert outcomes == [None] * len(refs)
        return [bytes(buffer) for buffer in buffers]
