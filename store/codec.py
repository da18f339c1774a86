"""Codecs: how a segment's bytes are stored, as they are or compressed.

The contract is that of numcodecs: a class attribute `id`, `encode`, `decode`, `config` and `from_config`. A codec is
told what it encodes (`Slab`), so that a lossy one can treat keys and values differently. Decoding needs only the
payload and the codec's config; anything that is not a payload raises `DamagedError`. Your own package can add a codec
under the entry-point group `ragkv.codecs`; it cannot replace a codec of ragkv.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import zstandard
from numpy.typing import NDArray

from ragkv.attention.shape import ITEM_SIZES, DType
from ragkv.boundary.plugin import PluginRegistry
from ragkv.errors import ConfigError
from ragkv.store.seal import Buffer, DamagedError

__all__ = ["Codec", "Raw", "Slab", "Zstd", "codec_from_config", "codec_names"]

Bytes = NDArray[np.uint8]


class Slab(NamedTuple):
    """A piece of one layer's keys or values, `(heads, tokens, dim)` in row-major order.

    Keys and values are bfloat16, float16 or float32. A piece of a state, which has any dtype, is one row of numbers,
    `(1, 1, dim)`; it is encoded by `Codec.lossless()` alone.
    """

    role: Literal["keys", "values", "states"]
    dtype: DType
    heads: int
    tokens: int
    dim: int

    @property
    def item_size(self) -> int:
        """Bytes per number."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.heads * self.tokens * self.dim * self.item_size


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """The base of all codecs: a frozen dataclass whose fields are its config."""

    id: ClassVar[str]

    @abstractmethod
    def encode(self, buf: Buffer, slabs: Sequence[Slab]) -> Buffer:
        """The payload for `buf`, which holds one or more `slabs` of one dtype, one after another."""

    @abstractmethod
    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        """The bytes that were encoded, in `out` when it is given.

        `DamagedError` when `buf` is no payload, or does not fill `out`.
        """

    def lossless(self) -> Codec:
        """The codec for what a record holds besides keys and values: states, every bit of which counts.

        Raw bytes, unless a codec knows better; it depends on `config` alone, because decoding asks again.
        """
        return Raw()

    def config(self) -> dict[str, Any]:
        """What `codec_from_config` makes the codec from; every record holds it."""
        return {"id": self.id, **asdict(self)}

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        """The codec for `config()` without its `id`; `ConfigError` for an option that the codec does not have."""
        try:
            return cls(**options)
        except TypeError as error:
            raise ConfigError(f"codec {cls.id!r} does not take the options {sorted(options)}") from error


@dataclass(frozen=True, slots=True)
class Raw(Codec):
    """The bytes themselves, so that reading is one memcpy from the map. The default: disk is cheaper than time."""

    id: ClassVar[str] = "raw"

    def encode(self, buf: Buffer, slabs: Sequence[Slab]) -> Buffer:
        return buf

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        payload = np.frombuffer(buf, np.uint8)
        if out is None:
            return payload
        out = output(payload.size, out)
        out[:] = payload
        return out


@dataclass(frozen=True, slots=True)
class Zstd(Codec):
    """Lossless: the numbers' bytes are split into planes, and zstd compresses each plane.

    Exponents compress well and mantissas hardly at all, and they are in different planes. Level 1 is not only the
    fastest but also gives the smallest payload on KV (docs/formats.md): higher levels look for matches, find accidental
    ones, and do worse than plain entropy coding. Payload: uint8 item size, uint32 length of each frame, the frames.
    There is one frame per plane, lowest byte first, because planes in one block would share one entropy code.
    """

    id: ClassVar[str] = "zstd"
    level: int = 1

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 19:
            raise ConfigError(f"zstd level {self.level} is not between 1 and 19")

    def lossless(self) -> Codec:
        return self

    def encode(self, buf: Buffer, slabs: Sequence[Slab]) -> Buffer:
        item_size = slabs[0].item_size
        items = np.frombuffer(buf, f"<u{item_size}")
        plane = np.empty(items.size, np.uint8)
        compressor = zstandard.ZstdCompressor(level=self.level)
        frames = []
        for shift in range(0, 8 * item_size, 8):
            np.right_shift(items, shift, out=plane, casting="unsafe")
            frames.append(compressor.compress(plane.data))
        return b"".join([struct.pack(f"<B{item_size}I", item_size, *map(len, frames)), *frames])

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        payload = memoryview(buf)
        try:
            item_size = payload[0]
            frames, start = [], 1 + 4 * item_size
            for length in struct.unpack_from(f"<{item_size}I", payload, 1):
                frames.append(payload[start : start + length])
                start += length
            sizes = {zstandard.get_frame_parameters(frame).content_size for frame in frames}
            if item_size not in (1, 2, 4, 8) or start != len(payload) or len(sizes) != 1:
                raise DamagedError(f"{len(payload)} bytes are not a zstd payload")
            out = output(item_size * sizes.pop(), out)  # a frame that does not say its size says 2^64 - 1
            decompressor = zstandard.ZstdDecompressor()
            planes = [decompressor.decompress(frame, allow_extra_data=False) for frame in frames]
        except (IndexError, struct.error, zstandard.ZstdError, MemoryError) as error:
            raise DamagedError(f"zstd cannot decode it ({error})") from error
        items = out.view(f"<u{item_size}")
        items[:] = np.frombuffer(planes.pop(), np.uint8)
        while planes:
            items <<= 8
            items |= np.frombuffer(planes.pop(), np.uint8)
        return out


def output(length: int, out: Bytes | None) -> Bytes:
    """Where a payload of `length` decoded bytes goes; `DamagedError` when that is not `out`, or more than there is."""
    if out is None:
        try:
            return np.empty(length, np.uint8)
        except (MemoryError, OverflowError, ValueError) as error:
            raise DamagedError(f"the payload claims to hold {length} bytes") from error
    if length != out.size:
        raise DamagedError(f"the payload holds {length} bytes, not {out.size}")
    return out


CODECS = PluginRegistry(
    "ragkv.codecs",
    built_in={
        "int4": "ragkv.store.quantiser:Int4",
        "int8": "ragkv.store.quantiser:Int8",
        "raw": "ragkv.store.codec:Raw",
        "zstd": "ragkv.store.codec:Zstd",
    },
)


def codec_names() -> list[str]:
    """The names of all codecs, sorted."""
    return CODECS.names()


def codec_from_config(config: Mapping[str, Any]) -> Codec:
    """The codec for `config`, which holds its `id` and options; `ConfigError` names the known codecs."""
    options = dict(config)
    name = options.pop("id", None)
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}: choose one of {', '.join(codec_names())}")
    try:
        codec: type[Codec] = CODECS.load(name)
    except ImportError as error:
        raise ConfigError(f"codec {name!r} is installed but cannot be loaded ({error}); reinstall it") from error
    return codec.from_config(options)
