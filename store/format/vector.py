"""A chunk's vectors from an embedder, as the bytes that the store holds beside the chunk's KV.

Retrieval indexes are derived from them, so that they are written and deleted in the transaction of their document. Keys
begin with the kind, so that a scan of one kind does not read the others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ragkv.boundary.plainfile import parse_json
from ragkv.store.seal import Buffer, DamagedError, seal, unseal

__all__ = [
    "VECTOR_KINDS",
    "ChunkVectors",
    "Vector",
    "VectorKind",
    "pack_vectors",
    "parse_vector",
    "vector_prefix",
    "vector_rows",
]

VectorKind: TypeAlias = Literal["dense", "sparse", "colbert"]
Vector: TypeAlias = NDArray[Any] | Mapping[str, float]

VECTOR_KINDS: tuple[VectorKind, ...] = ("dense", "sparse", "colbert")
PART_BYTES = 1 << 20  # longer values would fragment LMDB's file, see `ragkv.store.format.record`

_MOST_BYTES = 512 << 20  # 65,536 tokens of 2,048 float32 numbers each

_ARRAY = struct.Struct("<BBII")
_AXES = {"dense": 1, "colbert": 2}
_COUNT = struct.Struct("<I")
_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f2")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkVectors:
    """One chunk's vectors, of the kinds that its embedder gives.

    dense: `(dim,)`; sparse: token to weight; colbert: `(tokens, dim)`. Arrays are float32 or float16, which is kept;
    `ValueError` for any other dtype.
    """

    dense: NDArray[Any] | None = None
    sparse: Mapping[str, float] | None = None
    colbert: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        for kind, axes in (("dense", 1), ("colbert", 2)):
            array = getattr(self, kind)
            if array is not None and (array.ndim != axes or array.dtype not in _DTYPES.values()):
                raise ValueError(
                    f"{kind} vectors are float32 or float16 with {axes} axes, not {array.dtype}, {array.ndim}"
                )


def vector_prefix(kind: VectorKind, place: bytes = b"") -> bytes:
    """How the keys of a kind begin, or those of one chunk by (the start of) its key in `chunks`."""
    return kind[:1].encode() + place


def pack_vectors(vectors: ChunkVectors) -> Iterator[tuple[VectorKind, list[bytes]]]:
    """For each kind that is there, its values in parts of at most 1 MiB."""
    for kind in VECTOR_KINDS:
        vector: Vector | None = getattr(vectors, kind)
        if vector is not None:
            body = _pack_array(vector) if isinstance(vector, np.ndarray) else _pack_weights(vector)
            yield kind, [seal(body[at : at + PART_BYTES]) for at in range(0, len(body), PART_BYTES)]


def vector_rows(vectors: ChunkVectors, chunk: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The rows in `vectors` of a chunk, by its key in `chunks`."""
    for kind, parts in pack_vectors(vectors):
        for number, part in enumerate(parts):
            yield vector_prefix(kind, chunk) + number.to_bytes(4, "big"), part


def parse_vector(kind: VectorKind, parts: Sequence[Buffer]) -> Vector:
    """The inverse of `pack_vectors`, as a copy; `DamagedError` when a part is not what was written."""
    if sum(map(len, parts)) > _MOST_BYTES or any(len(part) > 2 * PART_BYTES for part in parts):
        raise DamagedError(f"its {kind} vector is larger than any")
    body = b"".join(unseal(part) for part in parts)
    try:
        return _parse_weights(body) if kind == "sparse" else _parse_array(body, kind)
    except (struct.error, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"its {kind} vector is malformed ({error!r})") from error


def _pack_array(array: NDArray[Any]) -> bytes:
    """uint8 dtype, uint8 axes, uint32 rows (1 for a single vector) and columns, the numbers row by row."""
    code = next(code for code, dtype in _DTYPES.items() if dtype == array.dtype)
    rows, columns = array.shape if array.ndim == 2 else (1, *array.shape)
    return _ARRAY.pack(code, array.ndim, rows, columns) + np.ascontiguousarray(array, _DTYPES[code]).tobytes()


def _parse_array(body: bytes, kind: VectorKind) -> NDArray[Any]:
    code, axes, rows, columns = _ARRAY.unpack_from(body)
    numbers = np.frombuffer(body, _DTYPES[code], offset=_ARRAY.size)
    if axes != _AXES[kind] or (axes == 1 and rows != 1) or (rows and not columns):
        raise ValueError(f"{axes} axes, {rows} x {columns}")
    if not np.isfinite(numbers).all():
        raise ValueError("it has numbers that are not finite")
    return numbers.reshape((rows, columns) if axes == 2 else (columns,)).copy()


def _pack_weights(weights: Mapping[str, float]) -> bytes:
    """uint32 count, the weights as float32, the tokens as a JSON list in UTF-8."""
    return b"".join(
        (
            _COUNT.pack(len(weights)),
            np.array(list(weights.values()), "<f4").tobytes(),
            json.dumps(list(weights)).encode(),
        )
    )


def _parse_weights(body: bytes) -> dict[str, float]:
    end = _COUNT.size + 4 * _COUNT.unpack_from(body)[0]
    weights = np.frombuffer(body[_COUNT.size : end], "<f4")
    tokens = parse_json(body[end:])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("its tokens are not texts")
    if not np.isfinite(weights).all() or len(set(tokens)) != len(tokens):
        raise ValueError("it has weights that are not finite, or a token twice")
    return dict(zip(tokens, weights.tolist(), strict=True))
