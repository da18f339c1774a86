"""What every codec must do (the contract), what each promises besides, and payloads of other authors and versions."""

import contextlib
import runpy
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from storekit import equal, identity, make_kv

from ragkv.attention.kv import ChunkKV
from ragkv.errors import ConfigError
from ragkv.store import (
    Q8,
    Codec,
    Half,
    Int4,
    Int8,
    KVIdentity,
    KVSlice,
    Raw,
    Store,
    Zstd,
    codec_from_config,
    codec_names,
    codecs,
)
from ragkv.store.codecs import DamagedError
from ragkv.store.record import LONG_WORDS, Manifest, decode_record, encode_record
from ragkv.types import Encoding

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LOSSLESS: list[Codec] = [Raw(), Zstd(), Zstd(level=19)]
QUANTISERS: list[Codec] = [Int8(), Int4(), Int4(key_bits=6)]
ALL = [*LOSSLESS, Half(), Q8(), *QUANTISERS]
FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "golden.py"))

EDGES = [None, 0.0, 1e-40, 2.0**-100, 2.0**-5, 2.0**-5 * (1 - 2.0**-12), 30_000.0, 40_000.0, 65_504.0, 65_519.9]
EDGES += [65_520.0, 2.0**96, 2.0**97, 3e38, torch.inf, -torch.inf, torch.nan]

every_codec = pytest.mark.parametrize("codec", ALL, ids=repr)
every_quantiser = pytest.mark.parametrize("codec", QUANTISERS[:2], ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slice_of(tensor: torch.Tensor, role: Any) -> KVSlice:
    name: Any = str(tensor.dtype).removeprefix("torch.")
    return KVSlice(role, name, tensor.shape[0], tensor.shape[1], tensor.shape[2])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def through(codec: Codec, tensor: torch.Tensor, role: str) -> tuple[bytes, torch.Tensor]:
    data = bytes_of(tensor)
    payload = bytes(codec.encode(data, [slice_of(tensor, role)]))
    assert data == bytes_of(tensor)
    decoded = codec.decode(payload)
    out = np.empty(len(data), np.uint8)
    codec.decode(memoryview(payload), out=out)
    assert decoded.tobytes() == out.tobytes()
    if not decoded.size:
        return payload, torch.empty_like(tensor)
    return payload, torch.from_numpy(out).view(tensor.dtype).view(tensor.shape)


def like_keys(heads: int, tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Numbers with a mean and a scale per channel, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(heads, 1, dim, generator=generator))
    return torch.randn(heads, tokens, dim, generator=generator) * scale + 2 * torch.randn(
        heads, 1, dim, generator=generator
    )


# ---- docs/formats.md, implemented literally, slice by slice, number by number

HALF, ROWS, QUANTISED = struct.Struct("<BbHI"), struct.Struct("<BBHI"), struct.Struct("<BxxxfII")


def plain(data: bytes, dtype: torch.dtype) -> list[float]:
    return torch.frombuffer(bytearray(data), dtype=dtype).double().tolist() if data else []


def literal_zstd(payload: bytes, dtype: torch.dtype) -> list[float]:
    size, at, planes = payload[0], 1 + 4 * payload[0], []
    for length in struct.unpack_from(f"<{size}I", payload, 1):
        planes.append(zstandard.ZstdDecompressor().decompress(payload[at : at + length]))
        at += length
    return plain(bytes(byte for number in zip(*planes, strict=True) for byte in number), dtype)


def literal_half(payload: bytes, dtype: torch.dtype) -> list[float]:
    numbers: list[float] = []
    offset = 0
    while offset < len(payload):
        kind, exponent, _, nbytes = HALF.unpack_from(payload, offset)
        offset += HALF.size
        size = nbytes // 2 if kind else nbytes
        if kind:
            numbers += [number * 2.0**exponent for number in struct.unpack_from(f"<{size // 2}e", payload, offset)]
        else:
            numbers += plain(payload[offset : offset + size], dtype)
        offset += size
    return numbers


def literal_q8(payload: bytes, dtype: torch.dtype) -> list[float]:
    numbers: list[float] = []
    offset = 0
    while offset < len(payload):
        kind, _, width, count = ROWS.unpack_from(payload, offset)
        offset += ROWS.size
        if not kind:
            numbers += plain(payload[offset : offset + count], dtype)
            offset += count
            continue
        for _ in range(count):
            [most] = struct.unpack("<f", bytes(2) + payload[offset + width : offset + width + 2])
            row = torch.tensor(struct.unpack_from(f"<{width}b", payload, offset), dtype=torch.float32)
            numbers += (row * (torch.tensor(most) / 127)).to(dtype).double().tolist()
            offset += width + 2
    return numbers


def literal_quantised(payload: bytes, dtype: torch.dtype) -> list[float]:
    numbers: list[float] = []
    offset = 0
    while offset < len(payload):
        _, step, nbytes, stored = QUANTISED.unpack_from(payload, offset)
        body = payload[offset + QUANTISED.size :][:stored]
        offset += QUANTISED.size + stored
        if not step:
            numbers += plain(body, dtype)
            continue
        size, low, _ = struct.unpack_from("<BII", body)
        planes = [zstandard.ZstdDecompressor().decompress(part) for part in (body[9:][:low], body[9 + low :])]
        assert (size, len(planes[0]) * dtype.itemsize) == (2, nbytes)
        for pair in zip(*planes, strict=True):
            multiple = int.from_bytes(pair, "little", signed=True) - 128
            numbers.append(torch.tensor(multiple * step, dtype=torch.float64).to(dtype).item())  # a Python float: exact
    return numbers


LITERAL: dict[str, Callable[[bytes, torch.dtype], list[float]]] = {
    "raw": plain,
    "zstd": literal_zstd,
    "half": literal_half,
    "q8": literal_q8,
    "int8": literal_quantised,
    "int4": literal_quantised,
}


def bound(codec: Codec, payload: bytes, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How far each number may be off, in float64."""
    exact, dtype = before.double(), before.dtype
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + torch.finfo(dtype).smallest_normal
    if not payload or not payload[0] or not exact.numel():  # a slice that is unchanged
        return torch.zeros_like(exact)
    if codec.id == "half":
        return torch.maximum(exact.abs() * 2.0**-11, exact.abs().max() * 2.0**-20)
    if codec.id == "q8":
        return torch.maximum(exact.abs().amax(-1, keepdim=True) * 0.004, torch.tensor(2.0**-100)) + rounding
    if codec.id in ("int8", "int4") and (step := QUANTISED.unpack_from(payload)[1]):
        # half a step, and half a unit in the last place: the division x/step rounds too, in float32
        return step / 2 * (1 + 2.0**-8) + torch.finfo(dtype).eps * after.double().abs() + 2.0**-25
    return torch.zeros_like(exact)


# ---- the contract


@every_codec
@given(
    dtype=st.sampled_from(DTYPES),
    role=st.sampled_from(["keys", "values"]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 33)),
    scale=st.integers(-160, 120),
    mean=st.sampled_from([0.0, 3.0, -70.0]),
    edge=st.sampled_from(EDGES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
@example(dtype=torch.float32, role="keys", shape=(2, 7, 9), scale=0, mean=0.0, edge=65_519.9, seed=1)
@example(dtype=torch.float32, role="keys", shape=(2, 7, 9), scale=-25, mean=0.0, edge=0.031242370605, seed=1)
@example(dtype=torch.float32, role="keys", shape=(2, 7, 9), scale=-150, mean=0.0, edge=0.0, seed=1)
@example(dtype=torch.float32, role="keys", shape=(2, 7, 7), scale=-115, mean=0.0, edge=1e-40, seed=1)
@example(dtype=torch.float16, role="values", shape=(1, 60, 16), scale=8, mean=0.0, edge=40_000.0, seed=4)
@example(dtype=torch.float32, role="values", shape=(1, 40, 8), scale=0, mean=0.0, edge=torch.nan, seed=4)
def test_numbers_come_back_within_the_bound_as_documented(codec, dtype, role, shape, scale, mean, edge, seed):
    """Also huge, tiny and subnormal ones: finite numbers stay finite. Slices with others are unchanged."""
    generator, limits = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    numbers = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean) * 2.0**scale
    before = numbers.clamp(limits.min, limits.max).to(dtype)
    if edge is not None:
        before[-1, shape[1] // 2, shape[2] // 2] = edge
    payload, after = through(codec, before, role)
    assert np.array_equal(LITERAL[codec.id](payload, dtype), after.double().reshape(-1).tolist(), equal_nan=True)
    if not bool(before.isfinite().all()):
        assert bytes_of(after) == bytes_of(before)
        return
    assert bool(after.isfinite().all())
    assert bool(((after.double() - before.double()).abs() <= bound(codec, payload, before, after)).all())
    if codec.early:  # rounding again changes nothing
        assert bytes_of(through(codec, after, role)[1]) == bytes_of(after)
    with pytest.MonkeyPatch.context() as patch:
        if codec.id in ("half", "raw", "zstd"):  # `ragkv verify` reads these without torch
            patch.delitem(sys.modules, "torch")
        assert codec.decode(payload).tobytes() == bytes_of(after)


@every_codec
@given(data=st.binary(max_size=4096), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40)
@example(data=np.random.default_rng(1).bytes(280_000), dtype=torch.float32)
def test_any_bits_come_back_as_numbers_or_as_they_were(codec, data, dtype):
    before = torch.frombuffer(bytearray(data[: len(data) // 8 * 8]) or bytearray(8), dtype=dtype).view(1, -1, 2)
    _, after = through(codec, before, "values")
    if codec in LOSSLESS or not bool(before.isfinite().all()):
        assert bytes_of(after) == bytes_of(before)
    assert bool(after.isfinite().all()) == bool(before.isfinite().all())


@every_codec
def test_config_makes_the_codec_again_and_another_length_is_refused(codec):
    assert codec_from_config(codec.config()) == codec
    payload = codec.encode(bytes(8), [KVSlice("keys", "bfloat16", 1, 1, 4)])
    for length in (0, 6, 10):
        with pytest.raises(DamagedError, match="holds 8 bytes"):
            codec.decode(payload, out=np.empty(length, np.uint8))


@pytest.mark.parametrize("codec", ALL[1:], ids=repr)
@given(offset=st.integers(0, 10_000), bit=st.integers(0, 7), end=st.integers(0, 10_000), noise=st.binary(max_size=80))
@settings(max_examples=150)
def test_damage_is_refused_or_keeps_the_length(codec, offset, bit, end, noise):
    before = like_keys(2, 12, 8).bfloat16()
    payload = bytearray(codec.encode(bytes_of(before) * 2, [slice_of(before, "keys"), slice_of(before, "values")]))
    whole = bytes(payload)
    payload[offset % len(payload)] ^= 1 << bit
    for damaged in (bytes(payload), whole[: end % len(whole)], whole + whole[: end % len(whole)]):
        if damaged != whole:
            with contextlib.suppress(DamagedError):
                assert codec.decode(damaged, out=np.empty(768, np.uint8)).size == 768
    with pytest.raises(DamagedError):
        codec.decode(noise, out=np.empty(16, np.uint8))


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Half(), torch.float32), *((codec, dtype) for codec in (Q8(), Int8(), Int4()) for dtype in DTYPES)],
)
def test_payloads_decode_for_ever_to_the_same_bits(codec, dtype):
    """The stored payload decodes to the stored numbers, which are those of docs/formats.md."""
    data = (FIXTURES / f"{codec.id}-{str(dtype).removeprefix('torch.')}.payload").read_bytes()
    end = 4 + struct.unpack_from("<I", data)[0]
    payload, decoded = data[4:end], data[end:]
    assert codec.decode(payload).tobytes() == decoded
    numbers, before = (torch.frombuffer(bytearray(each), dtype=dtype) for each in (decoded, GOLDEN["slabs"](dtype)[0]))
    assert np.array_equal(numbers.tolist(), LITERAL[codec.id](payload, dtype), equal_nan=True)
    rounded = len(decoded) // 3 * 2
    assert decoded[rounded:] == bytes_of(before)[rounded:]  # the slice with the NaN
    error = float((numbers.double() - before.double())[: len(numbers) // 3 * 2].abs().max())
    assert 0 < error <= (2.1 if codec.id == "q8" else 0.5)


@given(
    codec=st.sampled_from(ALL),
    dtype=st.sampled_from(DTYPES),
    encoding=st.sampled_from(list(Encoding)),
    tokens=st.integers(0, 90),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
@example(codec=Q8(), dtype=torch.bfloat16, encoding=Encoding.STANDALONE, tokens=0, shapes=[(1, 1, 1)], seed=0)
@example(codec=Q8(), dtype=torch.bfloat16, encoding=Encoding.STANDALONE, tokens=6000, shapes=[(1, 96, 96)], seed=0)
@example(codec=Int4(), dtype=torch.bfloat16, encoding=Encoding.STANDALONE, tokens=6000, shapes=[(1, 96, 96)], seed=0)
def test_records_of_every_shape(codec, dtype, encoding, tokens, shapes, seed):
    """Any number of KV heads, keys and values of different widths, layers of different shapes, heads cut over segments,
    all encodings."""
    kv = ChunkKV(
        keys=tuple(like_keys(heads, tokens, dim, seed).to(dtype) for heads, dim, _ in shapes),
        values=tuple(like_keys(heads, tokens, dim, seed + 1).to(dtype) for heads, _, dim in shapes),
        encoded_at=7,
    )
    words = {Encoding.PREFIXED: 2, Encoding.CONTEXT: 3, Encoding.LONG: LONG_WORDS}
    identity = KVIdentity(
        model="m",
        encoding=encoding,
        prefix_ids=(0,) * words.get(encoding, 0),
        chunk_ids=tuple(range(tokens)),
    )
    record = encode_record(kv, identity, codec)
    manifest = Manifest.parse(record.manifest)
    assert manifest.codec["id"] == ("raw" if codec.id == "half" and dtype != torch.float32 else codec.id)
    loaded = decode_record(manifest, record.segments.__getitem__)
    assert codec not in LOSSLESS or equal(loaded, kv)
    for before, after in zip((*kv.keys, *kv.values), (*loaded.keys, *loaded.values), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        if before.numel():
            assert float((before.float() - after.float()).abs().max()) <= 0.25 * float(before.float().abs().max())


# ---- what each promises besides


@every_dtype
@pytest.mark.parametrize(("codec", "most"), [(Int8(), 0.53), (Int4(), 0.30), (Q8(), 0.54)], ids=repr)
@pytest.mark.parametrize(
    ("heads", "tokens", "dim"),
    [(3, 20, 32), (3, 60, 32), (1, 20, 64), (2, 33, 64), (8, 20, 128), (4, 300, 128), (1, 2048, 64)],
)
def test_size_is_kept_whatever_the_shape(codec, most, dtype, heads, tokens, dim):
    """The promised fraction of bf16's size for every input dtype; with keys and values in one segment or in two."""
    keys = like_keys(heads, tokens, dim).to(dtype)
    values = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = codec.encode(bytes_of(keys) + bytes_of(values), [slice_of(keys, "keys"), slice_of(values, "values")])
    apart = [len(through(codec, tensor, role)[0]) for tensor, role in ((keys, "keys"), (values, "values"))]
    assert memoryview(together).nbytes == sum(apart) <= most * 2 * (keys.numel() + values.numel())


@pytest.mark.parametrize(("scale", "scaled"), [(0, True), (-84, True), (112, True), (-90, False), (118, False)])
def test_half_scales_what_float16_cannot_hold(scale, scaled):
    """It then takes half the bytes; numbers beyond every scale are stored unchanged."""
    payload, _ = through(Half(), torch.ones(2, 7, 9) * 2.0**scale, "keys")
    assert len(payload) == HALF.size + 126 * (2 if scaled else 4)


def test_q8_keeps_a_slice_that_it_cannot_round_and_rounds_the_next():
    before, good = like_keys(2, 12, 8), like_keys(2, 12, 8, 3)
    before[1, 3, 2] = 2.0**97
    payload = bytes(Q8().encode(bytes_of(before) + bytes_of(good), [slice_of(t, "keys") for t in (before, good)]))
    decoded = Q8().decode(payload).tobytes()
    assert decoded[: len(decoded) // 2] == bytes_of(before)
    assert decoded[len(decoded) // 2 :] == bytes_of(through(Q8(), good, "keys")[1]) != bytes_of(good)
    assert Q8().parts(payload) is None


@every_quantiser
@every_dtype
@pytest.mark.parametrize("number", [0.0, 1.0, -3.7, 0.0078125, 1e4])
def test_a_constant_stays_almost_what_it_is(codec, dtype, number):
    """Also where the mean of the rounded numbers is another one."""
    before = torch.full((3, 64, 13), number).to(dtype)
    payload, after = through(codec, before, "keys")
    assert len(payload) < 400
    assert bool(((after.double() - number).abs() <= abs(number) / 8000 + torch.finfo(dtype).eps * abs(number)).all())


@pytest.mark.parametrize(
    ("codec", "role", "most"),
    [(Int8(), "keys", 0.006), (Int8(), "values", 0.01), (Int4(), "keys", 0.05), (Int4(), "values", 0.15)],
    ids=repr,
)
def test_precision(codec, role, most):
    before = like_keys(2, 200, 64)
    after = through(codec, before, role)[1]
    assert float((after - before).std() / before.std()) < most


@every_quantiser
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (2, 3, 2)], ids=str)
def test_what_would_not_become_smaller_is_kept(codec, dtype, shape):
    before = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    payload, after = through(codec, before, "values")
    assert len(payload) == QUANTISED.size + len(bytes_of(before))
    assert torch.equal(after, before)


def test_an_outlier_channel_leaves_the_others_alone():
    """One scale for all channels of a token would lose the small ones; one step for all does not."""
    before = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(3))
    plain = through(Int4(), before, "keys")[1]
    before[:, :, 7] *= 100
    after = through(Int4(), before, "keys")[1]
    others = [c for c in range(64) if c != 7]
    error, usual = ((x - y)[:, :, others].std() for x, y in ((after, before), (plain, before)))
    assert float(error) < 1.5 * float(usual)


# ---- payloads of another author


def zstd(item_size: int, *frames: bytes) -> bytes:
    """A zstd payload as docs/formats.md specifies it: item size, lengths of the frames, the frames."""
    return struct.pack(f"<B{len(frames)}I", item_size, *map(len, frames)) + b"".join(frames)


def quantised(code: int = 1, step: float = 0.5, nbytes: int = 12, stored: int | None = None) -> bytes:
    return QUANTISED.pack(code, step, nbytes, len(SIX) if stored is None else stored)


FOUR, TWO = (zstandard.ZstdCompressor().compress(data) for data in (b"\1\2\3\4", b"\1\2"))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"\1\2\3\4")
SIX = bytes(Zstd().encode((np.arange(6, dtype="<i2") + 128).tobytes(), [KVSlice("values", "float16", 1, 1, 6)]))
HALVES = HALF.pack(1, -3, 0, 8) + struct.pack("<2e", 1.0, -2.0) + HALF.pack(0, 0, 0, 8) + struct.pack("<2f", 5.0, 6.0)
EIGHTS = ROWS.pack(1, 1, 2, 2) + bytes([1, 127, 0, 0x40, 129, 0, 0x80, 0x3F]) + ROWS.pack(0, 1, 0, 4) + b"\1\2\3\4"


@pytest.mark.parametrize(
    ("codec", "good", "dtype", "numbers", "wrong"),
    [
        (
            Zstd(),
            zstd(2, FOUR, FOUR),
            torch.int16,
            [0x0101, 0x0202, 0x0303, 0x0404],
            [
                zstd(2, FOUR, TWO),  # planes of different lengths
                zstd(3, FOUR, FOUR, FOUR),  # no dtype has three bytes
                zstd(0),
                zstd(2, UNSIZED, UNSIZED),  # frames without a content size
                zstd(2, FOUR + TWO, FOUR),  # two frames in the place of one
                zstd(2, FOUR, b""),
            ],
        ),
        (
            Half(),
            HALVES,
            torch.float32,
            [0.125, -0.25, 5.0, 6.0],
            [
                HALVES + HALF.pack(0, 0, 0, 1 << 31),
                HALF.pack(2, 0, 0, 16) + bytes(16),
                HALF.pack(1, 101, 0, 16) + bytes(8),
                HALF.pack(1, -101, 0, 16) + bytes(8),
                HALF.pack(1, 0, 1, 16) + bytes(8),
                HALF.pack(0, 1, 0, 16) + bytes(16),
                HALF.pack(1, 0, 0, 14) + bytes(7),
            ],
        ),
        (
            Q8(),
            EIGHTS,
            torch.bfloat16,
            [0.015747, 2.0, -1.0, 0.0, 9.4e-38, 6.2e-37],
            [
                EIGHTS + ROWS.pack(0, 1, 0, 1 << 31),
                EIGHTS + ROWS.pack(1, 1, 1 << 15, 1 << 31),
                ROWS.pack(2, 1, 0, 12) + bytes(12),
                ROWS.pack(0, 1, 1, 12) + bytes(12),
                ROWS.pack(1, 1, 0, 12) + bytes(24),
                ROWS.pack(0, 4, 0, 12) + bytes(12),
                ROWS.pack(1, 0, 6, 1) + bytes(8),
            ],
        ),
        (
            Int8(),
            quantised() + SIX,
            torch.bfloat16,
            [0, 0.5, 1, 1.5, 2, 2.5],
            [
                *(quantised(nbytes=nbytes) + SIX for nbytes in (10, 11, 1 << 20, (1 << 32) - 2)),
                *(quantised(code=code) + SIX for code in (0, 4)),
                *(quantised(step=step) + SIX for step in (0.1, -0.5, 0.0, float("nan"), float("inf"), 2.0**127)),
                quantised(stored=len(SIX) - 1) + SIX[:-1],
                quantised(step=0, stored=12) + bytes(11),
                quantised(step=0, stored=11) + bytes(11),
                quantised()[:-1],
            ],
        ),
    ],
    ids=["zstd", "half", "q8", "int8"],
)
def test_payloads_of_another_author_are_refused(codec, good, dtype, numbers, wrong):
    """Each differs from a valid payload in one respect. Without `out`, memory is not allocated by what is claimed."""
    decoded = codec.decode(good)
    assert torch.from_numpy(decoded.copy()).view(dtype).tolist() == pytest.approx(numbers, rel=4e-3)
    for payload in (*wrong, good[:-1], good + b"\0", b""):
        for out in (None, np.empty(decoded.size, np.uint8)):
            if payload or out is not None:
                with pytest.raises(DamagedError):
                    codec.decode(payload, out=out)
    if payload := {"q8": ROWS.pack(1, 1, 2, 1) + bytes(3)}.get(codec.id):
        with pytest.raises(DamagedError):
            codec.parts(payload)


# ---- configuration


@pytest.mark.parametrize(
    ("config", "says"),
    [
        *(({"id": "zstd", "level": level}, "between 1 and 19") for level in (0, 20, 22, True, 1.0, "1", None)),
        *(({"id": "int4", "key_bits": bits}, "key_bits") for bits in (0.5, 13, float("nan"), "four")),
        ({"id": "raw", "level": 1}, "does not take the options"),
        ({"id": "zstd", "speed": 1}, "does not take the options"),
        ({"id": "int4", "bits": 4}, "does not take the options"),
        ({"id": "lz9"}, "unknown codec 'lz9'.*half, int4, int8, q8, raw, zstd"),
    ],
)
def test_wrong_configurations_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        codec_from_config(config)


@dataclass(frozen=True, slots=True)
class Inverted(Codec):
    """A codec from another package."""

    id: ClassVar[str] = "inverted"
    mask: int = 255

    def encode(self, buf: Any, slabs: Any) -> bytes:
        return (np.frombuffer(buf, np.uint8) ^ self.mask).tobytes()

    def decode(self, buf: Any, out: Any = None) -> Any:
        found = np.frombuffer(buf, np.uint8) ^ self.mask
        if out is None:
            return found
        out[:] = found
        return out


def test_another_package_adds_a_codec(tmp_path, monkeypatch):
    added = {"inverted": f"{__name__}:Inverted", "broken": "their_missing_module:Nothing"}
    monkeypatch.setattr(codecs.CODECS, "added", {name: EntryPoint(name, value, "") for name, value in added.items()})
    assert codec_names() == ["broken", "half", "int4", "int8", "inverted", "q8", "raw", "zstd"]
    with pytest.raises(ConfigError, match="'lz9': choose one of broken, half, int4, int8, inverted, q8, raw, zstd"):
        codec_from_config({"id": "lz9"})
    with pytest.raises(ConfigError, match=r"codec 'broken' is installed but cannot be loaded \(No module named"):
        codec_from_config({"id": "broken"})
    of, kv = identity(1, 2, 3, 4, 5), make_kv(5)
    with Store.create(tmp_path, codec=codec_from_config({"id": "inverted", "mask": 15})) as store:
        store.stage_kv([(of, kv)])
    with Store.open(tmp_path) as store:  # the record names its codec
        assert equal(store.get_kv(of), kv)
        assert equal(store.get_many([of])[of], kv)  # as long as its payload, but must be decoded
