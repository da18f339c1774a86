"""One chunk's KV as the store holds it: a manifest that describes it, and segments with its bytes.

Segments have at most 1 MiB, because LMDB needs contiguous pages for a value, and longer values fragment the file.
They are cut by layer, so that layer l+1 can load while layer l computes. Within a layer they hold whole slabs, so that
a codec sees whole rows, and a tensor can be a view of the map. Layout: docs/formats.md.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

from ragkv.attention.shape import ITEM_SIZES, DType, KVShape, LayerShape, StateShape
from ragkv.boundary.plainfile import parse_json
from ragkv.store.format.identity import SCHEMA_VERSION, KVIdentity, pack_ids, packed_key, unpack_ids
from ragkv.store.format.typed import (
    DTYPES,
    code_of,
    pack_states,
    parse_states,
    plain,
    require_shapes,
)
from ragkv.store.seal import Buffer, DamagedError, seal, unseal
from ragkv.types import Encoding

__all__ = [
    "SEGMENT_BYTES",
    "EncodedRecord",
    "LayerShape",
    "Manifest",
    "Segment",
    "Summary",
    "pack_shape",
    "summarise",
]

TYPED_VERSION = 2
"""Of a record whose layers keep something else than keys and values each. Others are written as they always were."""
SEGMENT_BYTES = 1 << 20
_STORED_BYTES = 2 * SEGMENT_BYTES
"""The most that a segment's payload may have: headers may make the payload of small slabs larger than the slabs."""
_MANIFEST_BYTES = 16 << 20

_MAGIC = b"RKVM"
_HEAD = struct.Struct("<4sHBBIIIIIII")
_TYPED_HEAD = struct.Struct("<II")
_SHAPE = struct.Struct("<III")
_SEGMENT = struct.Struct("<IIIQ")
_ENCODINGS = {1: Encoding.STANDALONE, 2: Encoding.PREFIXED, 3: Encoding.LONG}


class Segment(NamedTuple):
    """A piece of one layer: the number of its bytes, the bytes of its payload, and the payload's xxh3_64.

    `layer` is the number of layers plus s for a piece of state s.
    """

    layer: int
    raw: int
    stored: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a record but the bytes of its segments.

    It holds the whole identity, so that a hit can be compared with what was asked for.
    """

    identity: KVIdentity
    dtype: DType
    encoded_at: int
    shapes: tuple[LayerShape, ...]
    codec: dict[str, Any]
    segments: tuple[Segment, ...]
    states: tuple[StateShape, ...] = ()

    @property
    def version(self) -> int:
        """The schema that can say it: the older one, if it can."""
        return SCHEMA_VERSION if plain(self.shapes, self.states) else TYPED_VERSION

    @property
    def tokens(self) -> int:
        return len(self.identity.chunk_ids)

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

    def layer_run(self, layer: int) -> range:
        """The indices of a layer's segments."""
        return range(bisect_left(self.segments, (layer,)), bisect_left(self.segments, (layer + 1,)))

    def layer_bytes(self, layer: int) -> int:
        kv_heads, key_dim, value_dim = self.shapes[layer]
        return kv_heads * self.tokens * (key_dim + value_dim) * ITEM_SIZES[self.dtype]

    def pack(self) -> bytes:
        model = self.identity.model.encode()
        codec = json.dumps(self.codec, sort_keys=True, separators=(",", ":")).encode()
        head = _HEAD.pack(
            _MAGIC,
            self.version,
            code_of(DTYPES, self.dtype),
            code_of(_ENCODINGS, self.identity.encoding),
            self.encoded_at,
            self.tokens,
            len(self.identity.prefix_ids),
            len(self.shapes),
            len(self.segments),
            len(model),
            len(codec),
        )
        states = pack_states(self.states)
        typed = _TYPED_HEAD.pack(len(self.states), len(states)) if self.version == TYPED_VERSION else b""
        return seal(
            head,
            typed,
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
        if magic != _MAGIC or version not in (SCHEMA_VERSION, TYPED_VERSION):
            raise DamagedError(f"it is not a manifest of version {SCHEMA_VERSION} or {TYPED_VERSION}")
        try:
            manifest = cls._parse_body(unseal(view))
        except DamagedError:
            raise
        except (struct.error, KeyError, ValueError) as error:
            raise DamagedError(f"its manifest is malformed ({error!r})") from error
        for _, raw, stored, _ in manifest.segments:  # checked before memory is allocated by these sizes
            if not 0 < raw <= SEGMENT_BYTES or stored > _STORED_BYTES:
                raise DamagedError(f"a segment of it has {raw} bytes in {stored}, where {SEGMENT_BYTES} is the most")
        require_shapes(manifest.shapes, manifest.states)
        if manifest.version != version:
            raise DamagedError("a layer of it has no heads or no width, or it is of a version that it does not need")
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
        version, dtype, encoding, encoded_at, tokens, prefix_tokens, layers, segments, model, codec = head[1:]
        start, states, states_bytes = _HEAD.size, 0, 0
        if version == TYPED_VERSION:
            states, states_bytes = _TYPED_HEAD.unpack_from(body, start)
            start += _TYPED_HEAD.size
        lengths = (
            model,
            codec,
            4 * prefix_tokens,
            4 * tokens,
            _SHAPE.size * layers,
            states_bytes,
            _SEGMENT.size * segments,
        )
        if start + sum(lengths) != len(body) or not layers:
            raise DamagedError("its manifest has the wrong length")
        fields = []
        for length in lengths:
            fields.append(body[start : start + length])
            start += length
        cut = tuple(map(partial(tuple.__new__, Segment), _SEGMENT.iter_unpack(fields[6])))
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
            dtype=DTYPES[dtype],
            encoded_at=encoded_at,
            shapes=tuple(map(LayerShape._make, _SHAPE.iter_unpack(fields[4]))),
            codec=_codec(parse_json(bytes(fields[1]))),
            segments=cut,
            states=parse_states(fields[5], states, layers),
        )


class Summary(NamedTuple):
    """What can be told of a manifest without its parts: how many segments, their bytes as stored and as tensors; the
    bytes that describe dtype and layers; the token ids as they are packed, which die with the manifest's bytes."""

    model: str
    encoding: str
    codec: str
    segments: int
    stored_bytes: int
    raw_bytes: int
    layout: bytes
    encoded_at: int
    prefix_ids: Buffer
    chunk_ids: Buffer

    @property
    def key(self) -> bytes:
        """The key that the record belongs under."""
        return packed_key(self.model, self.encoding, self.prefix_ids, self.chunk_ids)


def summarise(value: Buffer) -> Summary:
    """The summary of a manifest, some times as fast as `Manifest.parse`, because its parts are not checked.

    `DamagedError` when the checksum or the length is wrong.
    """
    body = unseal(value)
    if len(body) < _HEAD.size:
        raise DamagedError("its manifest has the wrong length")
    head = _HEAD.unpack_from(body)
    magic, version, dtype, encoding, encoded_at, tokens, prefix_tokens, layers, segments, model, codec = head
    start, states_bytes, end = _HEAD.size, 0, len(body) - _SEGMENT.size * segments
    if magic != _MAGIC or version not in (SCHEMA_VERSION, TYPED_VERSION) or encoding not in _ENCODINGS:
        raise DamagedError(f"it is not a manifest of version {SCHEMA_VERSION} or {TYPED_VERSION}")
    if version == TYPED_VERSION and len(body) >= start + _TYPED_HEAD.size:
        _, states_bytes = _TYPED_HEAD.unpack_from(body, start)
        start += _TYPED_HEAD.size
    names = start + model + codec
    ids, shapes = names + 4 * prefix_tokens, names + 4 * (prefix_tokens + tokens)
    if shapes + _SHAPE.size * layers + states_bytes != end:
        raise DamagedError("its manifest has the wrong length")
    stored = raw = 0
    for _, piece, payload, _ in _SEGMENT.iter_unpack(body[end:]):
        raw, stored = raw + piece, stored + payload
    name, codec_id = _names(bytes(body[start:names]), model)
    layout = bytes((version, dtype)) + bytes(body[_HEAD.size : start]) + bytes(body[shapes:end])
    encoding = _ENCODINGS[encoding].value
    prefix_ids, chunk_ids = body[names:ids], body[ids:shapes]
    return Summary(name, encoding, codec_id, segments, stored, raw, layout, encoded_at, prefix_ids, chunk_ids)


@lru_cache(maxsize=256)
def _names(names: bytes, model: int) -> tuple[str, str]:
    """The model's fingerprint and the id of the codec, which few manifests do not share."""
    try:
        return names[:model].decode(), str(_codec(parse_json(names[model:]))["id"])
    except ValueError as error:
        raise DamagedError(f"its manifest is malformed ({error!r})") from error


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
