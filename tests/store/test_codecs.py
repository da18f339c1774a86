"""Codecs: exact or within half a step, decoded as docs/formats.md says, with errors for foreign payloads."""

import contextlib
import runpy
import struct
import sys
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

CODECS = [Raw(), Zstd(), Zstd(level=19)]
ALL = [*CODECS, Half(), Q8(), Int8(), Int4(), Int4(key_bits=6)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def flat(numbers: int, dtype: torch.dtype = torch.bfloat16) -> list[KVSlice]:
    """Two slabs of one row, keys and values, of `numbers` numbers in total."""
    name: Any = str(dtype).removeprefix("torch.")
    return [KVSlice("keys", name, 1, 1, numbers - numbers // 2), KVSlice("values", name, 1, 1, numbers // 2)]


every_lossless_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_codec = pytest.mark.parametrize("codec", ALL, ids=repr)


@every_lossless_codec
@given(data=st.binary(max_size=4096), dtype=st.sampled_from(DTYPES))
@example(data=np.random.default_rng(1).bytes(140_002), dtype=torch.bfloat16)
@example(data=np.random.default_rng(1).bytes(280_004), dtype=torch.float32)
def test_round_trip(codec, data, dtype):
    numbers = len(data) // dtype.itemsize
    data = data[: numbers * dtype.itemsize]
    payload = codec.encode(data, flat(numbers, dtype))
    assert codec.decode(payload).tobytes() == data
    out = np.empty(len(data), np.uint8)
    codec.decode(memoryview(payload), out=out)
    assert out.tobytes() == data


@every_codec
def test_config_makes_the_codec_again(codec):
    assert codec_from_config(codec.config()) == codec


@every_codec
@pytest.mark.parametrize("length", [0, 6, 10])
def test_another_length_is_refused(codec, length):
    payload = codec.encode(bytes(8), flat(4))
    with pytest.raises(DamagedError, match="holds 8 bytes"):
        codec.decode(payload, out=np.empty(length, np.uint8))


def payload(item_size: int, *frames: bytes) -> bytes:
    """A zstd payload as docs/formats.md specifies it: item size, lengths of the frames, the frames."""
    return struct.pack(f"<B{len(frames)}I", item_size, *map(len, frames)) + b"".join(frames)


def test_zstd_refuses_what_another_author_wrote():
    """Frames that are valid separately but not as one payload; decoded with `out` and without."""
    packed, unsized = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(write_content_size=False)
    four, two = packed.compress(b"\1\2\3\4"), packed.compress(b"\1\2")
    assert bytes(Zstd().decode(payload(2, four, four))) == b"\1\1\2\2\3\3\4\4"
    for wrong in (
        payload(2, four, two),  # planes of different lengths
        payload(3, four, four, four),  # no dtype has three bytes
        payload(0),
        payload(2, unsized.compress(b"\1\2\3\4"), unsized.compress(b"\1\2\3\4")),  # frames without a content size
        payload(2, four + two, four),  # two frames in the place of one
        payload(2, four, four)[:-1],
        payload(2, four, b""),
        b"",
    ):
        for out in (None, np.empty(8, np.uint8)):
            with pytest.raises(DamagedError):
                Zstd().decode(wrong, out=out)


@pytest.mark.parametrize("codec", [Zstd(), Int8(), Int4()], ids=repr)
def test_a_payload_that_claims_more_than_there_is(codec):
    """Decoded without `out`: refused before memory is allocated, or because the allocation fails."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"\1" * 8)
    claims = [payload(2, frame, frame)]
    if not isinstance(codec, Zstd):
        claims = [HEAD.pack(1, 1.0, nbytes, len(claims[0])) + claims[0] for nbytes in (1 << 20, (1 << 32) - 2)]
    for claim in claims:
        with pytest.raises(DamagedError):
            codec.decode(claim)


@pytest.mark.parametrize(
    ("codec", "options", "says"),
    [
        *((Zstd, {"level": level}, "between 1 and 19") for level in (0, 20, 22, True, 1.0, "1", None)),
        *((Int4, {"key_bits": bits}, "key_bits") for bits in (0.5, 13, float("nan"), "four")),
    ],
)
def test_settings_out_of_range_are_refused(codec, options, says):
    with pytest.raises(ConfigError, match=says):
        codec(**options)


def test_unknown_codecs_and_the_layout_of_zstd():
    with pytest.raises(ConfigError, match=r"unknown codec 'lz9'.*half, int4, int8, q8, raw, zstd"):
        codec_from_config({"id": "lz9"})
    assert {"half", "int4", "int8", "q8", "raw", "zstd"} <= set(codec_names())
    payload = bytes(Zstd().encode(bytes(8), flat(4)))
    with pytest.raises(DamagedError):
        Zstd().decode(payload + b"more")
    # The order of the planes is part of the format: existing indexes must stay readable.
    found = bytes(Zstd().encode(np.array([0x0102, 0x0304], "<u2").tobytes(), flat(2)))
    size, low, high = struct.unpack_from("<BII", found)
    frames = found[9 : 9 + low], found[9 + low : 9 + low + high]
    assert (size, [zstandard.ZstdDecompressor().decompress(f) for f in frames]) == (2, [b"\2\4", b"\1\3"])


@pytest.mark.parametrize(
    "config",
    [{"id": "raw", "level": 1}, {"id": "zstd", "speed": 1}, {"id": "zstd", "level": 0}, {"id": "int4", "bits": 4}],
)
def test_wrong_options_are_refused(config):
    with pytest.raises(ConfigError):
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


FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "golden.py"))


# ---- half

RUN = struct.Struct("<BbHI")


def literal_half(payload: bytes) -> list[float]:
    """docs/formats.md implemented literally, slice by slice, number by number."""
    found: list[float] = []
    at = 0
    while at < len(payload):
        kind, exponent, _, nbytes = RUN.unpack_from(payload, at)
        at += RUN.size
        count, letter = nbytes // 4, "e" if kind else "f"
        found += [number * 2.0**exponent for number in struct.unpack_from(f"<{count}{letter}", payload, at)]
        at += count * struct.calcsize(letter)
    return found


@given(
    scale=st.integers(-160, 128),
    mean=st.sampled_from([0.0, 3.0, -70.0]),
    width=st.sampled_from([0.0, 1e-6, 0.1, 1.0]),
    edge=st.sampled_from([0.0, 65_504.0, 65_505.0, 65_519.9, 65_520.0, 2.0**-5, 2.0**-5 * (1 - 2.0**-12), 1e-40, 3e38]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
@example(scale=0, mean=0.0, width=1.0, edge=65_519.9, seed=1)
@example(scale=-25, mean=0.0, width=1.0, edge=2.0**-5 * (1 - 2.0**-12), seed=1)
@example(scale=127, mean=0.0, width=1.0, edge=3e38, seed=1)
@example(scale=-150, mean=0.0, width=1.0, edge=0.0, seed=1)
def test_half_keeps_its_bound_and_rounding_again_changes_nothing(scale, mean, width, edge, seed):
    """Within 2^-11 of the number or 2^-20 of the slice's largest; decoded as documented, with torch and without."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(2, 7, 9, generator=generator, dtype=torch.float64) * width + mean) * 2.0**scale
    numbers[1, 2, 3] = edge
    before = numbers.clamp(torch.finfo(torch.float32).min, torch.finfo(torch.float32).max).float()
    payload, after = through(Half(), before, "keys")
    exact, largest = before.double(), float(before.double().abs().max())
    error = (after.double() - exact).abs()
    assert bool((error <= torch.maximum(exact.abs() * 2.0**-11, torch.tensor(largest * 2.0**-20))).all())
    assert after.double().reshape(-1).tolist() == literal_half(payload)
    assert bytes_of(through(Half(), after, "keys")[1]) == bytes_of(after)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        assert Half().decode(payload).tobytes() == bytes_of(after)
    kept = not 2.0**-86 <= largest < 2.0**115 and largest > 0
    on_the_edge = 2.0**-87 < largest < 2.0**-84 or 0.999 < largest / 2.0**115 <= 1
    assert len(payload) == RUN.size + before.numel() * (4 if kept else 2) or on_the_edge


@given(data=st.binary(max_size=2048), dtype=st.sampled_from(DTYPES))
@example(data=struct.pack("<2f", float("nan"), 1.0), dtype=torch.float32)
@settings(max_examples=60)
def test_half_keeps_what_it_cannot_round(data, dtype):
    """NaN, infinities and 16-bit numbers are unchanged; a record of 16-bit numbers is a raw one."""
    before = torch.frombuffer(bytearray(data[: len(data) // 8 * 8]) or bytearray(8), dtype=dtype).view(1, -1, 2)
    payload, after = through(Half(), before, "values")
    if dtype != torch.float32 or not bool(before.isfinite().all()):
        assert (payload[0], bytes_of(after)) == (0, bytes_of(before))
    kv = ChunkKV(keys=(before,), values=(before,))
    record = encode_record(kv, identity(*range(before.shape[1])), Half())
    assert Manifest.parse(record.manifest).codec == {"id": "half" if dtype == torch.float32 else "raw"}


def test_half_payloads_of_another_author_are_refused():
    good = RUN.pack(1, -3, 0, 8) + struct.pack("<2e", 1.0, -2.0) + RUN.pack(0, 0, 0, 8) + struct.pack("<2f", 5.0, 6.0)
    assert np.frombuffer(Half().decode(good).tobytes(), "<f4").tolist() == [0.125, -0.25, 5.0, 6.0]
    for wrong in (
        good[:-1],
        good + b"\0",
        good + RUN.pack(0, 0, 0, 1 << 31),
        RUN.pack(2, 0, 0, 16) + bytes(16),
        RUN.pack(1, 101, 0, 16) + bytes(8),
        RUN.pack(1, -101, 0, 16) + bytes(8),
        RUN.pack(1, 0, 1, 16) + bytes(8),
        RUN.pack(0, 1, 0, 16) + bytes(16),
        RUN.pack(1, 0, 0, 14) + bytes(7),
        b"",
    ):
        with pytest.raises(DamagedError):
            Half().decode(wrong, out=np.empty(16, np.uint8))


# ---- q8

ROWS = struct.Struct("<BBHI")
CODES = {1: torch.bfloat16, 2: torch.float16, 3: torch.float32}


def literal_q8(payload: bytes) -> list[torch.Tensor]:
    """docs/formats.md implemented literally, row by row; each slice's numbers in its dtype."""
    found, at = [], 0
    while at < len(payload):
        kind, code, width, count = ROWS.unpack_from(payload, at)
        at += ROWS.size
        dtype = CODES[code]
        if not kind:
            found.append(torch.frombuffer(bytearray(payload[at : at + count]), dtype=dtype))
            at += count
            continue
        numbers: list[torch.Tensor] = []
        for _ in range(count):
            [most] = struct.unpack("<f", bytes(2) + payload[at + width : at + width + 2])
            row = torch.tensor(struct.unpack_from(f"<{width}b", payload, at), dtype=torch.float32)
            numbers.append(row * (torch.tensor(most) / 127))
            at += width + 2
        found.append(torch.cat(numbers).to(dtype))
    return found


@given(
    dtype=st.sampled_from(DTYPES),
    scale=st.integers(-160, 90),
    width=st.sampled_from([1, 2, 7, 64]),
    edge=st.sampled_from([0.0, 1e-40, 2.0**-100, 30_000.0, 2.0**96]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80)
@example(dtype=torch.bfloat16, scale=0, width=64, edge=30_000.0, seed=1)
@example(dtype=torch.float16, scale=-20, width=64, edge=0.0, seed=1)
@example(dtype=torch.float32, scale=-100, width=7, edge=2.0**-100, seed=1)
@example(dtype=torch.float32, scale=-115, width=7, edge=1e-40, seed=1)
def test_q8_keeps_its_bound_and_rounding_again_changes_nothing(dtype, scale, width, edge, seed):
    """Within 0.004 of the row's largest or 2^-100, then rounded to the dtype; decoded as documented."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, 7, width, generator=generator, dtype=torch.float64) * 2.0**scale
    numbers[1, 2, width // 2] = edge
    before = numbers.clamp(-32_000, 32_000).to(dtype) if dtype == torch.float16 else numbers.to(dtype)
    payload, after = through(Q8(), before, "keys")
    assert payload[0] == 1
    assert len(payload) == ROWS.size + 14 * (width + 2)
    exact, found = before.double(), after.double()
    rounding = torch.finfo(dtype).eps / 2 * exact.abs() * 1.01 + torch.finfo(dtype).smallest_normal
    most = torch.maximum(exact.abs().amax(-1, keepdim=True) * 0.004, torch.tensor(2.0**-100))
    assert bool(((found - exact).abs() <= most + rounding).all())
    assert not found[exact.abs().amax(-1) < 0.99 * 2.0**-100].any()
    [literal_numbers] = literal_q8(payload)
    assert torch.equal(literal_numbers, after.reshape(-1))
    assert through(Q8(), after, "keys")[0] == payload


@pytest.mark.parametrize(
    ("dtype", "odd"),
    [
        (torch.float32, torch.nan),
        (torch.bfloat16, -torch.inf),
        (torch.float16, 33_000.0),
        (torch.float32, 2.0**97),
        (torch.float32, torch.finfo(torch.float32).max),
    ],
)
def test_q8_keeps_a_slice_that_it_cannot_round(dtype, odd):
    before, good = like_keys(2, 12, 8).to(dtype), like_keys(2, 12, 8, 3).to(dtype)
    before[1, 3, 2] = odd
    data = bytes_of(before) + bytes_of(good)
    payload = bytes(Q8().encode(data, [slab_of(before, "keys"), slab_of(good, "values")]))
    assert data == bytes_of(before) + bytes_of(good)
    decoded = Q8().decode(payload).tobytes()
    kept, rounded = literal_q8(payload)
    assert decoded == bytes_of(before) + bytes_of(rounded)
    assert bytes_of(kept) == bytes_of(before) != bytes_of(rounded)
    assert Q8().parts(payload) is None


def test_q8_payloads_of_another_author_are_refused():
    good = ROWS.pack(1, 1, 2, 2) + bytes([1, 127, 0, 0x40, 129, 0, 0x80, 0x3F]) + ROWS.pack(0, 1, 0, 4) + b"\1\2\3\4"
    numbers = torch.from_numpy(Q8().decode(good)[:8].copy()).view(torch.bfloat16)
    assert numbers.tolist() == pytest.approx([2 / 127, 2.0, -1.0, 0.0], rel=4e-3)
    for wrong in (
        good[:-1],
        good + b"\0",
        good + ROWS.pack(0, 1, 0, 1 << 31),
        good + ROWS.pack(1, 1, 1 << 15, 1 << 31),
        ROWS.pack(2, 1, 0, 12) + bytes(12),
        ROWS.pack(0, 1, 1, 12) + bytes(12),
        ROWS.pack(1, 1, 0, 12) + bytes(24),
        ROWS.pack(0, 4, 0, 12) + bytes(12),
        ROWS.pack(1, 0, 6, 1) + bytes(8),
        b"",
    ):
        with pytest.raises(DamagedError):
            Q8().decode(wrong, out=np.empty(12, np.uint8))
    with pytest.raises(DamagedError):
        Q8().parts(ROWS.pack(1, 1, 2, 1) + bytes(3))


# ---- quantiser

LOSSY = [Int8(), Int4()]
HEAD = struct.Struct("<BxxxfII")
every_lossy_codec = pytest.mark.parametrize("codec", LOSSY, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slab_of(tensor: torch.Tensor, role: Any) -> KVSlice:
    name: Any = str(tensor.dtype).removeprefix("torch.")
    return KVSlice(role, name, tensor.shape[0], tensor.shape[1], tensor.shape[2])


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def through(codec: Codec, tensor: torch.Tensor, role: str) -> tuple[bytes, torch.Tensor]:
    payload = bytes(codec.encode(bytes_of(tensor), [slab_of(tensor, role)]))
    decoded = codec.decode(payload)
    assert decoded.size == tensor.numel() * tensor.element_size()
    if not decoded.size:
        return payload, torch.empty_like(tensor)
    return payload, torch.from_numpy(decoded).view(tensor.dtype).view(tensor.shape)


def like_keys(heads: int, tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Numbers with a mean and a scale per channel, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(heads, 1, dim, generator=generator))
    return torch.randn(heads, tokens, dim, generator=generator) * scale + 2 * torch.randn(
        heads, 1, dim, generator=generator
    )


def require_bound(payload: bytes, before: torch.Tensor, after: torch.Tensor) -> None:
    """The error of every number is at most half a step plus half a unit in the last place of its dtype."""
    step = HEAD.unpack_from(payload)[1]
    if step == 0:
        assert bytes_of(before) == bytes_of(after)
        return
    last = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}[before.dtype]
    error = (before.double() - after.double()).abs()
    # 2^-25 is half of float16's smallest number; the division x/step rounds too, in float32
    allowed = step / 2 * (1 + 2.0**-8) + 2 * last * after.double().abs() + 2.0**-25
    assert bool((error <= allowed).all())


@every_lossy_codec
@given(
    dtype=st.sampled_from(DTYPES),
    role=st.sampled_from(["keys", "values"]),
    shape=st.tuples(st.integers(1, 3), st.integers(0, 70), st.integers(1, 33)),
    scale=st.integers(-140, 120),
    mean=st.floats(-100, 100),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_error_is_within_half_a_step(codec, dtype, role, shape, scale, mean, seed):
    """Also for huge, tiny and subnormal numbers: finite input stays finite."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.finfo(dtype)
    numbers = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean) * 2.0**scale
    before = numbers.clamp(limits.min, limits.max).to(dtype)
    payload, after = through(codec, before, role)
    assert after.shape == before.shape
    assert bool(after.isfinite().all())
    require_bound(payload, before, after)


@every_lossy_codec
@given(data=st.binary(max_size=4096), dtype=st.sampled_from(DTYPES), role=st.sampled_from(["keys", "values"]))
@settings(max_examples=60)
def test_any_bits_come_back_as_numbers_or_as_they_were(codec, data, dtype, role):
    before = torch.frombuffer(bytearray(data[: len(data) // 8 * 8]) or bytearray(8), dtype=dtype).view(1, -1, 2)
    payload, after = through(codec, before, role)
    if bool(before.isfinite().all()):
        assert bool(after.isfinite().all())
        require_bound(payload, before, after)
    else:
        assert bytes_of(after) == bytes_of(before)


@every_lossy_codec
@every_dtype
@pytest.mark.parametrize("number", [0.0, 1.0, -3.0, 0.0078125, 1e4])
def test_a_constant_stays_almost_what_it_is(codec, dtype, number):
    before = torch.full((2, 50, 16), number).to(dtype)
    payload, after = through(codec, before, "keys")
    assert len(payload) < 400
    assert bool(((after.double() - number).abs() <= abs(number) / 8000 + torch.finfo(dtype).eps * abs(number)).all())


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_constant_keys_whose_mean_is_rounded(codec):
    before = np.full((3, 64, 13), -3.7, np.float32)
    assert (before.mean(axis=1) != before[:, 0]).any()
    kv_slice = KVSlice("keys", "float32", *before.shape)
    after = codec.decode(codec.encode(before.view(np.uint8).reshape(-1), [kv_slice]))
    assert np.allclose(after.view(np.float32), before.reshape(-1), rtol=1e-4)


@every_dtype
@pytest.mark.parametrize(("codec", "most"), [(Int8(), 0.53), (Int4(), 0.30)], ids=repr)
@pytest.mark.parametrize(
    ("heads", "tokens", "dim"),
    [(3, 20, 32), (3, 60, 32), (1, 20, 64), (2, 33, 64), (8, 20, 128), (4, 300, 128), (1, 2048, 64)],
)
def test_size_is_kept_whatever_the_shape(codec, most, dtype, heads, tokens, dim):
    """The promised fraction of bf16's size for every input dtype; with keys and values in one segment or in two."""
    keys = like_keys(heads, tokens, dim).to(dtype)
    values = torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = codec.encode(bytes_of(keys) + bytes_of(values), [slab_of(keys, "keys"), slab_of(values, "values")])
    apart = [len(through(codec, tensor, role)[0]) for tensor, role in ((keys, "keys"), (values, "values"))]
    in_bf16 = 2 * (keys.numel() + values.numel())
    assert memoryview(together).nbytes == sum(apart)
    assert sum(apart) <= most * in_bf16


@pytest.mark.parametrize(
    ("codec", "role", "most"),
    [(Int8(), "keys", 0.006), (Int8(), "values", 0.01), (Int4(), "keys", 0.05), (Int4(), "values", 0.15)],
    ids=repr,
)
def test_precision(codec, role, most):
    before = like_keys(2, 200, 64)
    after = through(codec, before, role)[1]
    assert float((after - before).std() / before.std()) < most


def test_numbers_near_the_end_of_float16_are_kept_as_they_are():
    """Rounding to a multiple of a step could exceed float16's range."""
    before = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(4)) * 300
    before[0, 7, 3] = 40_000.0
    payload, after = through(Int8(), before.half(), "values")
    assert HEAD.unpack_from(payload)[1] == 0
    assert torch.equal(after, before.half())


@every_lossy_codec
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (2, 3, 2)], ids=str)
def test_what_would_not_become_smaller_is_kept(codec, dtype, shape):
    before = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    payload, after = through(codec, before, "values")
    assert len(payload) == HEAD.size + len(bytes_of(before))
    assert torch.equal(after, before)


def test_payloads_of_another_author_are_refused():
    """Each differs from a valid payload in one respect: the dtype, the step, the lengths, or trailing bytes."""
    numbers = (np.arange(6, dtype="<i2") + 128).tobytes()
    body = bytes(Zstd().encode(numbers, [KVSlice("values", "float16", 1, 1, 6)]))

    def head(code: int = 1, step: float = 0.5, nbytes: int = 12, stored: int = len(body)) -> bytes:
        return HEAD.pack(code, step, nbytes, stored)

    assert torch.from_numpy(Int8().decode(head() + body)).view(torch.bfloat16).tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert Int8().decode(head(step=0, stored=12) + bytes(12)).tobytes() == bytes(12)
    for wrong in (
        head(nbytes=10) + body,
        head(nbytes=11) + body,
        head(code=0) + body,
        head(code=4) + body,
        *(head(step=step) + body for step in (0.1, -0.5, 0.0, float("nan"), float("inf"), 2.0**127)),
        head() + body[:-1],
        head() + body + b"\0",
        head(stored=len(body) - 1) + body[:-1],
        head(step=0, stored=12) + bytes(11),
        head(step=0, stored=11) + bytes(11),
        head()[:-1],
        b"",
    ):
        for out in (None, np.empty(12, np.uint8)):
            if wrong or out is not None:
                with pytest.raises(DamagedError):
                    Int8().decode(wrong, out=out)


def test_an_outlier_channel_leaves_the_others_alone():
    """One scale for all channels of a token would lose the small ones; one step for all does not."""
    before = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(3))
    plain = through(Int4(), before, "keys")[1]
    before[:, :, 7] *= 100
    after = through(Int4(), before, "keys")[1]
    others = [c for c in range(64) if c != 7]
    error, usual = ((x - y)[:, :, others].std() for x, y in ((after, before), (plain, before)))
    assert float(error) < 1.5 * float(usual)


def literal(payload: bytes, dtype: torch.dtype) -> list[float]:
    """docs/formats.md implemented literally, slab by slab, number by number."""
    found: list[float] = []
    at = 0
    while at < len(payload):
        _, step, nbytes, stored = HEAD.unpack_from(payload, at)
        body = payload[at + HEAD.size :][:stored]
        at += HEAD.size + stored
        if not step:
            found += torch.frombuffer(bytearray(body), dtype=dtype).double().tolist()
            continue
        size, *lengths = struct.unpack_from("<BII", body)
        assert size == 2
        planes = [zstandard.ZstdDecompressor().decompress(body[9:][: lengths[0]])]
        planes.append(zstandard.ZstdDecompressor().decompress(body[9 + lengths[0] :]))
        assert len(planes[0]) * dtype.itemsize == nbytes
        for low, high in zip(*planes, strict=True):
            multiple = int.from_bytes((low, high), "little", signed=True) - 128
            found.append(torch.tensor(multiple * step, dtype=torch.float64).to(dtype).item())  # a Python float: exact
    return found


@every_lossy_codec
@every_dtype
@pytest.mark.parametrize("wide", [False, True])
def test_the_decoder_is_the_literal_one(codec, dtype, wide):
    """Also of multiples that take more than a byte."""
    before = 0.01 * like_keys(1, 120, 8, seed=2)
    if wide:
        before[:, :, 3] *= 300
        before[:, :, 5] += 100
    payload, after = through(codec, before.to(dtype), "keys")
    step = HEAD.unpack_from(payload)[1]
    assert (float(before.abs().max()) > 128 * step) == (wide or codec.id == "int8")
    assert after.reshape(-1).tolist() == literal(payload, dtype)


@pytest.mark.parametrize(
    ("codec", "dtype"), [(Half(), torch.float32), *((codec, dtype) for codec in (Q8(), *LOSSY) for dtype in DTYPES)]
)
def test_payloads_decode_for_ever_to_the_same_bits(codec, dtype):
    """The stored payload decodes to the stored numbers, which are those of docs/formats.md."""
    data = (FIXTURES / f"{codec.id}-{str(dtype).removeprefix('torch.')}.payload").read_bytes()
    end = 4 + struct.unpack_from("<I", data)[0]
    payload, decoded = data[4:end], data[end:]
    assert codec.decode(payload).tobytes() == decoded
    numbers, before = (torch.frombuffer(bytearray(each), dtype=dtype) for each in (decoded, GOLDEN["slabs"](dtype)[0]))
    read: dict[str, Any] = {"half": literal_half, "q8": lambda payload: torch.cat(literal_q8(payload)).tolist()}
    expected = read.get(codec.id, lambda payload: literal(payload, dtype))(payload)
    assert np.array_equal(numbers.tolist(), expected, equal_nan=True)
    kept = len(decoded) // 3 * 2
    assert decoded[kept:] == bytes_of(before)[kept:]  # the slab with the NaN
    error = float((numbers.double() - before.double())[: len(numbers) // 3 * 2].abs().max())
    assert 0 < error <= (2.1 if codec.id == "q8" else 0.5)


@pytest.mark.parametrize("codec", [Zstd(), Half(), Q8(), *LOSSY], ids=repr)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), end=st.integers(0, 10_000))
@settings(max_examples=200)
def test_damage_is_refused_or_keeps_the_length(codec, at, bit, end):
    before = like_keys(2, 12, 8).bfloat16()
    payload = bytearray(codec.encode(bytes_of(before) * 2, [slab_of(before, "keys"), slab_of(before, "values")]))
    whole = bytes(payload)
    payload[at % len(payload)] ^= 1 << bit
    for damaged in (bytes(payload), whole[: end % len(whole)], whole + whole[: end % len(whole)]):
        if damaged == whole:
            continue
        with contextlib.suppress(DamagedError):
            assert codec.decode(damaged, out=np.empty(768, np.uint8)).size == 768


@pytest.mark.parametrize("codec", [Zstd(), Half(), Q8(), *LOSSY], ids=repr)
@given(payload=st.binary(max_size=80))
def test_noise_is_refused(codec, payload):
    with pytest.raises(DamagedError):
        codec.decode(payload, out=np.empty(16, np.uint8))


@given(
    codec=st.sampled_from([Half(), Q8(), *LOSSY]),
    dtype=st.sampled_from(DTYPES),
    encoding=st.sampled_from(list(Encoding)),
    tokens=st.integers(0, 90),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
@example(codec=Q8(), dtype=torch.bfloat16, encoding=Encoding.STANDALONE, tokens=0, shapes=[(1, 1, 1)], seed=0)
def test_records_of_every_shape(codec, dtype, encoding, tokens, shapes, seed):
    """Any number of KV heads, keys and values of different widths, layers of different shapes, all encodings."""
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
    found = decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
    for before, after in zip((*kv.keys, *kv.values), (*found.keys, *found.values), strict=True):
        assert before.shape == after.shape
        assert before.dtype == after.dtype
        if before.numel():
            assert float((before.float() - after.float()).abs().max()) <= 0.25 * float(before.float().abs().max())


@pytest.mark.parametrize("codec", [Q8(), *LOSSY], ids=repr)
def test_a_head_cut_over_segments(codec):
    kv = ChunkKV(keys=(like_keys(1, 6000, 96).bfloat16(),), values=(like_keys(1, 6000, 96, 5).bfloat16(),))
    record = encode_record(kv, identity(*range(6000)), codec)
    found = decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
    assert len(record.segments) == 4
    for before, after in ((kv.keys[0], found.keys[0]), (kv.values[0], found.values[0])):
        assert float((before.float() - after.float()).std() / before.float().std()) < 0.1
