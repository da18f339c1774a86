"""A record is bit-exact, cut into small segments, strict about what it reads, and readable for ever."""

from __future__ import annotations

import runpy
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ragkv.attention.kv import ChunkKV
from ragkv.attention.shape import KVShape, LayerShape
from ragkv.errors import ConfigError
from ragkv.store import Codec, KVIdentity, Raw, Slab, Zstd
from ragkv.store.format.decode import (
    check_payloads,
    checked_segment,
    decode_segments,
)
from ragkv.store.format.encode import encode_record
from ragkv.store.format.record import SEGMENT_BYTES, Manifest, Segment, pack_shape, summarise
from ragkv.store.format.tensor import decode_record, flat_tensor, layer_tensors
from ragkv.store.seal import DamagedError, seal
from ragkv.types import Encoding

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "make.py"))
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def there_and_back(kv: ChunkKV, identity: KVIdentity, codec: Codec) -> ChunkKV:
    record = encode_record(kv, identity, codec)
    return decode_record(Manifest.parse(record.manifest), lambda index: record.segments[index])


@given(
    dtype=dtypes,
    codec=st.sampled_from([Raw(), Zstd()]),
    tokens=st.integers(0, 9),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4),
    encoded_at=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**32),
)
def test_round_trip(
    equal: Callable[..., bool],
    dtype: torch.dtype,
    codec: Codec,
    tokens: int,
    shapes: list[tuple[int, int, int]],
    encoded_at: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        """Any bits at all: NaN, infinities and denormals too."""
        items = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, items, dtype=torch.uint8, generator=generator).view(dtype)

    kv = ChunkKV(
        keys=tuple(noise(heads, tokens, key_dim) for heads, key_dim, _ in shapes),
        values=tuple(noise(heads, tokens, value_dim) for heads, _, value_dim in shapes),
        encoded_at=encoded_at,
    )
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(tokens)))
    assert equal(there_and_back(kv, identity, codec), kv)


@pytest.mark.parametrize("codec", [Raw(), Zstd()])
@pytest.mark.parametrize(
    ("kv_heads", "tokens", "layer_rows"),
    [
        (4, 150, [1200]),  # keys and values together
        (4, 600, [2400, 2400]),  # each for itself, where one segment would do
        (4, 1100, [4400, 4400]),  # each for itself
        (4, 2000, [4000] * 4),  # two heads at a time
        (1, 6000, [5376, 624] * 2),  # one head is too long: a multiple of TOKEN_STEP
    ],
)
def test_long_layers_are_cut_into_whole_slabs(
    codec: Codec,
    kv_heads: int,
    tokens: int,
    layer_rows: list[int],
    make_kv: Callable[..., ChunkKV],
    identity: Callable[..., KVIdentity],
    equal: Callable[..., bool],
) -> None:
    kv = make_kv(tokens, kv_heads=kv_heads, head_dim=96, layers=2)
    of = identity(*range(tokens))
    record = encode_record(kv, of, codec)
    manifest = Manifest.parse(record.manifest)
    row = 96 * kv.dtype.itemsize
    assert [(segment.layer, segment.raw // row) for segment in manifest.segments] == [
        (layer, rows) for layer in range(2) for rows in layer_rows
    ]
    assert all(segment.raw <= SEGMENT_BYTES for segment in manifest.segments)
    assert manifest.raw_bytes == kv.nbytes
    assert equal(there_and_back(kv, of, codec), kv)


def test_tensors_that_do_not_lie_in_a_row(
    make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity], equal: Callable[..., bool]
) -> None:
    kv = make_kv(8)
    across = ChunkKV(keys=tuple(t[:, ::2] for t in kv.keys), values=tuple(t[:, ::2] for t in kv.values))
    assert equal(there_and_back(across, identity(*range(4)), Raw()), across)


def test_loaded_tensors_are_views_of_one_buffer(
    make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]
) -> None:
    loaded = there_and_back(make_kv(5), identity(*range(5)), Raw())
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*loaded.keys, *loaded.values)}) == 1


def test_what_cannot_be_its_kv_is_refused(make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]) -> None:
    kv = make_kv(3)
    with pytest.raises(ValueError, match="3 tokens"):
        encode_record(kv, identity(1, 2), Raw())
    with pytest.raises(ValueError, match="one dtype"):
        encode_record(make_kv(2, dtype=torch.float64), identity(1, 2), Raw())
    with pytest.raises(ValueError, match="one dtype"):
        encode_record(replace(kv, values=tuple(t.float() for t in kv.values)), identity(1, 2, 3), Raw())


@pytest.fixture(scope="module")
def manifest(make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]) -> bytes:
    return encode_record(make_kv(3), identity(1, 2, 3, prefix_ids=(7,)), Raw()).manifest


def test_every_flipped_bit_of_a_manifest_is_noticed(manifest: bytes) -> None:
    for at in range(len(manifest)):
        damaged = bytearray(manifest)
        damaged[at] ^= 1 << at % 8
        for parse in (Manifest.parse, summarise):
            with pytest.raises(DamagedError):
                parse(bytes(damaged))


def test_every_cut_of_a_manifest_is_noticed(manifest: bytes) -> None:
    for end in range(len(manifest)):
        for parse in (Manifest.parse, summarise):
            with pytest.raises(DamagedError):
                parse(manifest[:end])


@given(at=st.integers(6, 10_000), byte=st.integers(0, 255))
def test_a_wrong_manifest_under_a_right_checksum_never_crashes(manifest: bytes, at: int, byte: int) -> None:
    """Another program's mistake rather than the disk's: it may parse as another record, or be refused."""
    body = bytearray(manifest[:-8])
    body[at % len(body)] = byte
    with suppress(DamagedError):
        summarise(seal(bytes(body)))
    try:
        parsed = Manifest.parse(seal(bytes(body)))
    except DamagedError:
        return
    assert summarise(seal(bytes(body)))[4:6] == (parsed.stored_bytes, parsed.raw_bytes)
    assert sum(map(parsed.layer_bytes, range(len(parsed.shapes)))) == parsed.kv_bytes


def written(
    shapes: list[tuple[int, int, int]],
    segments: list[tuple[int, int, int]],
    tokens: int = 3,
    codec: dict[str, Any] | None = None,
    prefix: int = 0,
) -> bytes:
    """A manifest in bf16, whole and under a right checksum, of `(layer, raw, stored)` segments."""
    encoding = Encoding.PREFIXED if prefix else Encoding.STANDALONE
    ids = {"prefix_ids": tuple(range(prefix)), "chunk_ids": tuple(range(tokens))}
    return Manifest(
        identity=KVIdentity(model="m", encoding=encoding, **ids),
        dtype="bfloat16",
        encoded_at=0,
        shapes=tuple(LayerShape(*shape) for shape in shapes),
        codec={"id": "raw"} if codec is None else codec,
        segments=tuple(Segment(*segment, 0) for segment in segments),
    ).pack()


MIB = SEGMENT_BYTES


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        # a layer of two heads, keys 4 and values 5 numbers wide, 3 tokens: 108 bytes
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(0, 108, 9), (2, 108, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(1, 108, 9)])),
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(1, 108, 9), (0, 108, 9)])),
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(0, 100, 9), (1, 116, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(0, 107, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(0, 108, 9), (0, 0, 9)])),
        (([(2, 4, 5)], [(0, 108, 2 * MIB)]), ([(2, 4, 5)], [(0, 108, 2 * MIB + 1)])),
        (([(2, 4, 5)], [(0, 108, 0)]), ([], [])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(0, 4, 5)], [])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 0, 5)], [(0, 60, 9)])),
        (([(1, 1 << 16, 1)], [(0, 393222, 9)]), ([(1, (1 << 16) + 1, 1)], [(0, 393228, 9)])),
        (([(1 << 16, 1, 1)], [(0, 786432, 9)]), ([((1 << 16) + 1, 1, 1)], [(0, 786444, 9)])),
        (
            ([(1, 1 << 16, 1 << 16)] * 2, [(0, 3 << 18, 9), (1, 3 << 18, 9)]),
            ([(4, 1 << 16, 1 << 16)], [(0, 3 << 20, 9)]),
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(good: Any, bad: Any) -> None:
    """Under a right checksum: somebody wrote it so. Its neighbour, which differs in one number, is read."""
    assert Manifest.parse(written(*good)).shapes == tuple(good[0])
    with pytest.raises(DamagedError):
        Manifest.parse(written(*bad))


def test_a_manifest_of_another_kind_version_or_size_is_refused() -> None:
    body = written([(2, 4, 5)], [(0, 108, 9)])[:-8]
    for other in (b"RKVX" + body[4:], body[:4] + bytes([3]) + body[5:]):
        with pytest.raises(DamagedError, match="not a manifest of version"):
            Manifest.parse(seal(other))
    for other in (body + b"\0", body[:-1], body + body[-20:]):
        with pytest.raises(DamagedError, match="wrong length"):
            Manifest.parse(seal(other))
    for codec in ({"level": 1}, {"id": 3}, {"id": None}):
        with pytest.raises(DamagedError, match="names no codec"):
            Manifest.parse(written([(2, 4, 5)], [(0, 108, 9)], codec=codec))
    with pytest.raises(DamagedError, match="its manifest has 17"):
        Manifest.parse(written([(2, 4, 5)], [(0, 108, 9)], prefix=17 << 18))


def test_a_manifest_says_what_was_packed(make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]) -> None:
    """Every field comes back as its own: prefix and chunk ids, key and value widths, raw and stored bytes."""
    kv = ChunkKV(
        keys=(torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3, 8, dtype=torch.bfloat16)),
        values=(torch.zeros(2, 3, 5, dtype=torch.bfloat16), torch.zeros(1, 3, 6, dtype=torch.bfloat16)),
        encoded_at=7,
    )
    of = identity(11, 12, 13, prefix_ids=(1, 2))
    record = encode_record(kv, of, Zstd())
    parsed = Manifest.parse(record.manifest)
    assert (parsed.identity, parsed.dtype, parsed.encoded_at, parsed.tokens) == (of, "bfloat16", 7, 3)
    assert parsed.shapes == ((2, 4, 5), (1, 8, 6))
    assert parsed.shape == kv.shape
    assert parsed.codec == {"id": "zstd", "level": 1}
    assert parsed.raw_bytes == kv.nbytes == sum(map(parsed.layer_bytes, range(2)))
    stored = [memoryview(payload).nbytes for payload in record.segments]
    assert [segment.stored for segment in parsed.segments] == stored
    assert parsed.stored_bytes == record.stored_bytes == sum(stored) != parsed.raw_bytes
    assert record.key == of.key()


def test_the_shape_that_a_store_keeps_tells_models_apart() -> None:
    """Equal bytes for equal shapes and no others: not for another dtype, and not for keys and values exchanged."""
    shapes = [
        KVShape(dtype, layers)
        for dtype in ("bfloat16", "float16", "float32")
        for layers in (((2, 4, 5),), ((2, 5, 4),), ((2, 4, 5), (2, 4, 5)), ((4, 2, 5),))
    ]
    assert len({pack_shape(shape) for shape in shapes}) == len(shapes)
    assert pack_shape(KVShape("bfloat16", (LayerShape(2, 4, 5),))) == pack_shape(shapes[0])


def test_segments_of_a_layer_are_a_run(make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]) -> None:
    kv = make_kv(2000, kv_heads=4, head_dim=96, layers=3)
    parsed = Manifest.parse(encode_record(kv, identity(*range(2000)), Raw()).manifest)
    runs = [parsed.layer_run(layer) for layer in range(3)]
    assert runs == [range(4), range(4, 8), range(8, 12)]
    for layer, run in enumerate(runs):
        assert {parsed.segments[index].layer for index in run} == {layer}


@pytest.mark.parametrize(
    ("kv_heads", "tokens", "head_dim", "raw"),
    [
        (1, 1 << 9, 128, [1 << 18]),  # keys and values are 256 KiB together: still in one segment
        (1, (1 << 9) + 1, 128, [131328, 131328]),
        (3, 1 << 11, 128, [1 << 20, 1 << 19] * 2),  # the last run of heads holds what is left
        (1, 3 << 11, 128, [1 << 20, 1 << 19] * 2),  # as does the last run of tokens
        (1, 40, 1 << 15, [1 << 20, 1 << 20, 1 << 19] * 2),  # 16 tokens are a segment: fewer than a step
    ],
)
def test_where_the_cuts_are(kv_heads: int, tokens: int, head_dim: int, raw: list[int]) -> None:
    keys = torch.zeros(kv_heads, tokens, head_dim, dtype=torch.bfloat16)
    identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(tokens)))
    record = encode_record(ChunkKV(keys=(keys,), values=(keys,)), identity, Raw())
    assert [segment.raw for segment in Manifest.parse(record.manifest).segments] == raw


def test_missing_short_and_changed_segments_are_noticed(
    make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]
) -> None:
    record = encode_record(make_kv(3), identity(1, 2, 3), Raw())
    parsed = Manifest.parse(record.manifest)
    payload = bytes(record.segments[1])
    replacements: list[Any] = [None, payload[:-1], payload + b"\0", payload[:-1] + bytes([payload[-1] ^ 1])]
    for replacement in replacements:
        with pytest.raises(DamagedError, match="segment 1"):
            decode_record(parsed, {0: record.segments[0], 1: replacement}.get)


def test_a_codec_that_is_not_installed_is_named(
    make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]
) -> None:
    record = encode_record(make_kv(3), identity(1, 2, 3), Raw())
    foreign = replace(Manifest.parse(record.manifest), codec={"id": "theirs"})
    with pytest.raises(ConfigError, match="theirs"):
        decode_record(Manifest.parse(foreign.pack()), record.segments.__getitem__)


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("record-v1-*.bin")), ids=lambda path: path.stem)
def test_records_of_every_version_decode_for_ever(path: Path, equal: Callable[..., bool]) -> None:
    parts, data = [], path.read_bytes()
    while data:
        end = 4 + struct.unpack_from("<I", data)[0]
        parts.append(data[4:end])
        data = data[end:]
    parsed = Manifest.parse(parts[0])
    assert parsed.identity == GOLDEN["IDENTITY"]
    assert equal(decode_record(parsed, parts[1:].__getitem__), GOLDEN["golden_kv"](getattr(torch, parsed.dtype)))


def test_the_fixtures_are_all_there() -> None:
    assert len(list(FIXTURES.glob("record-v1-*.bin"))) == 6


def wide_and_narrow() -> ChunkKV:
    """Keys 4 and values 5 numbers wide in one layer, 8 and 6 in the other."""
    generator = torch.Generator().manual_seed(1)
    shapes = [((2, 3, 4), (2, 3, 5)), ((1, 3, 8), (1, 3, 6))]
    drawn = [[torch.randn(shape, generator=generator).bfloat16() for shape in pair] for pair in shapes]
    return ChunkKV(keys=tuple(pair[0] for pair in drawn), values=tuple(pair[1] for pair in drawn))


def test_a_layer_read_on_its_own_is_the_layer(identity: Callable[..., KVIdentity], equal: Callable[..., bool]) -> None:
    kv = wide_and_narrow()
    record = encode_record(kv, identity(1, 2, 3), Zstd())
    manifest = Manifest.parse(record.manifest)
    assert equal(there_and_back(kv, identity(1, 2, 3), Zstd()), kv)
    for layer in range(2):
        buffer = np.empty(manifest.layer_bytes(layer), np.uint8)
        decode_segments(manifest, Zstd(), manifest.layer_run(layer), record.segments.__getitem__, buffer)
        keys, values = layer_tensors(manifest, layer, flat_tensor(manifest, buffer))
        assert torch.equal(keys, kv.keys[layer])
        assert torch.equal(values, kv.values[layer])


def test_a_segment_of_another_length_than_its_manifest_says_is_damage(identity: Callable[..., KVIdentity]) -> None:
    """The right bytes under a right checksum: whoever wrote the manifest knew neither."""
    record = encode_record(wide_and_narrow(), identity(1, 2, 3), Zstd())
    parsed = Manifest.parse(record.manifest)
    assert checked_segment(parsed, 1, record.segments[1]) == record.segments[1]
    first, second = parsed.segments
    lying = replace(parsed, segments=(first, second._replace(stored=second.stored + 1)))
    with pytest.raises(DamagedError, match="segment 1"):
        checked_segment(lying, 1, record.segments[1])
    with pytest.raises(DamagedError, match="segment 1 is not as long"):  # and before memory is taken for it
        decode_record(lying, record.segments.__getitem__)


@pytest.mark.parametrize(("segments", "reads"), [(64, True), (66, False)])
def test_a_few_bytes_that_claim_to_be_a_large_record_are_a_bomb(segments: int, reads: bool) -> None:
    """Up to 64 MiB anything goes; beyond, no KV is so compressible."""
    zeros = bytes(Zstd().encode(bytes(MIB), [Slab("keys", "bfloat16", 1, 1, MIB // 2)]))
    digest = xxhash.xxh3_64_intdigest(zeros)
    bomb = Manifest(
        identity=KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(1024))),
        dtype="bfloat16",
        encoded_at=0,
        shapes=(LayerShape(2 * segments, 128, 128),),
        codec=Zstd().config(),
        segments=(Segment(0, MIB, len(zeros), digest),) * segments,
    )
    assert Manifest.parse(bomb.pack()) == bomb
    if reads:
        assert decode_record(bomb, lambda _: zeros).nbytes == segments * MIB
        return
    for read in (decode_record, check_payloads):
        with pytest.raises(DamagedError, match="it claims"):
            read(bomb, lambda _: zeros)
