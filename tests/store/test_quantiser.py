"""Lossy codecs: bounded by half a step, within their bits, decoded as docs/formats.md says, and hard to break."""

from __future__ import annotations

import contextlib
import runpy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.attention.kv import ChunkKV
from ragkv.errors import ConfigError
from ragkv.store import Codec, Int4, Int8, KVIdentity, Slab
from ragkv.store.format.encode import encode_record
from ragkv.store.format.identity import LONG_WORDS
from ragkv.store.format.record import Manifest
from ragkv.store.format.tensor import decode_record
from ragkv.store.seal import DamagedError
from ragkv.types import Encoding

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "make_payload.py"))
CODECS = [Int8(), Int4()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD = struct.Struct("<BBBxfIII")

every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def slab_of(tensor: torch.Tensor, role: Any) -> Slab:
    name: Any = str(tensor.dtype).removeprefix("torch.")
    return Slab(role, name, tensor.shape[0], tensor.shape[1], tensor.shape[2])


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
    """A mean and a scale per channel, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(0.7 * torch.randn(heads, 1, dim, generator=generator))
    return torch.randn(heads, tokens, dim, generator=generator) * scale + 2 * torch.randn(
        heads, 1, dim, generator=generator
    )


def require_bound(payload: bytes, before: torch.Tensor, after: torch.Tensor) -> None:
    """No number is off by more than half a step and half a unit in the last place of its dtype."""
    step = HEAD.unpack_from(payload)[3]
    if step == 0:
        assert bytes_of(before) == bytes_of(after)
        return
    last = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}[before.dtype]
    error = (before.double() - after.double()).abs()
    # 2^-25 is half of float16's least number; the division x/step rounds too, in float32
    allowed = step / 2 * (1 + 2.0**-8) + 2 * last * after.double().abs() + 2.0**-25
    assert bool((error <= allowed).all())


@every_codec
@given(
    dtype=st.sampled_from(DTYPES),
    role=st.sampled_from(["keys", "values"]),
    shape=st.tuples(st.integers(1, 3), st.integers(0, 70), st.integers(1, 33)),
    scale=st.integers(-140, 120),
    mean=st.floats(-100, 100),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_error_is_within_half_a_step(
    codec: Codec,
    dtype: torch.dtype,
    role: str,
    shape: tuple[int, int, int],
    scale: int,
    mean: float,
    seed: int,
) -> None:
    """Huge, tiny and subnormal numbers too: finite in, finite out."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.finfo(dtype)
    numbers = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean) * 2.0**scale
    before = numbers.clamp(limits.min, limits.max).to(dtype)
    payload, after = through(codec, before, role)
    assert after.shape == before.shape
    assert bool(after.isfinite().all())
    require_bound(payload, before, after)


@every_codec
@given(data=st.binary(max_size=4096), dtype=st.sampled_from(DTYPES), role=st.sampled_from(["keys", "values"]))
@settings(max_examples=60, deadline=None)
def test_any_bits_come_back_as_numbers_or_as_they_were(
    codec: Codec, data: bytes, dtype: torch.dtype, role: str
) -> None:
    before = torch.frombuffer(bytearray(data[: len(data) // 8 * 8]) or bytearray(8), dtype=dtype).view(1, -1, 2)
    payload, after = through(codec, before, role)
    if bool(before.isfinite().all()):
        assert bool(after.isfinite().all())
        require_bound(payload, before, after)
    else:
        assert bytes_of(after) == bytes_of(before)


@every_codec
@every_dtype
@pytest.mark.parametrize("number", [0.0, 1.0, -3.0, 0.0078125, 1e4])
def test_a_constant_stays_almost_what_it_is(codec: Codec, dtype: torch.dtype, number: float) -> None:
    before = torch.full((2, 50, 16), number).to(dtype)
    payload, after = through(codec, before, "keys")
    assert len(payload) < 400
    assert bool(((after.double() - number).abs() <= abs(number) / 8000 + torch.finfo(dtype).eps * abs(number)).all())


@every_dtype
@pytest.mark.parametrize(("codec", "most"), [(Int8(), 0.53), (Int4(), 0.30)], ids=repr)
@pytest.mark.parametrize(
    ("heads", "tokens", "dim"),
    [(3, 20, 32), (3, 60, 32), (1, 20, 64), (2, 33, 64), (8, 20, 128), (4, 300, 128), (1, 2048, 64)],
)
def test_size_is_kept_whatever_the_shape(
    codec: Codec, most: float, dtype: torch.dtype, heads: int, tokens: int, dim: int
) -> None:
    """The promised share of bf16, whatever dtype the numbers came in; a segment holds both, or one for each."""
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
def test_precision(codec: Codec, role: str, most: float) -> None:
    before = like_keys(2, 200, 64)
    after = through(codec, before, role)[1]
    assert float((after - before).std() / before.std()) < most


@pytest.mark.parametrize("multiple", [127, 128, 129, -127, -128, -129, 255, 256, -256, -257])
def test_multiples_on_the_edge_of_a_byte(multiple: int) -> None:
    """One number is made so many steps large that one plane of bytes just holds it, or just does not."""
    before = 2 * torch.rand(1, 500, 32, generator=torch.Generator().manual_seed(4)) - 1  # below 127 steps, all others
    step, payload = 0.0, bytes(through(Int8(), before, "values")[0])
    for _ in range(20):  # the number that is set may move the step by its last bits
        if step == HEAD.unpack_from(payload)[3]:
            break
        step = HEAD.unpack_from(payload)[3]
        before[0, 3, 5] = multiple * step
        payload, after = through(Int8(), before, "values")
    assert HEAD.unpack_from(payload)[3] == step
    assert float(before[0].abs().flatten().topk(2).values[1]) < 126 * step
    assert float(after[0, 3, 5]) == multiple * step
    require_bound(payload, before, after)


def test_numbers_near_the_end_of_float16_are_kept_as_they_are() -> None:
    """A multiple of a step could round beyond what float16 holds."""
    before = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(4)) * 300
    before[0, 7, 3] = 40_000.0
    payload, after = through(Int8(), before.half(), "values")
    assert HEAD.unpack_from(payload)[3] == 0
    assert torch.equal(after, before.half())


@every_codec
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 3), (2, 3, 2)], ids=str)
def test_what_would_not_become_smaller_is_kept(codec: Codec, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    payload, after = through(codec, before, "values")
    assert len(payload) == HEAD.size + len(bytes_of(before))
    assert torch.equal(after, before)


def test_payloads_of_another_author_are_refused() -> None:
    """Each is one step from a payload that is read: planes, their lengths, the step, and what follows."""
    compressor = zstandard.ZstdCompressor()
    six, two = (compressor.compress(bytes(range(1, size + 1))) for size in (6, 2))

    def made(planes: list[bytes], offsets: list[bytes], step: float, shape: tuple[int, int, int] = (1, 3, 2)) -> bytes:
        head = HEAD.pack(1, len(planes), len(offsets), step, *shape)
        frames = [*offsets, *planes]
        return head + b"".join(struct.pack("<I", len(frame)) for frame in frames) + b"".join(frames)

    good = made([six], [two], 0.5)
    numbers = torch.from_numpy(Int8().decode(good)).view(torch.bfloat16)
    assert numbers.tolist() == [(i + 1 + i % 2 + 1) / 2 for i in range(6)]
    kept = HEAD.pack(1, 0, 0, 0.0, 1, 3, 2) + bytes(12)
    assert Int8().decode(kept).tobytes() == bytes(12)
    for wrong in (
        made([six, six, six], [], 0.5),
        made([six], [two, two, two], 0.5),
        made([two], [two], 0.5),
        made([six], [six], 0.5),
        made([six, two], [], 0.5),
        made([six], [two], 0.1),  # more significant bits than a step has
        made([six], [two], -0.5),
        made([six], [two], 0.0),
        made([six], [two], float("nan")),
        made([six], [two], float("inf")),
        made([compressor.compress(b"")], [], 0.5, (1, 0, 2)),
        made([six + two], [two], 0.5),
        good[:-1],
        good + b"\0",
        kept[:-1],
        HEAD.pack(1, 0, 0, 0.5, 1, 3, 2) + bytes(12),
        HEAD.pack(1, 0, 1, 0.0, 1, 3, 2) + bytes(12),
        HEAD.pack(4, 0, 0, 0.0, 1, 3, 2) + bytes(12),
        HEAD.pack(0, 0, 0, 0.0, 1, 3, 2) + bytes(6),
        b"",
    ):
        for out in (None, np.empty(12, np.uint8)):
            with pytest.raises(DamagedError):
                Int8().decode(wrong, out=out)


def test_an_outlier_channel_leaves_the_others_alone() -> None:
    """One scale for a token's channels would lose the small ones; a step for all does not."""
    before = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(3))
    plain = through(Int4(), before, "keys")[1]
    before[:, :, 7] *= 100
    after = through(Int4(), before, "keys")[1]
    others = [c for c in range(64) if c != 7]
    error, usual = ((x - y)[:, :, others].std() for x, y in ((after, before), (plain, before)))
    assert float(error) < 1.5 * float(usual)


def test_finer_bits_are_closer() -> None:
    before = like_keys(2, 100, 32)
    errors = [
        float((through(Int4(key_bits=bits), before, "keys")[1] - before).square().mean()) for bits in (3.0, 5.0, 7.0)
    ]
    assert errors[0] > 8 * errors[1] > 64 * errors[2]


@pytest.mark.parametrize("bits", [0.5, 13, float("nan"), "four"])
def test_wrong_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="key_bits"):
        Int4(key_bits=bits)


def literal(payload: bytes, dtype: torch.dtype) -> list[float]:
    """docs/formats.md read word for word, one slab after another, one number after another."""
    found: list[float] = []
    at = 0
    while at < len(payload):
        _, planes, offset_planes, step, heads, tokens, dim = HEAD.unpack_from(payload, at)
        at += HEAD.size
        if not planes:
            size = heads * tokens * dim * dtype.itemsize
            found += torch.frombuffer(bytearray(payload[at : at + size]), dtype=dtype).double().tolist()
            at += size
            continue
        lengths = struct.unpack_from(f"<{planes + offset_planes}I", payload, at)
        at += 4 * len(lengths)
        frames = []
        for length in lengths:
            frames.append(zstandard.ZstdDecompressor().decompress(payload[at : at + length]))
            at += length
        offsets = integers(frames[:offset_planes]) if offset_planes else [0] * (heads * dim)
        for place, number in enumerate(integers(frames[offset_planes:])):
            head, channel = place // (tokens * dim), place % dim
            exact = (number + offsets[head * dim + channel]) * step  # a Python float: exact
            found.append(torch.tensor(exact, dtype=torch.float64).to(dtype).item())
    return found


@every_codec
@every_dtype
@pytest.mark.parametrize("planes", [1, 2])
def test_every_path_of_the_decoder_is_the_literal_one(codec: Codec, dtype: torch.dtype, planes: int) -> None:
    """One plane or two, with offsets; bfloat16 has a path of its own where the numbers are small."""
    before = 0.01 * like_keys(1, 120, 8, seed=2)
    if planes == 2:
        before[:, :, 3] *= 300
        before[:, :, 5] += 100
    if codec.id == "int8" and planes == 1:
        codec = Int8(key_bits=6.0)
    payload, after = through(codec, before.to(dtype), "keys")
    assert HEAD.unpack_from(payload)[1] == planes
    assert HEAD.unpack_from(payload)[2] > 0
    assert after.reshape(-1).tolist() == literal(payload, dtype)


def integers(frames: list[bytes]) -> list[int]:
    if len(frames) == 1:
        return [byte - 256 if byte > 127 else byte for byte in frames[0]]
    high = [byte - 256 if byte > 127 else byte for byte in frames[1]]
    return [256 * h + low - 128 for low, h in zip(frames[0], high, strict=True)]


PAYLOADS = sorted(FIXTURES.glob("*.payload"))


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_payloads_decode_for_ever_to_the_same_bits(path: Path) -> None:
    name, _, dtype_name = path.stem.partition("-")
    [codec] = [codec for codec in CODECS if codec.id == name]
    data = path.read_bytes()
    end = 4 + struct.unpack_from("<I", data)[0]
    payload, decoded = data[4:end], data[end:]
    assert codec.decode(payload).tobytes() == decoded
    dtype = getattr(torch, dtype_name)
    numbers = torch.frombuffer(bytearray(decoded), dtype=dtype).double()
    expected = torch.tensor(literal(payload, dtype), dtype=torch.float64)
    assert torch.allclose(numbers, expected, rtol=0, atol=0, equal_nan=True)
    original, _ = GOLDEN["golden_slabs"](dtype)
    before = torch.frombuffer(bytearray(original), dtype=dtype).double()
    kept = len(numbers) // 3 * 2
    assert torch.allclose(numbers[kept:], before[kept:], rtol=0, atol=0, equal_nan=True)  # the slab with the NaN
    assert 0 < float((numbers - before)[:kept].abs().max()) <= 0.5


def test_the_fixtures_are_all_there() -> None:
    assert [path.stem for path in PAYLOADS] == [
        f"{codec}-{dtype}" for codec in ("int4", "int8") for dtype in ("bfloat16", "float16", "float32")
    ]


@every_codec
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), end=st.integers(0, 10_000))
@settings(max_examples=200, deadline=None)
def test_damage_is_refused_or_keeps_the_length(codec: Codec, at: int, bit: int, end: int) -> None:
    before = like_keys(2, 12, 8).bfloat16()
    payload = bytearray(codec.encode(bytes_of(before) * 2, [slab_of(before, "keys"), slab_of(before, "values")]))
    whole = bytes(payload)
    payload[at % len(payload)] ^= 1 << bit
    for damaged in (bytes(payload), whole[: end % len(whole)], whole + whole[: end % len(whole)]):
        if damaged == whole:
            continue
        with contextlib.suppress(DamagedError):
            assert codec.decode(damaged, out=np.empty(768, np.uint8)).size == 768


@every_codec
@given(payload=st.binary(max_size=80))
def test_noise_is_refused(codec: Codec, payload: bytes) -> None:
    with pytest.raises(DamagedError):
        codec.decode(payload, out=np.empty(16, np.uint8))


@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(DTYPES),
    encoding=st.sampled_from(list(Encoding)),
    tokens=st.integers(0, 90),
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_records_of_every_shape(
    codec: Codec,
    dtype: torch.dtype,
    encoding: Encoding,
    tokens: int,
    shapes: list[tuple[int, int, int]],
    seed: int,
) -> None:
    """Any number of KV heads, keys and values of different widths, layers of different shapes, all encodings."""
    kv = ChunkKV(
        keys=tuple(like_keys(heads, tokens, dim, seed).to(dtype) for heads, dim, _ in shapes),
        values=tuple(like_keys(heads, tokens, dim, seed + 1).to(dtype) for heads, _, dim in shapes),
        encoded_at=7,
    )
    identity = KVIdentity(
        model="m",
        encoding=encoding,
        prefix_ids=tuple(range({Encoding.PREFIXED: 2, Encoding.LONG: LONG_WORDS}.get(encoding, 0))),
        chunk_ids=tuple(range(tokens)),
    )
    record = encode_record(kv, identity, codec)
    found = decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
    for before, after in zip((*kv.keys, *kv.values), (*found.keys, *found.values), strict=True):
        assert before.shape == after.shape
        assert before.dtype == after.dtype
        if before.numel():
            assert float((before.float() - after.float()).abs().max()) <= 0.25 * float(before.float().abs().max())


@every_codec
def test_a_head_cut_over_segments(codec: Codec, identity: Callable[..., KVIdentity]) -> None:
    kv = ChunkKV(keys=(like_keys(1, 6000, 96).bfloat16(),), values=(like_keys(1, 6000, 96, 5).bfloat16(),))
    record = encode_record(kv, identity(*range(6000)), codec)
    found = decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
    assert len(record.segments) == 4
    for before, after in ((kv.keys[0], found.keys[0]), (kv.values[0], found.values[0])):
        assert float((before.float() - after.float()).std() / before.float().std()) < 0.1
