"""Codecs give back exactly what they were given, and refuse what they did not write."""

import sys
from pathlib import Path

import numpy as np
import pytest
from disk_case import IDENTITY, NAMESPACE, Blocks, damage_payload, problems_on_disk, small
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import BlockRef, BlockWrite
from kvstore.disk import DiskStore, codec
from kvstore.disk.codec import RAW, get_codec
from kvstore.errors import ConfigError, CorruptBlockError

pytest.importorskip("zstandard", reason="the extra 'codecs' is not installed")


def planes() -> codec.Codec:
    found = get_codec("planes-zstd")
    assert found is not None
    return found


class SmoothBlocks(Blocks):
    """Payloads like real keys and values: bfloat16 numbers of similar size."""

    def payload(self, ref: BlockRef) -> bytes:
        draw = np.random.default_rng(int.from_bytes(ref.key[:8], "little"))
        floats = draw.normal(size=self.payload_bytes // 2).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@given(data=st.binary(max_size=500), itemsize=st.sampled_from([1, 2, 4]))
def test_any_bytes_come_back_exactly(data: bytes, itemsize: int) -> None:
    stored = planes().encode(memoryview(data), itemsize)
    back = bytearray(len(data))
    planes().decode_into(memoryview(stored), memoryview(back))
    assert bytes(back) == data


@given(garbage=st.binary(max_size=200), size=st.integers(0, 300))
def test_garbage_is_a_value_error(garbage: bytes, size: int) -> None:
    with pytest.raises(ValueError):
        planes().decode_into(memoryview(garbage), memoryview(bytearray(size)))


def test_frame_that_claims_another_size_is_refused_before_it_is_decoded() -> None:
    stored = planes().encode(memoryview(bytes(1 << 20)), 2)
    with pytest.raises(ValueError, match="another size"):
        planes().decode_into(memoryview(stored), memoryview(bytearray(1000)))


def test_smooth_floats_shrink() -> None:
    blocks = SmoothBlocks()
    payload = blocks.payload(blocks.chain(1)[0])
    assert len(planes().encode(memoryview(payload), 2)) < 0.85 * len(payload)


def test_coded_and_raw_blocks_mix_in_one_cache(directory: Path) -> None:
    smooth, noise = SmoothBlocks(), Blocks()
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=small()) as store:
        raw_refs = smooth.chain(2, start=1)
        store.put_group(smooth.writes(raw_refs))
    with DiskStore.open(directory, config=small(codec="planes-zstd")) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        refs, noisy = smooth.chain(4, start=1), noise.chain(1, start=2)
        store.put_group(smooth.writes(refs))
        store.put_group(noise.writes(noisy))
        assert [entry.codec for entry in store.probe(refs)] == [RAW, RAW] + ["planes-zstd"] * 2
        assert [entry.nbytes < entry.payload_bytes for entry in store.probe(refs)][2:] == [True] * 2
        assert store.probe(noisy)[0].codec == RAW  # it would not have shrunk
    with DiskStore.open(directory) as store:  # reading needs no setting
        assert all(smooth.read(store, ref) == smooth.payload(ref) for ref in refs)
    assert problems_on_disk(directory) == []


def test_flipped_bit_in_a_coded_block_is_found_before_it_is_decoded(directory: Path) -> None:
    blocks = SmoothBlocks()
    (ref,) = blocks.chain(1)
    with DiskStore.open(
        directory, capacity_bytes=8 << 20, config=small(codec="planes-zstd")
    ) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes([ref]))
    damage_payload(directory, planes().encode(memoryview(blocks.payload(ref)), 2))
    with DiskStore.open(directory) as store:
        with pytest.raises(CorruptBlockError) as caught:
            blocks.read(store, ref)
        assert caught.value.reason == "payload"


def test_block_of_a_codec_that_is_not_installed_is_a_miss(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = SmoothBlocks()
    (ref,) = blocks.chain(1)
    with DiskStore.open(
        directory, capacity_bytes=8 << 20, config=small(codec="planes-zstd")
    ) as store:
        store.register_namespace(NAMESPACE, IDENTITY)
        store.put_group(blocks.writes([ref]))
    get_codec.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with DiskStore.open(directory) as store, pytest.raises(CorruptBlockError) as caught:
        blocks.read(store, ref)
    assert caught.value.reason == "codec"
    get_codec.cache_clear()


def test_unknown_codec_names_those_there_are(directory: Path) -> None:
    with pytest.raises(ConfigError, match="planes-zstd, raw"):
        DiskStore.open(directory, config=small(codec="zip"))
    assert not directory.exists()


def test_registered_codec_is_used(directory: Path) -> None:
    class Reverse:
        name = "reverse"

        def encode(self, payload: memoryview, itemsize: int) -> bytes:
            return bytes(payload[::-1])[: len(payload) // 2]

        def decode_into(self, stored: memoryview, dst: memoryview) -> None:
            dst[:] = bytes(len(dst))

    codec.register("reverse", Reverse)
    blocks = Blocks()
    (ref,) = blocks.chain(1)
    with DiskStore.open(directory, capacity_bytes=8 << 20, config=small(codec="reverse")) as store:
        store.put_group([BlockWrite(ref, NAMESPACE, b"", blocks.payload(ref))])
        assert store.probe([ref])[0].codec == "reverse"
        assert blocks.read(store, ref) == bytes(20_000)
