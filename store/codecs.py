"""Codecs, which turn a segment's slices into stored bytes and back, and the checksum on every stored value.

LMDB has no checksums, so a flipped bit would otherwise go unnoticed. The contract of codecs is that of numcodecs: a
class attribute `id`, `encode`, `decode`, `config` and `from_config`. `encode` gets a `KVSlice` for each slice, so that
a lossy codec can treat keys and values differently. Decoding needs only the payload and the config, and raises
`DamagedError` for any other bytes. A package can add codecs under the entry-point group `ragkv.codecs` but cannot
replace a built-in one.

`half` rounds float32 to float16, scaled by a power of two where needed. `q8` rounds the numbers of a head and token to
int8 with one scale; attention reads both in their stored form (`Codec.packing`). `int8` and `int4` round each number to
a multiple of its slice's step, and zstd's entropy coder packs the integers. KIVI has a scale per group and a fixed
number of bits. But attention scores depend on the absolute error of a key channel: with one step, narrow channels take
few bits and outlier channels many, no scales are stored, and no number is off by more than half a step. As in KIVI,
keys get more bits than values.
"""

from __future__ import annotations

import math
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ragkv.errors import ConfigError
from ragkv.types import ITEM_SIZES, MOST, SCALE_BYTES, DType, KVShape
from ragkv.util.plugins import PluginRegistry

Buffer = bytes | memoryview
"""Contiguous bytes, owned or a view of the map. (`collections.abc.Buffer` comes with Python 3.12.)"""

_BYTES = 8


class DamagedError(ValueError):
    """A stored value differs from what was written. Internal: callers see a miss or a `CorruptStoreError`."""


def add_checksum(*parts: Buffer) -> bytes:
    """The parts joined, followed by their xxh3_64 (8 bytes, big-endian)."""
    body = b"".join(parts)
    return body + xxhash.xxh3_64_digest(body)


def verify_checksum(value: Buffer) -> memoryview:
    """A view of the value without its checksum; `DamagedError` if that does not match."""
    view = memoryview(value)
    body = view[:-_BYTES]
    if len(view) < _BYTES or xxhash.xxh3_64_digest(body) != view[-_BYTES:]:
        raise DamagedError("its checksum does not match")
    return body


Bytes = NDArray[np.uint8]


class Packing(NamedTuple):
    """The form in which a codec's numbers may stay in memory: every run of `numbers` numbers, of `item` bytes each, is
    stored as `numbers + extra` numbers of a smaller `dtype`.
    """

    dtype: DType
    item: int
    numbers: int = 1
    extra: int = 0

    def bytes_for(self, raw: int) -> int:
        """The packed size of `raw` bytes that are whole rows."""
        return raw // (self.item * self.numbers) * (self.numbers + self.extra) * ITEM_SIZES[self.dtype]


class KVSlice(NamedTuple):
    """A slice of one layer's keys or values, `(heads, tokens, dim)` in row-major order.

    Keys and values are bfloat16, float16 or float32. A slice of a state, of any dtype, is one row `(1, 1, dim)` and is
    only encoded by `Codec.lossless()`.
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


def _pieces(buf: Buffer, slices: Sequence[KVSlice]) -> Iterator[tuple[KVSlice, Bytes]]:
    """Each slice with its bytes."""
    data, start = np.frombuffer(buf, np.uint8), 0
    for kv_slice in slices:
        yield kv_slice, data[start : start + kv_slice.nbytes]
        start += kv_slice.nbytes


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """The base of all codecs: a frozen dataclass whose fields are its config."""

    id: ClassVar[str]
    early: ClassVar[bool] = False
    """Whether it rounds so fast that new KV is rounded before the question that encoded it reads it (`round_trip`), so
    that every question reads the same numbers. Rounding must be idempotent."""

    def suited(self, dtype: DType) -> Codec:
        """The codec for a record of keys and values of this type, which the record names; bytes (uint8) stay exact."""
        return self.lossless() if dtype == "uint8" else self

    def most_bytes(self, shape: KVShape, tokens: int) -> int:
        """An upper estimate of the bytes of a record of this many tokens, for a budget."""
        return shape.nbytes(tokens)

    def packing(self, shape: KVShape) -> Packing | None:
        """The form in which a record of this shape may stay in memory without decoding; None: it must be decoded."""
        return None

    def parts(self, buf: Buffer) -> list[Bytes] | None:
        """Views of the payload that, concatenated, have the form of `packing`; None if some of it has another form.

        Raises DamagedError as `decode` does.
        """
        return None

    @abstractmethod
    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
        """The payload for `buf`, which holds one or more `slices` of one dtype, one after another."""

    @abstractmethod
    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        """The original bytes, written to `out` if given.

        `DamagedError` if `buf` is not a payload, or does not fill `out`.
        """

    def lossless(self) -> Codec:
        """The codec for a record's states, which must stay exact; by default raw bytes.

        It must depend on `config` only, because decoding calls it again.
        """
        return Raw()

    def config(self) -> dict[str, Any]:
        """The argument for `codec_from_config`, stored in every record."""
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
    """The unchanged bytes, so that reading is one memcpy from the map."""

    id: ClassVar[str] = "raw"

    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
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

    Exponents compress well and mantissas hardly at all, so they go to different planes. Level 1 is the fastest and
    gives the smallest payload on KV (docs/formats.md): higher levels find accidental matches and do worse than plain
    entropy coding. Payload: uint8 item size, uint32 length of each frame, the frames. Each plane has its own frame,
    lowest byte first, because planes in one block would share an entropy code.
    """

    id: ClassVar[str] = "zstd"
    level: int = 1

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 19:
            raise ConfigError(f"zstd level {self.level} is not between 1 and 19")

    def lossless(self) -> Codec:
        return self

    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
        item_size = slices[0].item_size
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
            out = output(item_size * sizes.pop(), out)  # a frame without a stated size has 2^64 - 1
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


_HALF = struct.Struct("<BbHI")
_HALF_LARGEST = 65_504.0
_LEAST_EXPONENT, _GREATEST_EXPONENT = -100, 100


@dataclass(frozen=True, slots=True)
class Half(Codec):
    """float32 as float16, so half the bytes; 16-bit numbers as raw bytes. The default.

    A number is off by at most 2^-11 of itself, or 2^-20 of the largest number of its slice, whichever is larger. A
    slice whose largest number lies outside [2^-5, 65504] is scaled by a power of two; one with NaN, infinities or
    numbers beyond that range is stored unchanged. Payload: for each slice `_HALF` (1 for float16, 0 for unchanged; the
    exponent of the scale; 0; the decoded bytes) and its numbers.
    """

    id: ClassVar[str] = "half"
    early: ClassVar[bool] = True

    def suited(self, dtype: DType) -> Codec:
        return self if dtype == "float32" else Raw()

    def most_bytes(self, shape: KVShape, tokens: int) -> int:
        whole = shape.nbytes(tokens)
        if shape.dtype != "float32":
            return whole
        return (
            shape.state_bytes + (whole - shape.state_bytes) // 2 + 2 * _HALF.size * len(shape.layers) + whole // 65536
        )

    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
        import torch

        parts: list[Buffer] = []
        for kv_slice, piece in _pieces(buf, slices):
            exponent = _exponent(piece.view(np.float32)) if kv_slice.dtype == "float32" else None
            if exponent is None:
                parts += [_HALF.pack(0, 0, 0, piece.size), piece.tobytes()]
                continue
            numbers = torch.from_numpy(span_of(piece)).view(torch.float32)
            numbers = numbers * 2.0**-exponent if exponent else numbers
            parts += [_HALF.pack(1, exponent, 0, piece.size), numbers.half().view(torch.uint8).numpy().data]
        return b"".join(parts)

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        runs = self._runs(np.frombuffer(buf, np.uint8))
        out = output(runs[-1][-1] if runs else 0, out)
        torch = sys.modules.get("torch")  # seven times as fast as numpy, but `ragkv verify` does not load it
        for kind, exponent, stored, begin, end in runs:
            if not kind:
                out[begin:end] = stored
            elif torch is not None:
                numbers = torch.from_numpy(out[begin:end]).view(torch.float32)
                numbers.copy_(torch.from_numpy(span_of(stored)).view(torch.float16))
                if exponent:
                    numbers.mul_(2.0**exponent)
            else:
                np.multiply(stored.view(np.float16), np.float32(2.0**exponent), out=out[begin:end].view(np.float32))
        return out

    def packing(self, shape: KVShape) -> Packing | None:
        return Packing("float16", 4) if shape.dtype == "float32" and not shape.states else None

    def parts(self, buf: Buffer) -> list[Bytes] | None:
        runs = self._runs(np.frombuffer(buf, np.uint8))
        plain = all(kind == 1 and not exponent for kind, exponent, *_ in runs)
        return [stored for _, _, stored, _, _ in runs] if plain else None

    def _runs(self, payload: Bytes) -> list[tuple[int, int, Bytes, int, int]]:
        """The kind, exponent and stored bytes of each slice of a payload, and where its numbers begin and end."""
        runs, start, total = [], 0, 0
        while start < payload.size:
            if payload.size - start < _HALF.size:
                raise DamagedError(f"{payload.size} bytes are not a half payload")
            kind, exponent, zero, nbytes = _HALF.unpack_from(payload.data, start)
            start += _HALF.size
            stored = payload[start : start + (nbytes // 2 if kind else nbytes)]
            start += stored.size
            scaled = kind == 1 and nbytes % 4 == 0 and _LEAST_EXPONENT <= exponent <= _GREATEST_EXPONENT
            if zero or stored.size != (nbytes // 2 if kind else nbytes) or not (scaled or kind == exponent == 0):
                raise DamagedError(f"{payload.size} bytes are not a half payload")
            runs.append((kind, exponent, stored, total, total + nbytes))
            total += nbytes
        return runs


def _exponent(numbers: Floats) -> int | None:
    """The exponent of the scale by which float16 holds these numbers; None if there is none.

    It is that of the largest number after rounding, so that rounding again uses the same scale.
    """
    largest = max(-float(numbers.min()), float(numbers.max())) if numbers.size else 0.0
    if not largest < math.inf:  # also true for NaN
        return None
    power = math.frexp(largest * (1 + 2**-11))[1]
    if not largest or (power >= -4 and largest <= _HALF_LARGEST):
        return 0
    return power - 15 if _LEAST_EXPONENT <= power - 15 <= _GREATEST_EXPONENT else None


_ROWS = struct.Struct("<BBHI")
_NOTHING = 2.0**-100


@dataclass(frozen=True, slots=True)
class Q8(Codec):
    """The numbers of a head and token as int8, where 127 stands for the largest of them; llama.cpp's Q8_0 does the same
    for every 32 numbers.

    A number is off by at most 0.004 of the largest or 2^-100, and then rounded to its type. A slice with NaN,
    infinities or numbers beyond 2^96 (float16: 32,752) is stored unchanged. Payload: for each slice `_ROWS` (1 for
    rows, 0 for unchanged; the dtype; the numbers of a row, 0 for unchanged; the rows, or bytes) and its rows, each of
    its int8 numbers and the largest in bfloat16, or its bytes. Rounding again changes nothing: the largest stays the
    same.
    """

    id: ClassVar[str] = "q8"
    early: ClassVar[bool] = True

    def most_bytes(self, shape: KVShape, tokens: int) -> int:
        rows = sum(heads * sum(dim + SCALE_BYTES for dim in dims if dim) for heads, *dims in shape.layers)
        return shape.state_bytes + rows * tokens + (2 + shape.nbytes(tokens) // 65536) * _ROWS.size * len(shape.layers)

    def packing(self, shape: KVShape) -> Packing | None:
        widths = {dim for _, *dims in shape.layers for dim in dims}
        if len(widths) != 1 or 0 in widths or shape.states:
            return None
        [width] = widths
        return Packing("int8", ITEM_SIZES[shape.dtype], width, SCALE_BYTES)

    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
        import torch

        from ragkv.attention.kv import torch_dtype

        parts: list[Buffer] = []
        for kv_slice, piece in _pieces(buf, slices):
            numbers = torch.from_numpy(span_of(piece)).view(torch_dtype(kv_slice.dtype)).view(-1, kv_slice.dim).float()
            largest = numbers.abs().amax(1, keepdim=True).bfloat16()  # NaN if any number is
            if not bool((largest <= _BEYOND[kv_slice.dtype]).all()) or kv_slice.dim >= 1 << 16:
                parts += [_ROWS.pack(0, _CODES[kv_slice.dtype], 0, piece.size), piece.tobytes()]
                continue
            largest.masked_fill_(largest < _NOTHING, 0.0)
            rows = torch.empty((len(numbers), kv_slice.dim + SCALE_BYTES), dtype=torch.int8)
            steps = torch.where(largest > 0, largest.float() / MOST, torch.inf)
            rows[:, : kv_slice.dim] = (numbers / steps).round_()
            rows[:, kv_slice.dim :] = largest.view(torch.int8)
            parts += [_ROWS.pack(1, _CODES[kv_slice.dtype], kv_slice.dim, len(rows)), rows.numpy().tobytes()]
        return b"".join(parts)

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        import torch

        from ragkv.attention.kv import torch_dtype, unpacked

        runs = self._runs(np.frombuffer(buf, np.uint8))
        out, start = output(sum(nbytes for *_, nbytes in runs), out), 0
        for dtype, width, stored, nbytes in runs:
            target = out[start : start + nbytes]
            start += nbytes
            if width:
                rows = torch.from_numpy(span_of(stored)).view(torch.int8).view(-1, width + SCALE_BYTES)
                kind = torch_dtype(dtype)
                torch.from_numpy(target).view(kind).view(-1, width).copy_(unpacked(rows, kind))
            else:
                target[:] = stored
        return out

    def parts(self, buf: Buffer) -> list[Bytes] | None:
        runs = self._runs(np.frombuffer(buf, np.uint8))
        return [stored for *_, stored, _ in runs] if all(width for _, width, *_ in runs) else None

    def _runs(self, payload: Bytes) -> list[tuple[DType, int, Bytes, int]]:
        """The dtype, row width (0: unchanged) and stored bytes of each slice, and its decoded size in bytes."""
        runs: list[tuple[DType, int, Bytes, int]] = []
        start = 0
        while start < payload.size:
            if payload.size - start < _ROWS.size:
                raise DamagedError(f"{payload.size} bytes are not a q8 payload")
            kind, code, width, count = _ROWS.unpack_from(payload.data, start)
            start += _ROWS.size
            size = count * (width + SCALE_BYTES) if kind else count
            stored = payload[start : start + size]
            start += size
            if kind != (width > 0) or code not in _DTYPES or start > payload.size:
                raise DamagedError(f"{payload.size} bytes are not a q8 payload")
            runs.append((_DTYPES[code], width, stored, count * width * ITEM_SIZES[_DTYPES[code]] if kind else count))
        return runs


class _MemorySpan:
    """Bytes that claim to be writable, because torch warns about arrays that are not; `owner` keeps them alive."""

    def __init__(self, owner: Bytes) -> None:
        self._owner = owner
        self.__array_interface__ = {**owner.__array_interface__, "data": (owner.__array_interface__["data"][0], False)}


def span_of(stored: Bytes) -> Bytes:
    """The bytes for `torch.from_numpy`; they must not be written to."""
    return np.asarray(_MemorySpan(stored))


def output(length: int, out: Bytes | None) -> Bytes:
    """The buffer for `length` decoded bytes; `DamagedError` if `out` has another length or memory is too short."""
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
        "half": "ragkv.store.codecs:Half",
        "int4": "ragkv.store.codecs:Int4",
        "int8": "ragkv.store.codecs:Int8",
        "q8": "ragkv.store.codecs:Q8",
        "raw": "ragkv.store.codecs:Raw",
        "zstd": "ragkv.store.codecs:Zstd",
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


_HEAD = struct.Struct("<BxxxfII")
_DTYPES: Mapping[int, DType] = {1: "bfloat16", 2: "float16", 3: "float32"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_STEP_BITS = 16
"""Low bits of a step that are zero: with 8 significant bits, multiples below 2^16 are exact in float32."""
_LARGEST_MULTIPLE = 16_000
_BIAS = 128
"""Added to the multiples, so that small ones of either sign have the high byte 0, which compresses to nothing."""
_LEAST_STEP, _GREATEST_STEP = 2.0**-126, 2.0**126
_BEYOND: Mapping[DType, float] = {"bfloat16": 2.0**96, "float16": 65_504 / 2, "float32": 2.0**96}
"""Slices with larger numbers are stored unchanged."""
_SHORT_BYTES = 96
"""Bytes that a slice may take beyond one bit per number less than allowed, so that headers and code tables do not cost
short chunks too much precision."""
_NEAR = 0.06
"""The search ends when a sample takes at most this many bits per number less than allowed."""
_SAMPLE = 1 << 14

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Quantiser(Codec):
    """`key_bits` and `value_bits` are about the average bits per number, including all overhead.

    A slice is stored unchanged if it has NaN, infinities or numbers beyond 2^96 (float16: 32,752), or if it would not
    become smaller. Payload: for each slice `_HEAD` (the dtype; the step, 0 for unchanged; the decoded bytes; the stored
    bytes), and its multiples plus `_BIAS` as int16 in the form of `Zstd`, or its bytes.
    """

    key_bits: float
    value_bits: float

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if not isinstance(bits, (int, float)) or not 1 <= bits <= 12:
                raise ConfigError(f"{self.id}: {name} = {bits!r} is not between 1 and 12")

    def lossless(self) -> Codec:
        return Zstd()

    def encode(self, buf: Buffer, slices: Sequence[KVSlice]) -> Buffer:
        parts: list[Buffer] = []
        for kv_slice, piece in _pieces(buf, slices):
            numbers = _floats(piece, kv_slice.dtype)
            largest = max(-float(numbers.min()), float(numbers.max())) if numbers.size else math.inf
            step, body = 0.0, piece.tobytes()
            if largest <= _BEYOND[kv_slice.dtype]:  # not of NaN
                bits = self.key_bits if kv_slice.role == "keys" else self.value_bits
                finest = _round_up(largest / _LARGEST_MULTIPLE)
                best = _step(numbers.reshape(-1, kv_slice.dim), bits, finest)
                packed = bytes(Zstd().encode(_multiples(numbers, best).tobytes(), _INT16))
                if len(packed) < len(body):
                    step, body = best, packed
            parts += [_HEAD.pack(_CODES[kv_slice.dtype], step, piece.size, len(body)), body]
        return b"".join(parts)

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        import torch

        from ragkv.attention.kv import torch_dtype

        runs, payload, start = list[tuple[DType, float, int, memoryview]](), memoryview(buf), 0
        while start < len(payload):
            if len(payload) - start < _HEAD.size:
                raise DamagedError(f"{len(payload)} bytes are not a quantised payload")
            code, step, nbytes, stored = _HEAD.unpack_from(payload, start)
            body = payload[start + _HEAD.size :][:stored]
            start += _HEAD.size + stored
            right = code in _DTYPES and nbytes % ITEM_SIZES[_DTYPES[code]] == 0 and start <= len(payload)
            if not right or not (_is_step(step) or (step == 0 and stored == nbytes)):
                raise DamagedError(f"{len(payload)} bytes are not a quantised payload")
            runs.append((_DTYPES[code], step, nbytes, body))
        out, start = output(sum(nbytes for _, _, nbytes, _ in runs), out), 0
        for dtype, step, nbytes, body in runs:
            target = out[start : start + nbytes]
            start += nbytes
            if not step:
                target[:] = np.frombuffer(body, np.uint8)
                continue
            multiples = Zstd().decode(body, output(2 * (nbytes // ITEM_SIZES[dtype]), None)).view("<i2") - _BIAS
            numbers = torch.from_numpy(multiples.astype(np.float32)).mul_(step)  # exact
            torch.from_numpy(target).view(torch_dtype(dtype)).copy_(numbers)
        return out


_INT16 = (KVSlice("values", "float16", 1, 1, 1),)


@dataclass(frozen=True, slots=True)
class Int8(_Quantiser):
    """A little more than eight bits per number, about half of bf16; answers should not change."""

    id: ClassVar[str] = "int8"
    key_bits: float = 8.8
    value_bits: float = 7.9


@dataclass(frozen=True, slots=True)
class Int4(_Quantiser):
    """Between four and five bits per number, below 0.30 of bf16. Keys get more bits than values."""

    id: ClassVar[str] = "int4"
    key_bits: float = 5.6
    value_bits: float = 3.9


def _floats(data: Bytes, dtype: DType) -> Floats:
    """The numbers as float32, which represents all other types exactly; numpy has no bfloat16."""
    if dtype != "bfloat16":
        return data.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)
    wide = data.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _step(rows: Floats, bits: float, finest: float) -> float:
    """The step at which a sample of these numbers takes about `bits` for each. Doubling the step saves one bit."""
    allowed = max(bits, bits - 1 + 8 * _SHORT_BYTES / rows.size)
    sample = rows[:: max(1, rows.size // _SAMPLE)]
    step, fitting = float(sample.std(dtype=np.float64)) * 2 ** (2 - bits), list[float]()
    for _ in range(6):
        step = max(finest, _round_up(step))
        size = _HEAD.size + len(bytes(Zstd().encode(_multiples(sample, step).tobytes(), _INT16)))
        over = 8 * size / sample.size - allowed
        fitting += [step] if over <= 0 else []
        if -_NEAR < over <= 0:
            break
        step = min(step * 2 ** (over + _NEAR / 2), _GREATEST_STEP)
    return min(fitting, default=max(finest, _round_up(step)))


def _multiples(numbers: Floats, step: float) -> NDArray[np.int16]:
    """The nearest whole multiples of the step, plus `_BIAS`."""
    multiples: NDArray[np.int16] = np.rint(numbers / np.float32(step)).astype(np.int16) + np.int16(_BIAS)
    return multiples


def _round_up(step: float) -> float:
    """The next step with 8 significant bits, within the range that avoids subnormal numbers and overflow."""
    low = (1 << _STEP_BITS) - 1
    bits = int(np.float32(min(max(step, _LEAST_STEP), _GREATEST_STEP)).view(np.uint32))
    return float(np.uint32((bits + low) & ~low).view(np.float32))


def _is_step(step: float) -> bool:
    bits = int(np.float32(step).view(np.uint32))
    return _LEAST_STEP <= step <= _GREATEST_STEP and bits & ((1 << _STEP_BITS) - 1) == 0
