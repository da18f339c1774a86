"""One suite for every codec: bit-exact if lossless (else test_quantiser.py), loud about what it did not write."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import ConfigError
from ragkv.store import Codec, Int4, Int8, Raw, Slab, Zstd, codec_from_config, codec_names
from ragkv.store.seal import DamagedError

CODECS = [Raw(), Zstd(), Zstd(level=3)]
ALL = [*CODECS, Int8(), Int4(), Int4(key_bits=6)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def flat(numbers: int, dtype: torch.dtype = torch.bfloat16) -> list[Slab]:
    """Two slabs of a row each, keys and values, of `numbers` altogether."""
    name: Any = str(dtype).removeprefix("torch.")
    return [Slab("keys", name, 1, 1, numbers - numbers // 2), Slab("values", name, 1, 1, numbers // 2)]


every_lossless_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_codec = pytest.mark.parametrize("codec", ALL, ids=repr)


@every_lossless_codec
@given(data=st.binary(max_size=4096), dtype=st.sampled_from(DTYPES))
def test_round_trip(codec: Codec, data: bytes, dtype: torch.dtype) -> None:
    numbers = len(data) // dtype.itemsize
    data = data[: numbers * dtype.itemsize]
    payload = codec.encode(data, flat(numbers, dtype))
    assert codec.decode(payload).tobytes() == data
    out = np.empty(len(data), np.uint8)
    codec.decode(memoryview(payload), out=out)
    assert out.tobytes() == data


@every_lossless_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", [0, 1, 3, 1023, 70_001])
def test_round_trip_of_tensors(codec: Codec, dtype: torch.dtype, numbers: int) -> None:
    tensor = torch.randn(numbers, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = tensor.view(torch.uint8).numpy()
    assert np.array_equal(codec.decode(codec.encode(data.data, flat(numbers, dtype))), data)


@every_codec
def test_config_makes_the_codec_again(codec: Codec) -> None:
    assert codec_from_config(codec.config()) == codec


@every_codec
@pytest.mark.parametrize("length", [0, 6, 10])
def test_another_length_is_refused(codec: Codec, length: int) -> None:
    payload = codec.encode(bytes(8), flat(4))
    with pytest.raises(DamagedError, match="holds 8 bytes"):
        codec.decode(payload, out=np.empty(length, np.uint8))


@given(payload=st.binary(max_size=64))
def test_zstd_refuses_noise(payload: bytes) -> None:
    with pytest.raises(DamagedError):
        Zstd().decode(payload, out=np.empty(16, np.uint8))


@given(at=st.integers(0, 10_000), end=st.integers(0, 10_000))
def test_zstd_refuses_or_survives_damage(at: int, end: int) -> None:
    payload = bytearray(Zstd().encode(np.arange(512, dtype="<u2").tobytes(), flat(512)))
    payload[at % len(payload)] ^= 0x55
    for damaged in (bytes(payload), bytes(payload[: end % len(payload)])):
        with contextlib.suppress(DamagedError):
            assert Zstd().decode(damaged, out=np.empty(1024, np.uint8)).size == 1024


def test_zstd_refuses_what_follows_the_frame() -> None:
    payload = bytes(Zstd().encode(bytes(8), flat(4)))
    with pytest.raises(DamagedError):
        Zstd().decode(payload + b"more")


def payload(item_size: int, *frames: bytes) -> bytes:
    """A zstd payload as docs/formats.md lays it out: item size, lengths of the frames, the frames."""
    return struct.pack(f"<B{len(frames)}I", item_size, *map(len, frames)) + b"".join(frames)


def test_zstd_refuses_what_another_author_wrote() -> None:
    """Frames that are each valid but make no payload together; with `out` and without."""
    packed, unsized = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(write_content_size=False)
    four, two = packed.compress(b"\1\2\3\4"), packed.compress(b"\1\2")
    assert bytes(Zstd().decode(payload(2, four, four))) == b"\1\1\2\2\3\3\4\4"
    for wrong in (
        payload(2, four, two),  # planes of different lengths
        payload(3, four, four, four),  # no number has three bytes
        payload(0),
        payload(2, unsized.compress(b"\1\2\3\4"), unsized.compress(b"\1\2\3\4")),  # of unknown length
        payload(2, four + two, four),  # more than one frame where one belongs
        payload(2, four, four)[:-1],
        payload(2, four, b""),
        b"",
    ):
        for out in (None, np.empty(8, np.uint8)):
            with pytest.raises(DamagedError):
                Zstd().decode(wrong, out=out)


@pytest.mark.parametrize("codec", [Zstd(), Int8(), Int4()], ids=repr)
def test_a_payload_that_claims_more_than_there_is(codec: Codec) -> None:
    """Decoded without a place to go to, it is refused before memory is taken, or for want of it."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"\1" * 8)
    size = struct.Struct("<I").pack(len(frame))
    claims = [payload(2, frame, frame)]
    if not isinstance(codec, Zstd):
        shapes = ((1 << 20, 1 << 20, 1), (1 << 31, 1 << 31, 1), ((1 << 32) - 1,) * 3)
        claims = [struct.pack("<BBBxfIII", 1, 1, 0, 1.0, *shape) + size + frame for shape in shapes]
    for claim in claims:
        with pytest.raises(DamagedError):
            codec.decode(claim)


@pytest.mark.parametrize("level", [0, 20, 22, True, 1.0, "1", None])
def test_levels_of_zstd_are_whole_numbers_up_to_19(level: Any) -> None:
    with pytest.raises(ConfigError, match="between 1 and 19"):
        Zstd(level=level)
    assert Zstd(level=19).level == 19


def test_zstd_keeps_the_lowest_bytes_first() -> None:
    """The order of the planes is part of the format: what is in an index today has to decode for ever."""
    found = bytes(Zstd().encode(np.array([0x0102, 0x0304], "<u2").tobytes(), flat(2)))
    size, low, high = struct.unpack_from("<BII", found)
    frames = found[9 : 9 + low], found[9 + low : 9 + low + high]
    assert (size, [zstandard.ZstdDecompressor().decompress(f) for f in frames]) == (2, [b"\2\4", b"\1\3"])


def test_zstd_compresses_kv() -> None:
    data = torch.randn(1 << 14, generator=torch.Generator().manual_seed(2)).bfloat16().view(torch.uint8).numpy()
    assert memoryview(Zstd().encode(data.data, flat(1 << 14))).nbytes < 0.75 * data.nbytes


def test_unknown_codec_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown codec 'lz9'.*int4, int8, raw, zstd"):
        codec_from_config({"id": "lz9"})
    assert {"int4", "int8", "raw", "zstd"} <= set(codec_names())


@pytest.mark.parametrize(
    "config",
    [{"id": "raw", "level": 1}, {"id": "zstd", "speed": 1}, {"id": "zstd", "level": 0}, {"id": "int4", "bits": 4}],
)
def test_wrong_options_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        codec_from_config(config)


PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ragkv.store import Codec


@dataclass(frozen=True, slots=True)
class Inverted(Codec):
    id: ClassVar[str] = "inverted"
    mask: int = 255

    def encode(self, buf, slabs):
        return (np.frombuffer(buf, np.uint8) ^ self.mask).tobytes()

    def decode(self, buf, out=None):
        found = np.frombuffer(buf, np.uint8) ^ self.mask
        if out is None:
            return found
        out[:] = found
        return out
"""

ENTRY_POINTS = """[ragkv.codecs]
inverted = their_codec:Inverted
raw = their_codec:Inverted
broken = their_missing_module:Nothing
"""

SCRIPT = """
import sys
import torch
from ragkv.errors import ConfigError
from ragkv.attention.kv import ChunkKV
from ragkv.store import KVIdentity, Raw, Store, codec_from_config, codec_names
from ragkv.types import Encoding

assert codec_names() == ["broken", "int4", "int8", "inverted", "raw", "zstd"], codec_names()
assert type(codec_from_config({"id": "raw"})) is Raw
for name in ("lz9", "broken"):
    try:
        codec_from_config({"id": name})
    except ConfigError as error:
        print(error)
kv = ChunkKV(keys=(torch.randn(2, 5, 4),), values=(torch.randn(2, 5, 4),))
identity = KVIdentity(model="m", encoding=Encoding.STANDALONE, chunk_ids=(1, 2, 3, 4, 5))
with Store.create(sys.argv[1], codec=codec_from_config({"id": "inverted", "mask": 15})) as store:
    store.stage_kv([(identity, kv)])
with Store.open(sys.argv[1]) as store:  # the record says how it was written
    found = store.get_kv(identity)
print(torch.equal(found.keys[0], kv.keys[0]) and torch.equal(found.values[0], kv.values[0]))
"""


def test_another_package_adds_a_codec(tmp_path: Path) -> None:
    """Found by its installed metadata, in a fresh process; it cannot take a built-in name."""
    (tmp_path / "their_codec.py").write_text(PLUGIN)
    metadata = tmp_path / "their_codec-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-codec\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "index")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    unknown, broken, same = run.stdout.splitlines()
    assert unknown == "unknown codec 'lz9': choose one of broken, int4, int8, inverted, raw, zstd"
    assert broken.startswith("codec 'broken' is installed but cannot be loaded (No module named")
    assert same == "True"
