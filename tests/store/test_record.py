"""A record is exact, cut into small segments, strict about its content, and readable by every later version."""

import runpy
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from storekit import equal, identity, make_kv

from ragkv.attention.kv import ChunkKV, State
from ragkv.errors import ConfigError
from ragkv.store import Codec, KVIdentity, KVSlice, Raw, Store, Zstd, record
from ragkv.store.codecs import DamagedError, Int4, Int8, add_checksum
from ragkv.store.record import (
    SEGMENT_BYTES,
    Manifest,
    RecordSegment,
    check_payloads,
    checked_segment,
    decode_record,
    drop_pool,
    encode_record,
    new_buffer,
    pack_shape,
    pack_states,
    parse_states,
    pooled_bytes,
    stored_sizes,
)
from ragkv.types import Encoding, KVShape, LayerShape, StateShape

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "golden.py"))
RECORDS = sorted(FIXTURES.glob("record-v*.bin"))


def there_and_back(kv: ChunkKV, identity: KVIdentity, codec: Codec) -> ChunkKV:
    record = encode_record(kv, identity, codec)
    return decode_record(Manifest.parse(record.manifest), lambda index: record.segments[index])


@pytest.mark.parametrize("codec", [Raw(), Zstd()])
@pytest.mark.parametrize(
    ("kv_heads", "tokens", "head_dim", "rows"),
    [
        (4, 150, 96, [1200]),  # keys and values together
        (4, 600, 96, [2400, 2400]),  # separate, although each pair would fit in one segment
        (4, 1100, 96, [4400, 4400]),  # separate
        (4, 2000, 96, [4000] * 4),  # two heads at a time
        (1, 6000, 96, [5376, 624] * 2),  # one head is too long: a multiple of TOKEN_STEP
        (1, 1 << 10, 128, [1 << 11]),  # keys and values are 512 KiB together: still one segment
        (1, (1 << 10) + 1, 128, [1025, 1025]),
        (3, 1 << 11, 128, [1 << 12, 1 << 11] * 2),  # the last run of heads has the remainder
        (1, 3 << 11, 128, [1 << 12, 1 << 11] * 2),  # the last run of tokens has the remainder
        (1, 40, 1 << 15, [16, 16, 8] * 2),  # 16 tokens are a segment: fewer than a step
    ],
)
def test_long_layers_are_cut_into_whole_slabs(codec, kv_heads, tokens, head_dim, rows):
    kv = make_kv(tokens, kv_heads=kv_heads, head_dim=head_dim, layers=2)
    of = identity(*range(tokens))
    record = encode_record(kv, of, codec)
    manifest = Manifest.parse(record.manifest)
    row = head_dim * kv.dtype.itemsize
    assert [(segment.layer, segment.raw) for segment in manifest.segments] == [
        (layer, row * count) for layer in range(2) for count in rows
    ]
    assert all(segment.raw <= SEGMENT_BYTES for segment in manifest.segments)
    assert manifest.raw_bytes == kv.nbytes
    assert equal(there_and_back(kv, of, codec), kv)


def test_tensors_that_do_not_lie_in_a_row():
    kv = make_kv(8)
    across = ChunkKV(keys=tuple(t[:, ::2] for t in kv.keys), values=tuple(t[:, ::2] for t in kv.values))
    assert equal(there_and_back(across, identity(*range(4)), Raw()), across)


def test_loaded_tensors_are_views_of_one_buffer():
    loaded = there_and_back(make_kv(5), identity(*range(5)), Raw())
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*loaded.keys, *loaded.values)}) == 1


def test_what_cannot_be_its_kv_is_refused():
    kv = make_kv(3)
    with pytest.raises(ValueError, match="3 tokens"):
        encode_record(kv, identity(1, 2), Raw())
    with pytest.raises(ValueError, match="one dtype"):
        encode_record(make_kv(2, dtype=torch.float64), identity(1, 2), Raw())
    with pytest.raises(ValueError, match="one dtype"):
        encode_record(replace(kv, values=tuple(t.float() for t in kv.values)), identity(1, 2, 3), Raw())


@pytest.fixture(scope="module")
def manifest() -> bytes:
    return encode_record(make_kv(3), identity(1, 2, 3, prefix_ids=(7,)), Raw()).manifest


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_noticed(manifest):
    for at in range(len(manifest)):
        damaged = bytearray(manifest)
        damaged[at] ^= 1 << at % 8
        for wrong in (bytes(damaged), manifest[:at]):
            for parse in (Manifest.parse, stored_sizes):
                with pytest.raises(DamagedError):
                    parse(wrong)


def written(shapes, segments, states=(), tokens=3, codec=None, prefix=0):
    """A manifest in bf16, complete and with a right checksum, of `(layer, raw, stored)` segments."""
    encoding = Encoding.PREFIXED if prefix else Encoding.STANDALONE
    ids = {"prefix_ids": tuple(range(prefix)), "chunk_ids": tuple(range(tokens))}
    return Manifest(
        identity=KVIdentity(model="m", encoding=encoding, **ids),
        dtype="bfloat16",
        encoded_at=0,
        shapes=tuple(LayerShape(*shape) for shape in shapes),
        codec={"id": "raw"} if codec is None else codec,
        segments=tuple(RecordSegment(*segment, 0) for segment in segments),
        states=tuple(states),
    ).pack()


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        # one layer of two heads, keys 4 and values 5 wide, 3 tokens: 108 bytes
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(0, 108, 9), (2, 108, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(1, 108, 9)])),
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(1, 108, 9), (0, 108, 9)])),
        (([(2, 4, 5)] * 2, [(0, 108, 9), (1, 108, 9)]), ([(2, 4, 5)] * 2, [(0, 100, 9), (1, 116, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(0, 107, 9)])),
        (([(2, 4, 5)], [(0, 108, 9)]), ([(2, 4, 5)], [(0, 108, 9), (0, 0, 9)])),
        (([(2, 4, 5)], [(0, 108, 2 * SEGMENT_BYTES)]), ([(2, 4, 5)], [(0, 108, 2 * SEGMENT_BYTES + 1)])),
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
def test_a_manifest_that_contradicts_itself_is_refused(good, bad):
    """The checksum is right: its author wrote it so. A manifest that differs in one number is accepted."""
    assert Manifest.parse(written(*good)).shapes == tuple(good[0])
    with pytest.raises(DamagedError):
        Manifest.parse(written(*bad))


def test_a_manifest_of_another_kind_version_or_size_is_refused():
    body = written([(2, 4, 5)], [(0, 108, 9)])[:-8]
    for other in (b"RKVX" + body[4:], body[:4] + bytes([3]) + body[5:]):
        with pytest.raises(DamagedError, match="not a manifest of version"):
            Manifest.parse(add_checksum(other))
    for other in (body + b"\0", body[:-1], body + body[-20:]):
        with pytest.raises(DamagedError, match="wrong length"):
            Manifest.parse(add_checksum(other))
    for codec in ({"level": 1}, {"id": 3}, {"id": None}):
        with pytest.raises(DamagedError, match="names no codec"):
            Manifest.parse(written([(2, 4, 5)], [(0, 108, 9)], codec=codec))
    with pytest.raises(DamagedError, match="its manifest has 17"):
        Manifest.parse(written([(2, 4, 5)], [(0, 108, 9)], prefix=17 << 18))


def test_the_shape_that_a_store_keeps_tells_models_apart():
    """Equal bytes exactly for equal shapes: another dtype or swapped keys and values give other bytes."""
    shapes = [
        KVShape(dtype, layers)
        for dtype in ("bfloat16", "float16", "float32")
        for layers in (((2, 4, 5),), ((2, 5, 4),), ((2, 4, 5), (2, 4, 5)), ((4, 2, 5),))
    ]
    assert len({pack_shape(shape) for shape in shapes}) == len(shapes)
    assert pack_shape(KVShape("bfloat16", (LayerShape(2, 4, 5),))) == pack_shape(shapes[0])


def test_missing_short_and_changed_segments_are_noticed():
    record = encode_record(make_kv(3), identity(1, 2, 3), Raw())
    parsed = Manifest.parse(record.manifest)
    payload = bytes(record.segments[1])
    replacements: list[Any] = [None, payload[:-1], payload + b"\0", payload[:-1] + bytes([payload[-1] ^ 1])]
    for replacement in replacements:
        with pytest.raises(DamagedError, match="segment 1"):
            decode_record(parsed, {0: record.segments[0], 1: replacement}.get)


def test_a_codec_that_is_not_installed_is_named():
    record = encode_record(make_kv(3), identity(1, 2, 3), Raw())
    foreign = replace(Manifest.parse(record.manifest), codec={"id": "theirs"})
    with pytest.raises(ConfigError, match="theirs"):
        decode_record(Manifest.parse(foreign.pack()), record.segments.__getitem__)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_of_every_version_decode_for_ever(path):
    parts, data = [], path.read_bytes()
    while data:
        end = 4 + struct.unpack_from("<I", data)[0]
        parts.append(data[4:end])
        data = data[end:]
    parsed = Manifest.parse(parts[0])
    assert parsed.identity == GOLDEN["IDENTITY"]
    result = decode_record(parsed, parts[1:].__getitem__)
    if "plain" in path.stem:
        assert equal(result, GOLDEN["plain_kv"](getattr(torch, parsed.dtype)))
        return
    wanted = GOLDEN["typed_kv"]()
    if parsed.codec["id"] != "int8":
        assert equal(result, wanted)
    assert result.shape == wanted.shape
    for kept, state in zip(result.states, wanted.states, strict=True):
        assert torch.equal(kept.value, state.value)


def test_the_fixtures_are_all_there():
    assert [path.stem[:15] for path in RECORDS] == ["record-v2-plain"] * 7 + ["record-v2-typed"] * 3


def test_a_segment_of_another_length_than_its_manifest_says_is_damage():
    """The bytes and the checksums are right; only the manifest's length is wrong."""
    record = encode_record(make_kv(3), identity(1, 2, 3), Zstd())
    parsed = Manifest.parse(record.manifest)
    assert checked_segment(parsed, 1, record.segments[1]) == record.segments[1]
    first, second = parsed.segments
    lying = replace(parsed, segments=(first, second._replace(stored=second.stored + 1)))
    with pytest.raises(DamagedError, match="segment 1"):
        checked_segment(lying, 1, record.segments[1])
    with pytest.raises(DamagedError, match="segment 1 is not as long"):  # before memory is allocated
        decode_record(lying, record.segments.__getitem__)


@pytest.mark.parametrize(("segments", "reads"), [(64, True), (66, False)])
def test_a_few_bytes_that_claim_to_be_a_large_record_are_a_bomb(segments, reads):
    """Any ratio is accepted up to 64 MiB; beyond that, no KV is so compressible."""
    zeros = bytes(Zstd().encode(bytes(SEGMENT_BYTES), [KVSlice("keys", "bfloat16", 1, 1, SEGMENT_BYTES // 2)]))
    digest = xxhash.xxh3_64_intdigest(zeros)
    bomb = Manifest(
        identity=KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(1024))),
        dtype="bfloat16",
        encoded_at=0,
        shapes=(LayerShape(2 * segments, 128, 128),),
        codec=Zstd().config(),
        segments=(RecordSegment(0, SEGMENT_BYTES, len(zeros), digest),) * segments,
    )
    assert Manifest.parse(bomb.pack()) == bomb
    if reads:
        assert decode_record(bomb, lambda _: zeros).nbytes == segments * SEGMENT_BYTES
        return
    for read in (decode_record, check_payloads):
        with pytest.raises(DamagedError, match="it claims"):
            read(bomb, lambda _: zeros)


# ---- typed


DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int64, torch.uint8, torch.bool)


def of(tokens: int) -> KVIdentity:
    return KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(tokens)))


def noise(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, including NaN; 0 and 1 for bool."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


SHAPES = st.sampled_from([(0, 0, 0), (1, 9, 0), (2, 4, 0), (1, 3, 5), (2, 4, 4), (3, 7, 1)])
STATES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["conv", "recurrent", "ſ"]),
        st.sampled_from(DTYPES),
        st.lists(st.integers(1, 5), max_size=4),
    ),
    max_size=5,
    unique_by=lambda state: state[:2],
)


@given(
    kind=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    codec=st.sampled_from([Raw(), Zstd()]),
    tokens=st.integers(0, 20),
    shapes=st.lists(SHAPES, min_size=3, max_size=4),
    states=STATES,
    encoded_at=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**32),
)
def test_every_bit_comes_back(kind, codec, tokens, shapes, states, encoded_at, seed):
    generator = torch.Generator().manual_seed(seed)
    kv = ChunkKV(
        keys=tuple(noise(generator, kind, heads, tokens, dim) for heads, dim, _ in shapes),
        values=tuple(noise(generator, kind, heads, tokens, dim) for heads, _, dim in shapes),
        states=tuple(
            State(layer, name, noise(generator, dtype, *sizes)) for layer, name, dtype, sizes in sorted(states, key=str)
        ),
        encoded_at=encoded_at,
    )
    record = encode_record(kv, of(tokens), codec)
    parsed = Manifest.parse(record.manifest)
    assert (parsed.identity, parsed.shape, parsed.encoded_at) == (of(tokens), kv.shape, encoded_at)
    assert parsed.stored_bytes == record.stored_bytes == sum(memoryview(each).nbytes for each in record.segments)
    assert parsed.pack() == record.manifest
    assert parsed.raw_bytes == kv.nbytes == kv.shape.nbytes(tokens)
    assert stored_sizes(record.manifest) == ("standalone", parsed.stored_bytes, parsed.raw_bytes)
    assert record.key == of(tokens).key()
    assert equal(decode_record(parsed, record.segments.__getitem__), kv)


@pytest.fixture
def mixed() -> ChunkKV:
    """A layer with keys and values, a latent layer, and one with only states; one state has 2 MiB."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    return ChunkKV(
        keys=(drawn(2, 7, 8), drawn(1, 7, 12), torch.ones(0, 7, 0)),
        values=(drawn(2, 7, 4), torch.zeros(1, 7, 0), torch.zeros(0, 7, 0)),
        states=(
            State(2, "conv", drawn(3, 5).bfloat16()),
            State(2, "recurrent", drawn(2, 512, 600)),
        ),
    )


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=lambda codec: codec.id)
def test_states_are_kept_to_the_bit_by_codecs_that_round(codec, mixed):
    result = there_and_back(mixed, of(7), codec)
    for state, kept in zip(mixed.states, result.states, strict=True):
        assert state[:2] == kept[:2]
        assert torch.equal(state.value, kept.value)
    for layer in (0, 1):
        assert not torch.equal(mixed.keys[layer], result.keys[layer])
        torch.testing.assert_close(result.keys[layer], mixed.keys[layer], atol=0.3, rtol=0)


class Zeroing(Codec):
    """A codec from another package that loses everything and does not declare support for states."""

    id = "zeroing"

    def encode(self, buf: Any, slabs: Sequence[Any]) -> bytes:
        return bytes(memoryview(buf).nbytes)

    def decode(self, buf: Any, out: Any = None) -> Any:
        raise NotImplementedError


def test_a_codec_that_does_not_know_of_states_is_not_given_any(mixed):
    record = encode_record(mixed, of(7), Zeroing())
    layers = [segment.layer for segment in Manifest.parse(record.manifest).segments]
    assert layers == [0, 1, 3, 4, 4, 4]
    assert not any(map(any, record.segments[:2]))
    stored = b"".join(map(bytes, record.segments[2:]))
    assert stored == b"".join(state.value.reshape(-1).view(torch.uint8).numpy().tobytes() for state in mixed.states)


@pytest.mark.parametrize("codec", [Raw(), Zstd(), Int8()], ids=lambda codec: codec.id)
def test_a_store_reads_what_was_encoded(tmp_path, codec, mixed):
    with Store.create(tmp_path / "index", codec=codec) as store:
        store.keep_kv(of(7), mixed)
        assert equal(store.get_many([of(7)], shape=mixed.shape)[of(7)], there_and_back(mixed, of(7), codec))


def test_another_shape_of_states_is_a_miss(tmp_path, mixed):
    with Store.create(tmp_path / "index") as store:
        store.keep_kv(of(7), mixed)
        other = mixed.shape._replace(states=mixed.shape.states[:1])
        assert not store.get_many([of(7)], shape=other)
        store.keep_shape("m", other)
        assert not store.has_kv(of(7))
    assert pack_shape(other) != pack_shape(mixed.shape)


STATE = partial(StateShape, 0, "s", "float32")
LATENT = [(1, 4, 0)]
GOOD = (LATENT, [(0, 24, 9), (1, 48, 9)], [STATE((3, 4))])


@pytest.mark.parametrize(
    "bad",
    [
        ([(0, 4, 0)], [(1, 48, 9)], GOOD[2]),  # a width without heads
        ([(0, 0, 4)], [(1, 48, 9)], GOOD[2]),
        ([(1, 0, 4)], [(0, 24, 9), (1, 48, 9)], GOOD[2]),  # values without keys
        ([(1, (1 << 16) + 1, 0)], [(0, 393222, 9), (1, 48, 9)], GOOD[2]),
        (LATENT, [(0, 24, 9)], GOOD[2]),  # the state has no bytes
        (LATENT, [(0, 24, 9), (1, 47, 9)], GOOD[2]),
        (LATENT, [(0, 25, 9), (1, 47, 9)], GOOD[2]),  # a segment across both
        (LATENT, [(0, 24, 9), (2, 48, 9)], GOOD[2]),
        (LATENT, [(1, 48, 9), (0, 24, 9)], GOOD[2]),
        (LATENT, [(0, 24, 9), (1, SEGMENT_BYTES + 4, 9)], [STATE(((SEGMENT_BYTES + 4) // 4,))]),
        (LATENT, [(0, 24, 9), (1, 48, 9)], [STATE((1 << 31,) * 8)]),  # more than any machine has
        (LATENT, [(0, 24, 9), (1, 48, 9), (2, 48, 9)], [STATE((3, 4))] * 2),
        (LATENT, [(0, 24, 9), (1, 48, 9)], [StateShape(1, "s", "float32", (3, 4))]),  # of a layer that does not exist
    ],
)
def test_a_typed_manifest_that_contradicts_itself_is_refused(bad):
    parsed = Manifest.parse(written(*GOOD))
    assert (parsed.shapes, parsed.states, parsed.kv_bytes) == (((1, 4, 0),), (STATE((3, 4)),), 24)
    with pytest.raises(DamagedError):
        Manifest.parse(written(*bad))


def test_a_table_of_states_that_says_more_is_refused():
    """The rest of the manifest is valid."""
    table = pack_states([STATE((3, 4))])
    nine = table[:5] + b"\x09" + table[6:] + bytes(28)
    for wrong in (table + b"\x00", nine):
        with pytest.raises(DamagedError):
            parse_states(memoryview(wrong), 1, 1)


def test_more_layers_than_any_model_has_are_refused():
    """They need no bytes in segments, but one tensor each."""
    assert len(Manifest.parse(written([(0, 0, 0)] * (1 << 13), [])).shapes) == 1 << 13
    with pytest.raises(DamagedError, match="8193 layers"):
        Manifest.parse(written([(0, 0, 0)] * ((1 << 13) + 1), []))


def test_what_cannot_be_described_is_not_written():
    named = [StateShape(0, name, "int8", (1,)) for name in ("", "x" * 65)]
    for state in (STATE((2,) * 9), STATE((0,)), *named):
        with pytest.raises(ValueError, match="holds no state"):
            written(LATENT, [], [state])
    with pytest.raises(ValueError, match="complex64"):
        written(LATENT, [], [StateShape(0, "s", "complex64", (1,))])


@given(typed=st.booleans(), at=st.integers(4, 10_000), byte=st.integers(0, 255))
def test_a_wrong_manifest_under_a_right_checksum_never_crashes(manifest, typed, at, byte):
    """A bug of another program rather than of the disk: it parses as another record, or is refused."""
    body = bytearray((written(*GOOD) if typed else manifest)[:-8])
    body[at % len(body)] = byte
    with suppress(DamagedError):
        stored_sizes(add_checksum(bytes(body)))
    try:
        parsed = Manifest.parse(add_checksum(bytes(body)))
    except DamagedError:
        return
    assert stored_sizes(add_checksum(bytes(body)))[1:] == (parsed.stored_bytes, parsed.raw_bytes)
    assert parsed.raw_bytes == parsed.shape.nbytes(parsed.tokens)


@pytest.mark.parametrize("end", [*range(36, 44), 60, 90, 100])
def test_a_manifest_cut_short_is_refused(end):
    with pytest.raises(DamagedError):
        Manifest.parse(add_checksum(written(*GOOD)[:end]))


# ---- identity

BASE = KVIdentity(model="ab", encoding=Encoding.PREFIXED, prefix_ids=(1, 2), chunk_ids=(3, 4))


def test_another_field_is_another_key():
    others = (
        replace(BASE, model="ac"),
        replace(BASE, encoding=Encoding.STANDALONE, prefix_ids=()),
        replace(BASE, prefix_ids=(1, 5)),
        replace(BASE, prefix_ids=()),
        replace(BASE, chunk_ids=(3, 5)),
        replace(BASE, chunk_ids=(4, 3)),
        replace(BASE, prefix_ids=(1, 2, 3), chunk_ids=(4,)),
    )
    assert len({each.key() for each in (BASE, *others)}) == 1 + len(others)


def test_the_schema_version_is_in_the_key(monkeypatch):
    key = BASE.key()
    monkeypatch.setattr("ragkv.store.record.SCHEMA_VERSION", 3)
    assert BASE.key() != key


def test_the_key_is_stable_and_strict():
    assert BASE.key().hex() == "5eae05acf15e843c49adee8b5b51b6efa2221fef39174ead9bcac8fd8bfa07b0"
    with pytest.raises(ValueError, match="standalone"):
        replace(BASE, encoding=Encoding.STANDALONE)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_ids_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match="32 bits"):
        replace(BASE, chunk_ids=(bad,)).key()


# ---- buffer

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    drop_pool()
    yield
    drop_pool()


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def test_memory_comes_back_when_the_last_tensor_has_gone():
    first = new_buffer(3 * MIB)
    place = address(first)
    tensor = torch.from_numpy(first.view("i2")).view(torch.bfloat16)[5:7]
    del first
    assert pooled_bytes() == 0
    assert address(new_buffer(3 * MIB)) != place  # this buffer is reused at once
    tensor.fill_(1)
    del tensor
    assert pooled_bytes() == 8 * MIB
    taken = [new_buffer(3 * MIB), new_buffer(3 * MIB)]
    assert place in map(address, taken)
    assert pooled_bytes() == 0


def test_buffers_are_writable_bytes_of_the_asked_length():
    for nbytes in (0, 1, MIB - 1, MIB, 2 * MIB + 1):
        made = new_buffer(nbytes)
        assert (made.dtype, made.shape) == (np.uint8, (nbytes,))
        made[:] = 7
        assert address(made) % 16 == 0


def test_spares_that_are_much_too_long_are_left_for_others():
    del [new_buffer(64 * MIB)][0]
    assert pooled_bytes() == 64 * MIB
    small = new_buffer(2 * MIB)
    assert pooled_bytes() == 64 * MIB
    del small
    large = new_buffer(33 * MIB)
    assert pooled_bytes() == 2 * MIB
    del large


def test_only_so_much_is_kept(monkeypatch):
    monkeypatch.setattr(record, "POOL_BYTES", 10 * MIB)
    held = [new_buffer(4 * MIB) for _ in range(5)]
    held.clear()
    assert pooled_bytes() == 8 * MIB
    del [new_buffer(100 * MIB)][0]
    assert pooled_bytes() <= 10 * MIB


def test_no_room_is_a_memory_error():
    with pytest.raises(MemoryError, match="no room"):
        new_buffer(1 << 60)
