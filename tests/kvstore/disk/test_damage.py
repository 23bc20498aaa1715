"""The guarantee: wrong bytes never; payload damage is never fatal; damage to tree pages ends the
process at most once, and is healed at the next start.

Each case runs in a forked child, for liblmdb may kill it. The soak counts are those of the marker.
"""

import functools
import random
import shutil
import struct
from pathlib import Path

import pytest
from disk_case import Blocks, data_file, in_fork, problems_on_disk

from kvstore.block import BlockRef, PutOutcome
from kvstore.disk import DiskStore
from kvstore.disk.offline.verify import verify
from kvstore.errors import BlockMissingError, CorruptBlockError, TierBrokenError

FINE, WRONG_BYTES, OFF = 0, 3, 4
PAGE = 4096


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[BlockRef]]]:
    """A cache with branch pages in its trees, and a freed part."""
    directory = tmp_path_factory.mktemp("pristine") / "cache"
    blocks = Blocks(payload_bytes=9_000)
    chains = [blocks.chain(8) for _ in range(24)]
    with DiskStore.open(directory, capacity_bytes=16 << 20) as store:
        for chain in chains:
            store.put_group(blocks.writes(chain))
        store.remove([ref.key for ref in chains[0]])
    return directory, chains[1:]


def use(directory: Path, chains: list[list[BlockRef]], life: int) -> int:
    """A life of the engine: read everything, put back what is missing, store something new."""
    blocks = Blocks(payload_bytes=9_000)
    with DiskStore.open(directory, capacity_bytes=16 << 20) as store:
        store.wait_ready()
        for chain in chains:
            for ref in chain[: len(store.probe(chain))]:
                try:
                    if blocks.read(store, ref) != blocks.payload(ref):
                        return WRONG_BYTES
                except (BlockMissingError, CorruptBlockError):
                    pass
        try:
            for chain in chains:
                store.put_group(blocks.writes(chain))
            store.put_group(blocks.writes(blocks.chain(8, start=life)))
            store.touch([ref.key for ref in reversed(chains[0])])
        except TierBrokenError:
            return OFF
        if store.stats().state != "ok":
            return OFF
        if life > 1:
            for chain in chains:
                assert len(store.probe(chain)) == len(chain)
                for ref in chain:
                    assert blocks.read(store, ref) == blocks.payload(ref)
    return FINE


def live_tree_pages(data: bytes) -> list[int]:
    """Branch and leaf pages reachable from the newer meta page, found without liblmdb."""
    metas = [struct.unpack_from("=QQQ", data, at + 16 + 24 + 96 - 8) for at in (0, PAGE)]
    newest = max((0, 1), key=lambda i: metas[i][2])
    start = newest * PAGE + 16 + 24
    roots = [struct.unpack_from("=Q", data, start + i * 48 + 40)[0] for i in (0, 1)]
    found: list[int] = []
    while roots:
        page = roots.pop()
        if page == 2**64 - 1:
            continue
        found.append(page)
        at = page * PAGE
        flags, lower = struct.unpack_from("=HH", data, at + 10)
        for slot in range(at + 16, at + lower, 2):
            if flags & 0x20:  # fixed-size keys: no nodes
                break
            node = at + struct.unpack_from("=H", data, slot)[0]
            low, high, node_flags, key_size = struct.unpack_from("=HHHH", data, node)
            if flags & 0x01:
                roots.append(low | high << 16 | node_flags << 32)
            elif node_flags & 0x02:  # a sub-database
                roots.append(struct.unpack_from("=Q", data, node + 8 + key_size + 40)[0])
    return found


def damage_and_live(
    pristine: tuple[Path, list[list[BlockRef]]],
    tmp_path: Path,
    offset: int,
    mask: int,
    num_lives: int,
) -> list[int]:
    """Flip bits of one byte in a copy; what each of some lives ends with."""
    source, chains = pristine
    directory = tmp_path / "cache"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(source, directory)
    with data_file(directory).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
    return [in_fork(functools.partial(use, directory, chains, n)) for n in range(1, num_lives + 1)]


def check_payload_flips(pristine, tmp_path: Path, count: int) -> None:
    data = data_file(pristine[0]).read_bytes()
    draw = random.Random(1)
    blocks = Blocks(payload_bytes=9_000)
    for _ in range(count):
        ref = draw.choice(draw.choice(pristine[1]))
        offset = data.index(blocks.payload(ref)) + draw.randrange(9_000)
        ends = damage_and_live(pristine, tmp_path, offset, 1 << draw.randrange(8), 2)
        assert ends == [FINE, FINE], offset
        assert problems_on_disk(tmp_path / "cache") == []
        assert not list((tmp_path / "cache").glob("*.damaged-*"))


def check_tree_flips(pristine, tmp_path: Path, count: int) -> None:
    """One life may end by the damage, or with the tier off. The next one is fine."""
    pages = live_tree_pages(data_file(pristine[0]).read_bytes())
    assert len(pages) > 30
    draw = random.Random(2)
    for _ in range(count):
        offset, mask = draw.choice(pages) * PAGE + draw.randrange(PAGE), 1 << draw.randrange(8)
        ends = damage_and_live(pristine, tmp_path, offset, mask, 3)
        assert all(end in (FINE, OFF) or end < 0 for end in ends), (offset, mask, ends)
        assert ends.count(FINE) >= 2, (offset, mask, ends)
        if ends[-1] == FINE:
            # A flip inside a key leaves a sound tree that says something else, one in a list of
            # free pages may lie there unread: verify sees both.
            verify(tmp_path / "cache", fix=True)
            assert verify(tmp_path / "cache")["ok"], (offset, mask)
            if data_file(tmp_path / "cache").exists():
                assert problems_on_disk(tmp_path / "cache") == []


def check_truncations(pristine, tmp_path: Path, count: int) -> None:
    source, chains = pristine
    size = data_file(source).stat().st_size
    draw = random.Random(3)
    directory = tmp_path / "cache"
    sizes = [0, 1, PAGE, 2 * PAGE, size - 1, *(draw.randrange(size) for _ in range(count - 5))]
    life = functools.partial(use, directory, chains, 2)
    for cut in sizes:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(source, directory)
        with data_file(directory).open("r+b") as file:
            file.truncate(cut)
        assert in_fork(life) == FINE, cut
        if cut < size // 2:  # the last pages may be free ones, which nobody misses
            assert len(list(directory.glob("*.damaged-*"))) == (cut > 0), cut
        assert problems_on_disk(directory) == []


def test_flipped_payload_bits_are_never_served_and_never_fatal(pristine, tmp_path: Path) -> None:
    check_payload_flips(pristine, tmp_path, 70)


def test_flipped_tree_bits_end_a_process_at_most_once(pristine, tmp_path: Path) -> None:
    check_tree_flips(pristine, tmp_path, 30)


def test_truncated_file_is_set_aside_and_never_fatal(pristine, tmp_path: Path) -> None:
    check_truncations(pristine, tmp_path, 10)


@pytest.mark.soak
def test_soak_flipped_payload_bits(pristine, tmp_path: Path) -> None:
    check_payload_flips(pristine, tmp_path, 700)


@pytest.mark.soak
def test_soak_flipped_tree_bits(pristine, tmp_path: Path) -> None:
    check_tree_flips(pristine, tmp_path, 300)


@pytest.mark.soak
def test_soak_truncations(pristine, tmp_path: Path) -> None:
    check_truncations(pristine, tmp_path, 50)


def test_page_walker_of_these_tests_finds_what_liblmdb_counts(pristine) -> None:
    import lmdb

    env = lmdb.open(str(pristine[0]), readonly=True, max_dbs=6)
    total = env.stat()["branch_pages"] + env.stat()["leaf_pages"]
    with env.begin() as txn:
        for name in (b"index", b"payload", b"children", b"recency", b"namespaces", b"meta"):
            stat = txn.stat(env.open_db(name, txn, create=False))
            total += stat["branch_pages"] + stat["leaf_pages"]
    env.close()
    found = live_tree_pages(data_file(pristine[0]).read_bytes())
    assert len(set(found)) == len(found)
    assert total <= len(found) <= total + 3  # and those of the tree of free pages


def test_bad_block_next_to_good_ones_costs_only_itself(pristine, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    shutil.copytree(pristine[0], directory)
    blocks = Blocks(payload_bytes=9_000)
    chain = pristine[1][3]
    data = data_file(directory).read_bytes()
    with data_file(directory).open("r+b") as file:
        file.seek(data.index(blocks.payload(chain[2])) + 77)
        file.write(b"\0\0\0\0")
    with DiskStore.open(directory) as store:
        with pytest.raises(CorruptBlockError):
            blocks.read(store, chain[2])
        outcomes = store.put_group(blocks.writes(chain))
        assert outcomes == [PutOutcome.STORED if i == 2 else PutOutcome.PRESENT for i in range(8)]
