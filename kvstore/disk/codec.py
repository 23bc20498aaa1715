"""Codecs: how a block's bytes are kept on disk. Recorded per block, so they mix freely.

``raw``         as they are
``planes-zstd`` the bytes of every element are regrouped by significance (all low bytes, then all
                high bytes), then compressed by zstd: exponents of neighbouring values are alike,
                mantissas are noise, and apart from each other the former compress. Exact.

A codec sees opaque bytes and the size of an element. ``register`` adds others, lossy ones too; a
lossy codec's name belongs into the namespace identity, or its blocks would be taken for exact ones.
"""

import functools
import importlib
from typing import Any, Protocol

import numpy as np

from kvstore.errors import ConfigError

RAW = "raw"


class Codec(Protocol):
    """Stateless and thread-safe."""

    name: str

    def encode(self, payload: memoryview, itemsize: int) -> Any:
        """Bytes-like; the caller owns it. ``itemsize`` is 1, 2 or 4 bytes an element."""

    def decode_into(self, stored: memoryview, dst: memoryview) -> None:
        """Fill ``dst``, exactly. Raises ``ValueError`` when the bytes do not decode to its size."""


class PlanesZstd:
    """One byte for the element size, then a zstd frame of the planes in order of significance."""

    name = "planes-zstd"

    def __init__(self, level: int = 1) -> None:
        try:
            self._zstd: Any = importlib.import_module("zstandard")
        except ImportError:
            raise ConfigError(
                "codec 'planes-zstd' needs zstandard: pip install zstandard"
            ) from None
        self._level = level

    def encode(self, payload: memoryview, itemsize: int) -> bytes:
        planes: Any = np.frombuffer(payload, np.uint8)
        if itemsize > 1 and planes.size % itemsize == 0:
            planes = np.ascontiguousarray(planes.reshape(-1, itemsize).T)
        else:
            itemsize = 1
        # A compressor per call: they are not thread-safe, and building one costs microseconds.
        frame: bytes = self._zstd.ZstdCompressor(level=self._level).compress(planes.data)
        return bytes([itemsize]) + frame

    def decode_into(self, stored: memoryview, dst: memoryview) -> None:
        target = np.frombuffer(dst, np.uint8)
        if len(stored) < 2:
            raise ValueError("planes-zstd: too short")
        itemsize, frame = stored[0], stored[1:]
        if itemsize not in (1, 2, 4, 8) or target.size % itemsize:
            raise ValueError(f"planes-zstd: element size {itemsize}")
        # The frame's own claim is checked before anything of that size is allocated.
        try:
            if self._zstd.frame_content_size(frame) != target.size:
                raise ValueError("planes-zstd: the frame has another size than the block")
            plain = self._zstd.ZstdDecompressor().decompress(frame)
        except self._zstd.ZstdError as error:
            raise ValueError(f"planes-zstd: {error}") from error
        planes = np.frombuffer(plain, np.uint8).reshape(itemsize, -1)
        np.copyto(target.reshape(-1, itemsize), planes.T)


_FACTORIES: dict[str, Any] = {PlanesZstd.name: PlanesZstd}


def register(name: str, factory: Any) -> None:
    """Make ``factory()`` the codec of this name, in this process."""
    _FACTORIES[name] = factory
    get_codec.cache_clear()


@functools.cache
def get_codec(name: str) -> Codec | None:
    """The codec of this name; None for ``raw``. Raises ``ConfigError`` for an unknown one."""
    if name == RAW:
        return None
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(sorted((RAW, *_FACTORIES)))
        raise ConfigError(f"codec: expected one of {known}, got {name!r}")
    codec: Codec = factory()
    return codec
