"""Records of layers that keep something else than keys and values each: one tensor for both, none, states."""

from __future__ import annotations

import runpy
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragkv.attention.kv import ChunkKV, State
from ragkv.attention.shape import LayerShape, StateShape
from ragkv.store import Codec, KVIdentity, Raw, Store, Zstd
from ragkv.store.format.encode import encode_record
from ragkv.store.format.record import SEGMENT_BYTES, Manifest, Segment, pack_shape, summarise
from ragkv.store.format.tensor import decode_record
from ragkv.store.quantiser import Int4, Int8
from ragkv.store.seal import DamagedError, seal
from ragkv.types import Encoding

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "make_typed.py"))
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int64, torch.uint8, torch.bool)
Equal = Callable[[ChunkKV | None, ChunkKV | None], bool]


def of(tokens: int) -> KVIdentity:
    return KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=tuple(range(tokens)))


def noise(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, NaN among them; of bool 0 and 1."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


SHAPES = st.sampled_from([(0, 0, 0), (1, 9, 0), (2, 4, 0), (1, 3, 5), (2, 4, 4)])
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
    codec=st.sampled_from([Raw(), Zstd()]),
    tokens=st.integers(1, 20),
    shapes=st.tuples(SHAPES, SHAPES, SHAPES),
    states=STATES,
    seed=st.integers(0, 99),
)
def test_every_bit_comes_back(equal: Equal, codec: Codec, tokens: int, shapes: Any, states: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = ChunkKV(
        keys=tuple(noise(generator, torch.bfloat16, heads, tokens, dim) for heads, dim, _ in shapes),
        values=tuple(noise(generator, torch.bfloat16, heads, tokens, dim) for heads, _, dim in shapes),
        states=tuple(
            State(layer, name, noise(generator, dtype, *sizes)) for layer, name, dtype, sizes in sorted(states, key=str)
        ),
    )
    record = encode_record(kv, of(tokens), codec)
    parsed = Manifest.parse(record.manifest)
    assert parsed.shape == kv.shape
    assert parsed.pack() == record.manifest
    assert parsed.raw_bytes == kv.nbytes == kv.shape.nbytes(tokens)
    assert parsed.kv_bytes == sum(map(parsed.layer_bytes, range(3)))
    assert parsed.version == struct.unpack_from("<H", record.manifest, 4)[0] == (1 if all_plain(kv) else 2)
    assert summarise(record.manifest)[2:6] == (
        codec.config()["id"],
        len(parsed.segments),
        parsed.stored_bytes,
        parsed.raw_bytes,
    )
    assert summarise(record.manifest).key == record.key == of(tokens).key()
    assert equal(decode_record(parsed, record.segments.__getitem__), kv)


def all_plain(kv: ChunkKV) -> bool:
    return not kv.states and all(all(shape) for shape in kv.shape.layers)


@pytest.fixture
def mixed() -> ChunkKV:
    """A layer with keys and values, a latent one, one with states alone; 2 MiB of one state."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(3))
    return ChunkKV(
        keys=(drawn(2, 7, 8), drawn(1, 7, 12), torch.ones(0, 7, 0)),
        values=(drawn(2, 7, 4), torch.zeros(1, 7, 0), torch.zeros(0, 7, 0)),
        states=(
            State(2, "conv", drawn(3, 5).bfloat16()),
            State(2, "recurrent", drawn(2, 512, 600)),
        ),
    )


@pytest.mark.parametrize("codec", [Raw(), Zstd(), Int8(), Int4()], ids=lambda codec: codec.id)
def test_states_are_kept_to_the_bit_by_every_codec(codec: Codec, mixed: ChunkKV) -> None:
    record = encode_record(mixed, of(7), codec)
    found = decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)
    for state, kept in zip(mixed.states, found.states, strict=True):
        assert state[:2] == kept[:2]
        assert torch.equal(state.value, kept.value)
    lossless = isinstance(codec, Raw | Zstd)
    for layer in (0, 1):
        assert torch.equal(mixed.keys[layer], found.keys[layer]) == lossless
        torch.testing.assert_close(found.keys[layer], mixed.keys[layer], atol=0.3, rtol=0)


class Zeroing(Codec):
    """From another package: it loses everything, and says nothing of states."""

    id = "zeroing"

    def encode(self, buf: Any, slabs: Sequence[Any]) -> bytes:
        return bytes(memoryview(buf).nbytes)

    def decode(self, buf: Any, out: Any = None) -> Any:
        raise NotImplementedError


def test_a_codec_that_does_not_know_of_states_is_not_given_any(mixed: ChunkKV) -> None:
    record = encode_record(mixed, of(7), Zeroing())
    layers = [segment.layer for segment in Manifest.parse(record.manifest).segments]
    assert layers == [0, 1, 3, 4, 4, 4]
    assert not any(map(any, record.segments[:2]))
    stored = b"".join(map(bytes, record.segments[2:]))
    assert stored == b"".join(state.value.reshape(-1).view(torch.uint8).numpy().tobytes() for state in mixed.states)


@pytest.mark.parametrize("codec", [Raw(), Zstd(), Int8()], ids=lambda codec: codec.id)
def test_a_store_reads_them_in_every_way(tmp_path: Path, codec: Codec, mixed: ChunkKV, equal: Equal) -> None:
    with Store.create(tmp_path / "index", codec=codec) as store:
        store.keep_kv(of(7), mixed)
        found = store.get_kv(of(7))
        assert found is not None
        assert equal(store.get_many([of(7)], shape=mixed.shape)[of(7)], found)
        with store.mapped_kv(of(7)) as mapped:
            assert equal(mapped, found)
        reader = store.open_kv(of(7))
        assert reader is not None
        for layer in range(3):
            assert all(map(torch.equal, reader.layer(layer), (found.keys[layer], found.values[layer])))
        if codec.id != "int8":
            assert equal(found, mixed)


def test_what_lies_in_one_piece_is_read_where_it_lies(tmp_path: Path, mixed: ChunkKV) -> None:
    """Latents and small states are views of the map, as keys and values are."""
    with Store.create(tmp_path / "index") as store:
        store.keep_kv(of(7), mixed)
        with store.mapped_kv(of(7)) as first, store.mapped_kv(of(7)) as second:
            assert first is not None
            assert second is not None
            places = [[tensor.data_ptr() for tensor in kv.tensors if tensor.numel()] for kv in (first, second)]
    assert places[0][:-1] == places[1][:-1]
    assert places[0][-1] != places[1][-1]  # of two segments


def test_another_shape_of_states_is_a_miss(tmp_path: Path, mixed: ChunkKV) -> None:
    with Store.create(tmp_path / "index") as store:
        store.keep_kv(of(7), mixed)
        other = mixed.shape._replace(states=mixed.shape.states[:1])
        assert not store.get_many([of(7)], shape=other)
        store.keep_shape("m", other)
        assert not store.has_kv(of(7))
    assert pack_shape(other) != pack_shape(mixed.shape)


def written(
    shapes: Sequence[tuple[int, int, int]],
    segments: Sequence[tuple[int, int, int]],
    states: Sequence[StateShape] = (),
) -> bytes:
    """A manifest of three tokens in bf16, under a right checksum."""
    return Manifest(
        identity=of(3),
        dtype="bfloat16",
        encoded_at=0,
        shapes=tuple(LayerShape(*shape) for shape in shapes),
        codec={"id": "raw"},
        segments=tuple(Segment(*segment, 0) for segment in segments),
        states=tuple(states),
    ).pack()


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
        (LATENT, [(0, 24, 9), (1, 48, 9)], [StateShape(1, "s", "float32", (3, 4))]),  # of no layer
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(bad: Any) -> None:
    parsed = Manifest.parse(written(*GOOD))
    assert (parsed.shapes, parsed.states, parsed.kv_bytes) == (((1, 4, 0),), (STATE((3, 4)),), 24)
    with pytest.raises(DamagedError):
        Manifest.parse(written(*bad))


def test_more_layers_than_any_model_has_are_refused() -> None:
    """They need no byte of a segment, but a tensor each."""
    assert len(Manifest.parse(written([(0, 0, 0)] * (1 << 13), [])).shapes) == 1 << 13
    with pytest.raises(DamagedError, match="8193 layers"):
        Manifest.parse(written([(0, 0, 0)] * ((1 << 13) + 1), []))


def test_what_cannot_be_described_is_not_written() -> None:
    named = [StateShape(0, name, "int8", (1,)) for name in ("", "x" * 65)]
    for state in (STATE((2,) * 9), STATE((0,)), *named):
        with pytest.raises(ValueError, match="holds no state"):
            written(LATENT, [], [state])
    with pytest.raises(ValueError, match="complex64"):
        written(LATENT, [], [StateShape(0, "s", "complex64", (1,))])


def test_a_record_is_of_the_oldest_version_that_can_say_it() -> None:
    """A layer without values is refused where the version says that there is none, and the other way round."""
    for shapes, segments in (([(1, 4, 0)], [(0, 24, 9)]), ([(1, 4, 4)], [(0, 48, 9)])):
        body = bytearray(written(shapes, segments)[:-8])
        version = body[4]
        body[4] = 3 - version
        if version == 2:
            del body[36:44]
        else:
            body[36:36] = bytes(8)
        with pytest.raises(DamagedError, match="version that it does not need"):
            Manifest.parse(seal(bytes(body)))


@given(at=st.integers(4, 10_000), byte=st.integers(0, 255))
def test_a_wrong_manifest_under_a_right_checksum_never_crashes(at: int, byte: int) -> None:
    body = bytearray(written(*GOOD)[:-8])
    body[at % len(body)] = byte
    try:
        parsed = Manifest.parse(seal(bytes(body)))
    except DamagedError:
        return
    assert parsed.raw_bytes == parsed.shape.nbytes(parsed.tokens)


@pytest.mark.parametrize("end", [*range(36, 44), 60, 90, 100])
def test_a_manifest_cut_short_is_refused(end: int) -> None:
    with pytest.raises(DamagedError):
        Manifest.parse(seal(written(*GOOD)[:end]))


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("record-v2-*.bin*")), ids=lambda path: path.stem)
def test_records_of_every_version_decode_for_ever(path: Path, equal: Equal) -> None:
    parts, data = [], path.read_bytes()
    while data:
        end = 4 + struct.unpack_from("<I", data)[0]
        parts.append(data[4:end])
        data = data[end:]
    parsed = Manifest.parse(parts[0])
    assert parsed.identity == GOLDEN["IDENTITY"]
    found = decode_record(parsed, parts[1:].__getitem__)
    if parsed.codec["id"] == "int8":
        assert found.shape == GOLDEN["golden_kv"]().shape
        for kept, state in zip(found.states, GOLDEN["golden_kv"]().states, strict=True):
            assert torch.equal(kept.value, state.value)
    else:
        assert equal(found, GOLDEN["golden_kv"]())


def test_the_fixtures_are_all_there() -> None:
    assert len(list(FIXTURES.glob("record-v2-*.bin"))) == 3
