"""Lossy codecs: every number becomes a whole multiple of its slab's step, and zstd's entropy coder packs them.

KIVI gives each group of numbers its own scale and a fixed number of bits. Measured on mini at the same size, one step
per slab has a tenth of KIVI's KL divergence (docs/formats.md). The reason is that attention scores depend on the
absolute error of a key's channel, not on its relative error. With one step, a narrow channel takes few bits and an
outlier channel many, no scales are stored, and no number is off by more than half a step, however large its neighbours
are. Two ideas remain from KIVI: a key channel's mean is subtracted first where that saves bits, and keys get more bits
than values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from ragkv.attention.shape import ITEM_SIZES, DType
from ragkv.errors import ConfigError
from ragkv.store.codec import Bytes, Codec, Slab, Zstd, output
from ragkv.store.seal import Buffer, DamagedError

__all__ = ["Int4", "Int8"]

_HEAD = struct.Struct("<BBBxfIII")
_LENGTH = struct.Struct("<I")
_DTYPES: Mapping[int, DType] = {1: "bfloat16", 2: "float16", 3: "float32"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_STEP_BITS = 16
"""Low bits of a step that are zero: with 8 significant bits, multiples below 2^16 are exact in float32."""
_LARGEST = 16_000
"""Multiples stay below this, so that the difference of a multiple and an offset fits into 16 bits."""
_LEAST_STEP, _GREATEST_STEP = 2.0**-126, 2.0**126
_BEYOND: Mapping[DType, float] = {"bfloat16": 2.0**96, "float16": 65_504 / 2, "float32": 2.0**96}
"""Slabs with larger numbers are stored as they are."""
_HEADERS = 64
_SMALL = _HEADERS + 32
"""Bytes that a slab may take in addition to one bit per number less than allowed, so that short chunks do not pay for
headers and code tables in precision alone."""
_SAMPLE = 1 << 14
_TRIES = 5
_NEAR = 0.06
"""The search ends when a slab takes at most this many bits per number less than allowed."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class _Quantiser(Codec):
    """`key_bits` and `value_bits` are the bits that a number of each may take on average, everything included.

    The encoder looks for the finest step that stays within them. A slab is stored as it is if it holds NaN, infinities
    or numbers beyond 2^96 (float16: 32,752), or if it would not become smaller.
    """

    key_bits: float
    value_bits: float

    def __post_init__(self) -> None:
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if not isinstance(bits, (int, float)) or not 1 <= bits <= 12:
                raise ConfigError(f"{self.id}: {name} = {bits!r} is not between 1 and 12")

    def lossless(self) -> Codec:
        return Zstd()

    def encode(self, buf: Buffer, slabs: Sequence[Slab]) -> Buffer:
        data, start, parts = np.frombuffer(buf, np.uint8), 0, []
        for slab in slabs:
            piece = data[start : start + slab.nbytes]
            start += slab.nbytes
            bits = self.key_bits if slab.role == "keys" else self.value_bits
            parts.append(_encode_slab(piece, slab, bits))
        return b"".join(parts)

    def decode(self, buf: Buffer, out: Bytes | None = None) -> Bytes:
        payload = memoryview(buf)
        try:
            pieces = _parse(payload)
            out = output(sum(piece.nbytes for piece in pieces), out)
            start = 0
            for piece in pieces:
                piece.decode(out[start : start + piece.nbytes])
                start += piece.nbytes
        except (struct.error, zstandard.ZstdError, MemoryError) as error:
            raise DamagedError(f"{self.id} cannot decode it ({error})") from error
        return out


@dataclass(frozen=True, slots=True)
class Int8(_Quantiser):
    """A little more than eight bits per number, about half of bf16, for answers that should not change."""

    id: ClassVar[str] = "int8"
    key_bits: float = 8.8
    value_bits: float = 7.9


@dataclass(frozen=True, slots=True)
class Int4(_Quantiser):
    """Between four and five bits per number, below 0.30 of bf16. Keys get more bits than values."""

    id: ClassVar[str] = "int4"
    key_bits: float = 5.6
    value_bits: float = 3.9


def _encode_slab(piece: Bytes, slab: Slab, bits: float) -> bytes:
    """The slab's header with its frames, or with its bytes where these are smaller."""
    shape = (slab.heads, slab.tokens, slab.dim)
    kept = _HEAD.pack(_CODES[slab.dtype], 0, 0, 0.0, *shape) + piece.tobytes()
    if not piece.size:
        return kept
    numbers = _floats(piece, slab.dtype).reshape(shape)
    largest = max(-float(numbers.min()), float(numbers.max()))
    if not largest <= _BEYOND[slab.dtype]:  # written so that it holds for NaN
        return kept
    sample = numbers[:, :: max(1, numbers.size // _SAMPLE)]
    means = _offsets(numbers, sample) if slab.role == "keys" else None
    allowed = max(numbers.size * bits / 8, numbers.size * (bits - 1) / 8 + _SMALL)
    finest = _round_up(largest / _LARGEST)
    step = _guess(sample if means is None else sample - means, 8 * (allowed - _HEADERS) / numbers.size, finest)
    tried: dict[float, bytes] = {}
    while step not in tried and len(tried) < _TRIES:
        tried[step] = data = _pack(numbers, slab, step, means)
        over = 8 * (len(data) - allowed) / numbers.size
        if -_NEAR < over <= 0:
            break
        step = max(finest, _round_up(step * 2 ** (over + _NEAR / 2)))
    fitting = [step for step, data in tried.items() if len(data) <= allowed]
    best = tried[min(fitting)] if fitting else min(tried.values(), key=len)
    return best if len(best) < len(kept) else kept


def _floats(piece: Bytes, dtype: DType) -> Floats:
    """The numbers as float32, which holds all of the other types exactly; numpy has no bfloat16."""
    if dtype != "bfloat16":
        return piece.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)
    wide = piece.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _offsets(keys: Floats, sample: Floats) -> Floats | None:
    """The mean of every channel, `(heads, 1, dim)`; None where subtracting it saves less than storing it costs."""
    means: Floats = keys.mean(axis=1, keepdims=True)
    within = float(np.square(sample - means, dtype=np.float64).mean())
    total = float(sample.var(dtype=np.float64))
    return means if within and math.log2(total / within) / 2 > 10 / keys.shape[1] else None


def _guess(sample: Floats, bits: float, finest: float) -> float:
    """The step at which the sample's entropy is about `bits` per number. Doubling the step saves one bit."""
    step = float(sample.std(dtype=np.float64)) * 2 ** (2 - bits)
    for _ in range(_TRIES):
        step = max(finest, step)
        multiples = _multiples(sample, step)
        over = sum(map(_entropy, _planes(multiples))) - bits
        step *= 2**over
        if abs(over) < _NEAR / 2:
            break
    return max(finest, _round_up(step))


def _entropy(plane: NDArray[np.int8]) -> float:
    """Bits per number of an ideal code for this plane."""
    counts = np.bincount(plane.reshape(-1).view(np.uint8))
    shares = counts[counts > 0] / plane.size
    return -float(np.sum(shares * np.log2(shares)))


def _pack(numbers: Floats, slab: Slab, step: float, means: Floats | None) -> bytes:
    """Header and frames of the slab at this step."""
    multiples = _multiples(numbers, step)
    frames: list[bytes] = []
    offset_planes = 0
    if means is not None:
        offsets = _multiples(means, step)
        multiples -= offsets
        frames += _frames(offsets)
        offset_planes = len(frames)
    frames += _frames(multiples)
    head = _HEAD.pack(
        _CODES[slab.dtype], len(frames) - offset_planes, offset_planes, step, slab.heads, slab.tokens, slab.dim
    )
    return b"".join([head, *(_LENGTH.pack(len(frame)) for frame in frames), *frames])


def _multiples(numbers: Floats, step: float) -> Ints:
    """The nearest whole multiples of the step."""
    divided = numbers / np.float32(step)
    found: Ints = np.rint(divided, out=divided).astype(np.int16)
    return found


def _frames(numbers: Ints) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=1)
    return [compressor.compress(plane.data) for plane in _planes(numbers)]


def _planes(numbers: Ints) -> list[NDArray[np.int8]]:
    """One plane of int8 if all numbers fit; else the low and the high bytes of n + 128.

    With the offset, small numbers of either sign have the high byte 0, which compresses well.
    """
    if int(numbers.min()) >= -128 and int(numbers.max()) <= 127:
        return [numbers.astype(np.int8)]
    biased = numbers + 128
    return [biased.astype(np.int8), (biased >> 8).astype(np.int8)]


def _round_up(step: float) -> float:
    """The next step with 8 significant bits, within the range that avoids subnormal numbers and overflow."""
    low = (1 << _STEP_BITS) - 1
    bits = int(np.float32(min(max(step, _LEAST_STEP), _GREATEST_STEP)).view(np.uint32))
    return float(np.uint32((bits + low) & ~low).view(np.float32))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One slab of a payload: its header, and its frames or, if it was stored as it is, its bytes."""

    dtype: DType
    step: float
    shape: tuple[int, int, int]
    frames: tuple[memoryview, ...]
    offset_frames: tuple[memoryview, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numbers * ITEM_SIZES[self.dtype]

    def decode(self, out: Bytes) -> None:
        """(n + offset) · step, exact in float32, rounded once to the slab's dtype (ties to even)."""
        if self.step == 0:
            out[:] = np.frombuffer(self.frames[0], np.uint8)
            return
        import torch

        from ragkv.attention.kv import DTYPES

        heads, _, dim = self.shape
        multiples = torch.from_numpy(_integers(self.frames, self.numbers)).view(self.shape)
        target = torch.from_numpy(out).view(DTYPES[self.dtype]).view(self.shape)
        offsets = None
        if self.offset_frames:
            offsets = torch.from_numpy(_integers(self.offset_frames, heads * dim)).view(heads, 1, dim)
        # bfloat16 holds whole numbers up to 256 exactly, and its product is rounded once, as in float32.
        small = multiples.dtype == torch.int8 and (offsets is None or offsets.dtype == torch.int8)
        work = target if self.dtype == "float32" or (small and self.dtype == "bfloat16") else None
        work = torch.empty(self.shape) if work is None else work
        work.copy_(multiples)
        if offsets is not None:
            work.add_(offsets.to(work.dtype))
        work.mul_(self.step)
        if work is not target:
            target.copy_(work)


def _parse(payload: memoryview) -> list[_Piece]:
    """The slabs of a payload; `DamagedError` when it is none."""
    pieces: list[_Piece] = []
    start = 0
    while start < len(payload) or not pieces:
        code, planes, offset_planes, step, *shape = _HEAD.unpack_from(payload, start)
        start += _HEAD.size
        piece = _Piece(_DTYPES.get(code, "int8"), step, (shape[0], shape[1], shape[2]), (), ())
        count = planes + offset_planes
        if planes:
            lengths = [_LENGTH.unpack_from(payload, start + 4 * i)[0] for i in range(count)]
            start += 4 * count
        else:
            lengths = [piece.nbytes]
        frames = []
        for length in lengths:
            frames.append(payload[start : start + length])
            start += length
        if (
            code not in _DTYPES
            or planes > 2
            or offset_planes > 2
            or start > len(payload)
            or (not (_is_step(step) and piece.numbers) if planes else step != 0 or offset_planes)
        ):
            raise DamagedError(f"{len(payload)} bytes are not a quantised payload")
        pieces.append(
            _Piece(piece.dtype, step, piece.shape, tuple(frames[offset_planes:]), tuple(frames[:offset_planes]))
        )
    return pieces


def _is_step(step: float) -> bool:
    bits = int(np.float32(step).view(np.uint32))
    return _LEAST_STEP <= step <= _GREATEST_STEP and bits & ((1 << _STEP_BITS) - 1) == 0


def _integers(frames: Sequence[memoryview], count: int) -> NDArray[np.int8] | Ints:
    """`count` whole numbers, int8 from one plane, int16 from two."""
    decompressor = zstandard.ZstdDecompressor()
    planes = []
    for frame in frames:
        if zstandard.get_frame_parameters(frame).content_size != count:
            raise DamagedError("a frame has the wrong length")
        planes.append(np.frombuffer(decompressor.decompress(frame, allow_extra_data=False), np.int8))
    if len(planes) == 1:
        return planes[0].copy()  # torch warns about read-only memory
    joined = planes[1].astype(np.int16)
    joined <<= 8
    joined |= planes[0].view(np.uint8)
    joined -= 128
    return joined
