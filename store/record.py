"""One chunk's KV as the store holds it: its key, a manifest, and segments with the bytes.

The key (`KVIdentity`) is a hash of everything that the numbers depend on. Stale or foreign KV would give fluent, wrong
answers; with this key, any change is a miss and the chunk is encoded again (docs/design.md). The manifest describes the
tensors. Most models have keys and values in every layer; others have one tensor for both (latent attention), nothing
(they read another layer's), or states of fixed size and any type (recurrent layers).

Segments have at most 1 MiB, because LMDB needs contiguous pages for a value, and longer values fragment the file. They
are cut by layer, so that layer l+1 loads while layer l computes. Within a layer they hold whole slices, so a codec
sees whole rows and a tensor can be a view of the map (docs/formats.md). Threads share large reads, because checksums,
copies and decompression release the GIL. Loaded KV goes to reused buffers of huge pages, because page faults of fresh
memory take longer than the copy.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from ragkv.attention.kv import ChunkKV, OpaqueKV, PackedTensors, State, torch_dtype
from ragkv.store.codecs import (
    Buffer,
    Bytes,
    Codec,
    DamagedError,
    KVSlice,
    Packing,
    add_checksum,
    codec_from_config,
    verify_checksum,
)
from ragkv.types import ITEM_SIZES, DType, Encoding, KVShape, LayerShape, StateShape
from ragkv.util import HUGE_PAGE, huge_memory
from ragkv.util.files import parse_json
from ragkv.util.processors import cores

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 2
"""Version of the layout of records (docs/formats.md). It is part of every key, so that a new layout never reads an old
record."""

LONG_WORDS = 9
PASSED_ON = "passed on"
"""The name of a layer's state with the tokens that a long document's block passes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIdentity:
    """One chunk's KV for one model.

    `model` is the model's fingerprint in hex. `prefix_ids` are all tokens that the chunk saw before its own: of a
    `prefixed` chunk those of the prompt, of a `context` one also those of its document. They are empty
    for a `standalone` one, so its record stays valid when the prompt changes. For a `long` block they are the eight
    words of a digest of everything before it, and its position (`ragkv.ingest.encoding`).
    """

    model: str
    encoding: Encoding
    prefix_ids: tuple[int, ...] = ()
    chunk_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.encoding is Encoding.STANDALONE and self.prefix_ids:
            raise ValueError("a standalone chunk saw no prefix: leave prefix_ids empty")
        if self.encoding is Encoding.LONG and len(self.prefix_ids) != LONG_WORDS:
            raise ValueError(f"the prefix of a long document's block must have {LONG_WORDS} words")

    @property
    def position(self) -> int:
        """The position of the first token."""
        return self.prefix_ids[LONG_WORDS - 1] if self.encoding is Encoding.LONG else len(self.prefix_ids)

    @property
    def tokens(self) -> int:
        """How many tokens' KV it is."""
        return len(self.chunk_ids)

    def may_serve(self, token_ids: tuple[int, ...]) -> bool:
        """Whether a chunk with these tokens may need it: as its own KV, or as a block of its document."""
        return self.encoding is Encoding.LONG or self.chunk_ids == token_ids

    def key(self) -> bytes:
        """32 bytes, the same in every process.

        Each field is hashed after its length, so that no two identities have the same bytes.
        """
        digest = hashlib.blake2b(digest_size=32, person=b"ragkv kv record")
        version, ids = SCHEMA_VERSION.to_bytes(4, "little"), (pack_ids(self.prefix_ids), pack_ids(self.chunk_ids))
        for field in (version, self.model.encode(), self.encoding.value.encode(), *ids):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; `ValueError` for an id outside their range."""
    try:
        return np.array(ids, dtype="<u4").tobytes()
    except OverflowError as error:
        raise ValueError("a token id is negative or does not fit in 32 bits") from error


def unpack_ids(packed: bytes | memoryview) -> tuple[int, ...]:
    """The inverse of `pack_ids`."""
    return tuple(np.frombuffer(packed, dtype="<u4").tolist())


DTYPE_CODES: Mapping[int, DType] = {1: "bfloat16", 2: "float16", 3: "float32", 9: "uint8"}
"""Types of keys and values. Those of another runtime are bytes (uint8)."""
STATE_DTYPES: Mapping[int, DType] = {
    **DTYPE_CODES,
    4: "float64",
    5: "int8",
    6: "int16",
    7: "int32",
    8: "int64",
    10: "bool",
}
_WIDEST = 1 << 16
"""The most KV heads, and numbers per head, that a record may claim. No model comes near it."""
_MOST_LAYERS, _MOST_STATES = 1 << 13, 1 << 15
"""A layer or state takes memory for its tensors even if it has no numbers."""
_STATE = struct.Struct("<IBBH")
_SIZE = struct.Struct("<I")
_MOST_AXES = 8
_NAME_BYTES = 64


def code_of(codes: Mapping[int, object], value: object) -> int:
    return next(code for code, known in codes.items() if known == value)


def require_shapes(shapes: Sequence[LayerShape], states: Sequence[StateShape]) -> None:
    """`DamagedError` unless these can be the layers and states of a model's KV."""
    if len(shapes) > _MOST_LAYERS or len(states) > _MOST_STATES:
        raise DamagedError(f"it has {len(shapes)} layers and {len(states)} states, more than any model")
    for shape in shapes:
        kv_heads, key_dim, value_dim = shape
        if not any(shape):
            continue
        if not (0 < kv_heads <= _WIDEST and 0 < key_dim <= _WIDEST and 0 <= value_dim <= _WIDEST):
            raise DamagedError("a layer of it has no heads, or more than any model")
    places = [(state.layer, state.name) for state in states]
    if places != sorted(set(places)) or any(not size > 0 for state in states for size in state.sizes):
        raise DamagedError("its states are not in the order of their layers and names, or have no numbers")


def pack_states(states: Sequence[StateShape]) -> bytes:
    """The table of states; `ValueError` for one that no manifest can describe."""
    rows = []
    for layer, name, dtype, sizes in states:
        label = name.encode()
        if dtype not in STATE_DTYPES.values() or len(sizes) > _MOST_AXES or not 0 < len(label) <= _NAME_BYTES:
            raise ValueError(f"a record holds no state {name!r} of {dtype} with {len(sizes)} axes")
        if not all(0 < size < 1 << 32 for size in sizes):
            raise ValueError(f"a record holds no state of the shape {sizes}")
        rows += [_STATE.pack(layer, code_of(STATE_DTYPES, dtype), len(sizes), len(label)), label]
        rows += map(_SIZE.pack, sizes)
    return b"".join(rows)


def parse_states(table: memoryview, count: int, layers: int) -> tuple[StateShape, ...]:
    """The `count` states of a table; `DamagedError`, `KeyError`, `ValueError` or `struct.error` when it is none."""
    states, start = [], 0
    if count * _STATE.size > len(table):
        raise DamagedError("its table of states has the wrong length")
    for _ in range(count):
        layer, dtype, axes, length = _STATE.unpack_from(table, start)
        name, start = bytes(table[start + _STATE.size :][:length]), start + _STATE.size + length
        if layer >= layers or axes > _MOST_AXES or not 0 < length <= _NAME_BYTES:
            raise DamagedError("a state of it belongs to no layer, or has no name, or too many axes")
        sizes = struct.unpack_from(f"<{axes}I", table, start)
        start += _SIZE.size * axes
        states.append(StateShape(layer, name.decode(), STATE_DTYPES[dtype], sizes))
    if start != len(table):
        raise DamagedError("its table of states has the wrong length")
    return tuple(states)


SEGMENT_BYTES = 1 << 20
_STORED_BYTES = 2 * SEGMENT_BYTES
"""The longest payload of a segment: with headers, the payload of small slices may be longer than the slices."""
_MANIFEST_BYTES = 16 << 20

_MAGIC = b"RKVM"
_HEAD = struct.Struct("<4sHBBIIIIIIIII")
_SHAPE = struct.Struct("<III")
_SEGMENT = struct.Struct("<IIIQ")
_ENCODINGS = {1: Encoding.STANDALONE, 2: Encoding.PREFIXED, 3: Encoding.LONG, 4: Encoding.CONTEXT}


class RecordSegment(NamedTuple):
    """A part of one layer: the number of its bytes, the bytes of its payload, and the payload's xxh3_64.

    `layer` is the number of layers plus s for a part of state s.
    """

    layer: int
    raw: int
    stored: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a record except the bytes of its segments.

    It holds the whole identity, so that a hit can be compared with the request.
    """

    identity: KVIdentity
    dtype: DType
    encoded_at: int
    shapes: tuple[LayerShape, ...]
    codec: dict[str, Any]
    segments: tuple[RecordSegment, ...]
    states: tuple[StateShape, ...] = ()

    @property
    def tokens(self) -> int:
        return self.identity.tokens

    @property
    def shape(self) -> KVShape:
        return KVShape(self.dtype, self.shapes, self.states)

    @property
    def raw_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(segment.raw for segment in self.segments)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, which come before the states."""
        return self.raw_bytes - sum(state.nbytes for state in self.states)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the payloads."""
        return sum(segment.stored for segment in self.segments)

    def pack(self) -> bytes:
        model = self.identity.model.encode()
        codec = json.dumps(self.codec, sort_keys=True, separators=(",", ":")).encode()
        states = pack_states(self.states)
        head = _HEAD.pack(
            _MAGIC,
            SCHEMA_VERSION,
            code_of(DTYPE_CODES, self.dtype),
            code_of(_ENCODINGS, self.identity.encoding),
            self.encoded_at,
            len(self.identity.chunk_ids),
            len(self.identity.prefix_ids),
            len(self.shapes),
            len(self.segments),
            len(model),
            len(codec),
            len(self.states),
            len(states),
        )
        return add_checksum(
            head,
            model,
            codec,
            pack_ids(self.identity.prefix_ids),
            pack_ids(self.identity.chunk_ids),
            b"".join(_SHAPE.pack(*shape) for shape in self.shapes),
            states,
            b"".join(_SEGMENT.pack(*segment) for segment in self.segments),
        )

    @classmethod
    def parse(cls, value: Buffer) -> Self:
        """The manifest in `value`; `DamagedError` unless it is whole, consistent and of this schema version."""
        view = memoryview(value)
        if len(view) > _MANIFEST_BYTES:
            raise DamagedError(f"its manifest has {len(view)} bytes")
        magic, version = struct.unpack_from("<4sH", view) if len(view) >= 6 else (b"", 0)
        if (magic, version) != (_MAGIC, SCHEMA_VERSION):
            raise DamagedError(f"it is not a manifest of version {SCHEMA_VERSION}")
        try:
            manifest = cls._parse_body(verify_checksum(view))
        except DamagedError:
            raise
        except (struct.error, KeyError, ValueError) as error:
            raise DamagedError(f"its manifest is malformed ({error!r})") from error
        for _, raw, stored, _ in manifest.segments:  # checked before memory is allocated by these sizes
            if not 0 < raw <= SEGMENT_BYTES or stored > _STORED_BYTES:
                raise DamagedError(f"a segment of it has {raw} bytes in {stored}, where {SEGMENT_BYTES} is the most")
        require_shapes(manifest.shapes, manifest.states)
        lengths = [0] * (len(manifest.shapes) + len(manifest.states))
        for layer, raw, _, _ in manifest.segments:
            lengths[layer] += raw
        row = manifest.tokens * ITEM_SIZES[manifest.dtype]
        layers = [kv_heads * (key_dim + value_dim) * row for kv_heads, key_dim, value_dim in manifest.shapes]
        if lengths != layers + [state.nbytes for state in manifest.states]:
            raise DamagedError("its segments do not add up to its layers")
        return manifest

    @classmethod
    def _parse_body(cls, body: memoryview) -> Self:
        head = _HEAD.unpack_from(body)
        dtype, encoding, encoded_at, tokens, prefix_tokens, layers, segments = head[2:9]
        model, codec, states, states_bytes = head[9:]
        lengths = (
            model,
            codec,
            4 * prefix_tokens,
            4 * tokens,
            _SHAPE.size * layers,
            states_bytes,
            _SEGMENT.size * segments,
        )
        if _HEAD.size + sum(lengths) != len(body) or not layers:
            raise DamagedError("its manifest has the wrong length")
        fields, start = [], _HEAD.size
        for length in lengths:
            fields.append(body[start : start + length])
            start += length
        cut = tuple(map(partial(tuple.__new__, RecordSegment), _SEGMENT.iter_unpack(fields[6])))
        order = [segment[0] for segment in cut]
        if order != sorted(order) or order[-1:] >= [layers + states]:
            raise DamagedError("its segments are not in the order of its layers")
        return cls(
            identity=KVIdentity(
                model=bytes(fields[0]).decode(),
                encoding=_ENCODINGS[encoding],
                prefix_ids=unpack_ids(fields[2]),
                chunk_ids=unpack_ids(fields[3]),
            ),
            dtype=DTYPE_CODES[dtype],
            encoded_at=encoded_at,
            shapes=tuple(map(LayerShape._make, _SHAPE.iter_unpack(fields[4]))),
            codec=_codec(parse_json(bytes(fields[1]))),
            segments=cut,
            states=parse_states(fields[5], states, layers),
        )


def stored_sizes(value: Buffer) -> tuple[str, int, int]:
    """A record's encoding, its bytes as stored and those of its tensors: from its manifest, of which only this is read.

    `DamagedError` if the checksum is wrong, or it is not a manifest.
    """
    body = verify_checksum(value)
    if len(body) < _HEAD.size or not body[:4] == _MAGIC:
        raise DamagedError("it is not a manifest")
    _, _, _, encoding, _, _, _, _, segments, *_ = _HEAD.unpack_from(body)
    start = len(body) - _SEGMENT.size * segments
    if start < _HEAD.size or encoding not in _ENCODINGS:
        raise DamagedError("its manifest has the wrong length, or an unknown encoding")
    stored = raw = 0
    for _, raw_size, payload, _ in _SEGMENT.iter_unpack(body[start:]):
        raw, stored = raw + raw_size, stored + payload
    return _ENCODINGS[encoding].value, stored, raw


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecord:
    """A record in bytes, made before the transaction, which may have to be retried."""

    key: bytes
    manifest: bytes
    segments: tuple[Buffer, ...]
    stored_bytes: int


def pack_shape(shape: KVShape) -> bytes:
    """The shape of a model's KV as JSON, with which the store compares every record. Equal shapes give equal bytes."""
    facts: list[Any] = [shape.dtype, shape.layers]
    if shape.states:
        facts.append(shape.states)
    return json.dumps(facts, separators=(",", ":")).encode()


def _codec(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise DamagedError("its manifest names no codec")
    return found


Fetch = Callable[[int], Buffer | None]
"""Returns a segment's payload by its index; None if it is missing."""

UNDECODABLE = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, struct.error)
"""The exceptions of a codec, which may be another package's, for an invalid payload."""
_SMALL = 64 << 20
_EXPANSION = 64
"""No KV is this compressible (`int4` gives a factor of eight). A large record that claims to be is a bomb."""


def checked_payloads(manifest: Manifest, fetch: Fetch) -> list[Buffer]:
    """All payloads of a record. Call it before memory is allocated for the tensors.

    `DamagedError` if a payload has not the length in the manifest, or if all of them are too short for the tensors that
    they claim to hold.
    """
    payloads: list[Buffer] = []
    for index, segment in enumerate(manifest.segments):
        payload = fetch(index)
        if payload is None:
            raise DamagedError(f"segment {index} is missing")
        if memoryview(payload).nbytes != segment.stored:
            raise DamagedError(f"segment {index} is not as long as its manifest says")
        payloads.append(payload)
    if manifest.raw_bytes > max(_SMALL, _EXPANSION * manifest.stored_bytes):
        raise DamagedError(f"it claims {manifest.raw_bytes} bytes in payloads of {manifest.stored_bytes}")
    return payloads


def check_payloads(manifest: Manifest, fetch: Fetch) -> None:
    """Decode a record as `decode_record` does, in the memory of one segment, because it may claim any size."""
    codec = codec_from_config(manifest.codec)
    payloads = checked_payloads(manifest, fetch)
    scratch = np.empty(max((segment.raw for segment in manifest.segments), default=0), np.uint8)
    for index, segment in enumerate(manifest.segments):
        decode_segments(manifest, codec, range(index, index + 1), payloads.__getitem__, scratch[: segment.raw])


def checked_segment(manifest: Manifest, index: int, payload: Buffer | None) -> Buffer:
    """The payload; `DamagedError` if it was changed."""
    segment = manifest.segments[index]
    if payload is None:
        raise DamagedError(f"segment {index} is missing")
    if memoryview(payload).nbytes != segment.stored or xxhash.xxh3_64_intdigest(payload) != segment.digest:
        raise DamagedError(f"the checksum of segment {index} does not match")
    return payload


def packed_parts(codec: Codec, packing: Packing, payload: Buffer, raw: int) -> list[Bytes] | None:
    """`Codec.parts` of a segment; `DamagedError` unless they are whole rows for its `raw` bytes."""
    if (parts := codec.parts(payload)) is None:
        return None
    size, expected = sum(part.size for part in parts), packing.bytes_for(raw)
    if size != expected or raw % (packing.item * packing.numbers):
        raise DamagedError(f"the payload holds {size} bytes, not {expected} for the rows of {raw}")
    return parts


def decode_segments(
    manifest: Manifest,
    codec: Codec,
    run: range,
    fetch: Fetch,
    out: NDArray[np.uint8],
    *,
    packing: Packing | None = None,
) -> bool:
    """Decode a run of segments into `out`, which they fill; `DamagedError` if one was changed.

    Each payload is checked right before it is decoded, so that it is in the CPU's cache for the copy. With a `packing`,
    the stored form is copied; False if a part has another form.
    """
    start = 0
    keeping, layers = codec.lossless(), len(manifest.shapes)
    for index in run:
        end = start + manifest.segments[index].raw
        payload = checked_segment(manifest, index, fetch(index))
        try:
            of = codec if manifest.segments[index].layer < layers else keeping
            if packing is None:
                of.decode(payload, out=out[start:end])
            elif (parts := packed_parts(of, packing, payload, end - start)) is None:
                return False
            else:
                np.concatenate(parts, out=out[packing.bytes_for(start) : packing.bytes_for(end)])
        except DamagedError:
            raise
        except UNDECODABLE as error:  # the checksum is right, but the store may be untrusted
            raise DamagedError(f"segment {index} cannot be decoded ({error!r})") from error
        start = end
    return True


POOL_BYTES = 512 << 20
"""The most unused memory to keep for reuse."""

_SMALLEST = 1 << 20  # malloc reuses the memory of smaller ones

_free: deque[mmap.mmap] = deque()
"""Changed only in steps that are atomic under the GIL, without a lock: memory is returned by finalizers, which may run
while any lock is held."""


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """`(nbytes,)` uninitialised bytes. Their memory is reused once no array or tensor refers to it."""
    if nbytes < _SMALLEST:
        return np.empty(nbytes, np.uint8)
    memory = _pooled(nbytes) or huge_memory(nbytes)
    lease = _Lease(memory, nbytes)
    weakref.finalize(lease, _give_back, memory).atexit = False
    return np.asarray(lease)


def pooled_bytes() -> int:
    """Bytes of unused memory kept for the next buffers."""
    return sum(map(len, list(_free)))


class _Lease:
    """The object that all arrays over a buffer refer to; it is finalized with the last of them."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        self._bytes = np.frombuffer(memory, np.uint8, count=nbytes)
        self.__array_interface__: dict[str, Any] = self._bytes.__array_interface__


def _pooled(nbytes: int) -> mmap.mmap | None:
    """The smallest free memory that fits; None if more than half of it would be unused."""
    for memory in sorted(_free, key=len):
        if nbytes <= len(memory) <= 2 * max(nbytes, HUGE_PAGE):
            try:
                _free.remove(memory)
            except ValueError:  # another thread has taken it
                continue
            return memory
    return None


def _give_back(memory: mmap.mmap) -> None:
    _free.append(memory)
    while pooled_bytes() > POOL_BYTES:
        try:
            _free.popleft()
        except IndexError:  # another thread has dropped the last one
            return


def drop_pool() -> None:
    """Return unused memory to the system."""
    _free.clear()


JOINT_BYTES = 1 << 19
"""The keys and the values of a longer layer are in segments of their own. Shorter runs of pages are easier to reuse,
and each tensor is still contiguous."""
TOKEN_STEP = 128
"""A head that is too long for one segment is cut at a multiple of this many tokens, which a codec's groups divide."""


def encode_record(kv: ChunkKV | OpaqueKV, identity: KVIdentity, codec: Codec) -> EncodedRecord:
    """Encode `kv`; `ValueError` when it cannot be the KV of `identity`."""
    shape, parts, alike = kv.shape, list[Sequence[Any]](), True
    if not isinstance(kv, OpaqueKV):
        alike = all(tensor.dtype == kv.dtype for tensor in (*kv.keys, *kv.values))
        parts = [*zip(kv.keys, kv.values, strict=True), *((state.value,) for state in kv.states)]
    if shape.dtype not in DTYPE_CODES.values() or not alike:
        raise ValueError(f"a record holds tensors of one dtype out of {list(DTYPE_CODES.values())}")
    codec = codec.suited(shape.dtype)
    if kv.tokens != identity.tokens:
        raise ValueError(f"the KV holds {kv.tokens} tokens, its identity {identity.tokens}")
    segments: list[RecordSegment] = []
    payloads: list[Buffer] = []
    buffer = kv.data if isinstance(kv, OpaqueKV) else new_buffer(shape.nbytes(kv.tokens))
    start = end = 0
    layers = [(_cut(layer, shape.dtype, kv.tokens), codec) for layer in shape.layers]
    for place, (cut, of) in enumerate([*layers, *((_cut_state(state), codec.lossless()) for state in shape.states)]):
        for tensor in parts[place] if parts else ():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            np.copyto(buffer[begin:end], _bytes(tensor))
        for slices in cut:
            begin, start = start, start + sum(kv_slice.nbytes for kv_slice in slices)
            payload = of.encode(buffer[begin:start].data, slices)
            digest = xxhash.xxh3_64_intdigest(payload)
            segments.append(RecordSegment(place, start - begin, memoryview(payload).nbytes, digest))
            payloads.append(payload)
    manifest = Manifest(
        identity=identity,
        dtype=shape.dtype,
        encoded_at=kv.encoded_at,
        shapes=shape.layers,
        codec=codec.config(),
        segments=tuple(segments),
        states=shape.states,
    )
    return EncodedRecord(
        key=identity.key(),
        manifest=manifest.pack(),
        segments=tuple(payloads),
        stored_bytes=manifest.stored_bytes,
    )


def _cut(shape: LayerShape, dtype: DType, tokens: int) -> Iterator[tuple[KVSlice, ...]]:
    """The slices of each segment of a layer.

    A segment holds the whole layer, or as many whole heads of its keys or values as fit, or a run of one head's tokens.
    """
    heads, key_dim, value_dim = shape
    whole = (KVSlice("keys", dtype, heads, tokens, key_dim), KVSlice("values", dtype, heads, tokens, value_dim))
    if sum(kv_slice.nbytes for kv_slice in whole) <= JOINT_BYTES:
        if whole[0].nbytes + whole[1].nbytes:
            yield tuple(kv_slice for kv_slice in whole if kv_slice.nbytes)
        return
    for kv_slice in whole:
        row = kv_slice.dim * kv_slice.item_size
        heads = SEGMENT_BYTES // max(1, row * kv_slice.tokens)
        if not kv_slice.nbytes:
            continue
        if heads:
            for head in range(0, kv_slice.heads, heads):
                yield (kv_slice._replace(heads=min(heads, kv_slice.heads - head)),)
            continue
        tokens = max(1, SEGMENT_BYTES // row // TOKEN_STEP * TOKEN_STEP or SEGMENT_BYTES // row)
        for _ in range(kv_slice.heads):
            for token in range(0, kv_slice.tokens, tokens):
                yield (kv_slice._replace(heads=1, tokens=min(tokens, kv_slice.tokens - token)),)


def _cut_state(state: StateShape) -> Iterator[tuple[KVSlice]]:
    """The slice of each segment of a state: a run of its numbers."""
    left = math.prod(state.sizes)
    while left:
        run = min(left, SEGMENT_BYTES // ITEM_SIZES[state.dtype])
        yield (KVSlice("states", state.dtype, 1, 1, run),)
        left -= run


def _bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes in row-major order; a view of it if that is its order."""
    import torch

    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return flat


def decode_record(manifest: Manifest, fetch: Fetch) -> ChunkKV:
    """The tensors of a record, as views of one new buffer; `PackedTensors` where they may be.

    `DamagedError` or `ConfigError` (unknown codec) when the record cannot be read.
    """
    codec = codec_from_config(manifest.codec)
    fetch, run = checked_payloads(manifest, fetch).__getitem__, range(len(manifest.segments))
    if packing := codec.packing(manifest.shape):
        buffer = new_buffer(packing.bytes_for(manifest.raw_bytes))
        if decode_segments(manifest, codec, run, fetch, buffer, packing=packing):
            return record_tensors(manifest, buffer, packing=packing)
    buffer = new_buffer(manifest.raw_bytes)
    decode_segments(manifest, codec, run, fetch, buffer)
    return record_tensors(manifest, buffer)


def round_trip(kv: ChunkKV, identity: KVIdentity, codec: Codec) -> tuple[EncodedRecord, ChunkKV]:
    """The record of `kv`, and the KV that reading it gives."""
    record = encode_record(kv, identity, codec)
    return record, decode_record(Manifest.parse(record.manifest), record.segments.__getitem__)


def typed_tensor(dtype: DType, buffer: NDArray[np.uint8] | Tensor) -> Tensor:
    """A view of the bytes as numbers of this dtype; a copy if they are not aligned to its size."""
    import torch

    if isinstance(buffer, torch.Tensor):
        even = buffer.storage_offset() % ITEM_SIZES[dtype] == 0
        return (buffer if even else buffer.clone()).view(torch_dtype(dtype))
    if buffer.__array_interface__["data"][0] % ITEM_SIZES[dtype]:
        buffer = buffer.copy()
    return torch.from_numpy(buffer.view(f"i{ITEM_SIZES[dtype]}")).view(torch_dtype(dtype))


def record_tensors(
    manifest: Manifest, buffer: NDArray[np.uint8] | Tensor, *, packing: Packing | None = None
) -> ChunkKV:
    """All layers of a record, and then its states, as views of `buffer`, which holds their bytes in this order.

    With a `packing`, the buffer holds keys and values in their stored form (`PackedTensors`). KV of another runtime is
    the buffer itself (`OpaqueKV`).
    """
    if manifest.dtype == "uint8" and isinstance(buffer, np.ndarray):
        kv = OpaqueKV(source=buffer, shape=manifest.shape, tokens=manifest.tokens, encoded_at=manifest.encoded_at)
        return cast("ChunkKV", kv)
    end, extra = manifest.kv_bytes, 0 if packing is None else packing.extra
    flat = typed_tensor(manifest.dtype, buffer[:end]) if packing is None else typed_tensor(packing.dtype, buffer)
    tokens, start, stacked = manifest.tokens, 0, None
    views: list[Tensor] = []
    if len({(heads, dim) for heads, *dims in manifest.shapes for dim in dims}) == 1:
        kv_heads, dim, _ = manifest.shapes[0]
        stacked = flat.view(2 * len(manifest.shapes), kv_heads, tokens, dim + extra)
        views += stacked.unbind()
    else:
        for kv_heads, key_dim, value_dim in manifest.shapes:
            for dim in (key_dim + extra, value_dim + extra):  # one torch call for each, because there are many
                views.append(flat.as_strided((kv_heads, tokens, dim), (tokens * dim, dim, 1), start))
                start += kv_heads * tokens * dim
    states = []
    for layer, name, dtype, sizes in manifest.states:
        begin, end = end, end + math.prod(sizes) * ITEM_SIZES[dtype]
        states.append(State(layer, name, typed_tensor(dtype, buffer[begin:end]).view(sizes)))
    keys, values = views[::2], views[1::2]
    return ChunkKV(
        keys=tuple(keys) if packing is None else PackedTensors(keys, torch_dtype(manifest.dtype)),
        values=tuple(values) if packing is None else PackedTensors(values, torch_dtype(manifest.dtype)),
        encoded_at=manifest.encoded_at,
        states=tuple(states),
        stacked=stacked,
    )


MOST = 8
"""Threads on one read, including the caller's. Eight read 1 GB on 16 cores in 0.64 of the time of four, sixteen in
0.56."""

_lock = Lock()
_pool: ThreadPoolExecutor | None = None


def share(tasks: Sequence[Callable[[], None]]) -> None:
    """Run all tasks in any order. The calling thread works too, and takes every task that no other thread has begun.

    A helper without processor time delays at most one task. It returns, or raises a task's exception, only when no task
    is running any more, also after an interrupt, because the tasks' input may be freed afterwards.
    """
    rest, lock = iter(tasks), Lock()
    begun: list[Lock] = []
    errors: list[BaseException] = []

    def help_out() -> None:
        while True:
            running = Lock()
            with running:
                with lock:
                    if (task := next(rest, None)) is None:
                        return
                    begun.append(running)
                try:
                    task()
                except BaseException as error:
                    errors.append(error)
                    return

    try:
        _ask(help_out, min(cores(), MOST, len(tasks)) - 1)
        for task in rest:
            task()
    finally:
        try:
            _settle(rest, lock, begun)
        except BaseException:  # an interrupt, also before its first line
            _settle(rest, lock, begun)
            raise
    for error in errors:
        raise error


def _settle(rest: Iterator[Callable[[], None]], lock: Lock, begun: Sequence[Lock]) -> None:
    """Return when no helper runs a task or will begin one; an interrupt in the meantime is raised then."""
    interrupt: BaseException | None = None
    while True:
        try:
            with lock:
                deque(rest, maxlen=0)
            for running in begun:
                with running:
                    continue
            break
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _ask(work: Callable[[], None], count: int) -> None:
    """Have this many threads of the pool run `work`, or as many as the system allows."""
    global _pool
    if count < 1:
        return
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MOST - 1, thread_name_prefix="ragkv-read")
        pool = _pool
    with suppress(RuntimeError):  # no thread can be started, or the interpreter is shutting down
        for _ in range(count):
            pool.submit(work)


def _in_child() -> None:
    """Reset after a fork: threads do not survive it, and one of them may have held the lock."""
    global _pool, _lock
    _pool, _lock = None, Lock()


os.register_at_fork(after_in_child=_in_child)
