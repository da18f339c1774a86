"""Documents, texts and chunks as the bytes of their rows, each with a checksum."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ragkv.boundary.plainfile import parse_json
from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.format.identity import pack_ids, unpack_ids
from ragkv.store.seal import Buffer, seal, unseal
from ragkv.types import Chunk, Document

__all__ = [
    "StoredDocument",
    "pack_chunk",
    "pack_document",
    "pack_text",
    "parse_chunk",
    "parse_document",
    "parse_text",
]

_LENGTH = struct.Struct("<I")
_TEXT_BYTES = 512 << 20
_ROW_BYTES = 64 << 20
"""No row of a document or a chunk is this large: 65,536 tokens with their text take a hundredth of it."""
_YEAR_9999 = 253_370_764_800
_DOCUMENT_ROW: Mapping[str, tuple[type, ...]] = {
    "recipe": (str,),
    "chunks": (int,),
    "tokens": (int,),
    "ingested_at": (float, int),
    "document": (dict,),
}
_DOCUMENT: Mapping[str, tuple[type, ...]] = {
    "document_id": (str,),
    "source": (str,),
    "content_hash": (str,),
    "media_type": (str,),
    "title": (str, type(None)),
    "metadata": (dict,),
}
_CHUNK: Mapping[str, tuple[type, ...]] = {
    "chunk_id": (str,),
    "document_id": (str,),
    "ordinal": (int,),
    "text": (str,),
    "start": (int,),
    "end": (int,),
    "page": (int, type(None)),
    "heading": (str, type(None)),
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document and how it was ingested: `recipe` as the ingest gave it, `ingested_at` in seconds since 1970."""

    document: Document
    recipe: str
    chunks: int
    tokens: int
    ingested_at: float


def pack_document(stored: StoredDocument) -> bytes:
    row = {name: getattr(stored, name) for name in ("recipe", "chunks", "tokens", "ingested_at")}
    fields = {name: getattr(stored.document, name) for name in Document.__slots__}
    return _pack_json({**row, "document": {**fields, "metadata": dict(stored.document.metadata)}})


def parse_document(value: Buffer) -> StoredDocument:
    def parse() -> StoredDocument:
        row = _table(_limited(value))
        _require(row, _DOCUMENT_ROW)
        fields = row["document"]
        _require(fields, _DOCUMENT)
        if not fields["document_id"] or not 0 <= row["ingested_at"] < _YEAR_9999:
            raise ValueError("its id is empty, or its time of ingest is impossible")
        if not all(isinstance(text, str) for text in fields["metadata"].values()):
            raise ValueError("its metadata are not texts")
        return StoredDocument(**{**row, "document": Document(**fields)})

    return _parsed(parse, "a document")


_CHUNK_FIELDS = tuple(field.name for field in fields(Chunk) if field.name != "token_ids")


def pack_chunk(chunk: Chunk) -> bytes:
    """The uint32 length of the JSON, the JSON of all fields but the token ids, the token ids as uint32."""
    head = json.dumps({name: getattr(chunk, name) for name in _CHUNK_FIELDS}).encode()
    return seal(_LENGTH.pack(len(head)), head, pack_ids(chunk.token_ids))


def parse_chunk(value: Buffer) -> Chunk:
    def parse() -> Chunk:
        body = _limited(value)
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        row = _table(body[_LENGTH.size : end])
        _require(row, _CHUNK)
        if not row["chunk_id"]:
            raise ValueError("it has no id")
        return Chunk(**row, token_ids=unpack_ids(body[end:]))

    return _parsed(parse, "a chunk")


def pack_text(text: str) -> bytes:
    """A text as UTF-8. Lone surrogates, which a badly decoded text may hold, are kept."""
    packed = text.encode("utf-8", "surrogatepass")
    if len(packed) > _TEXT_BYTES:
        raise StoreError(f"a document's text has {len(packed)} bytes, where {_TEXT_BYTES} is the most: split it")
    return seal(packed)


def parse_text(value: Buffer) -> str:
    return _parsed(lambda: str(_limited(value, _TEXT_BYTES + 8), "utf-8", "surrogatepass"), "a text")


def _limited(value: Buffer, most: int = _ROW_BYTES) -> memoryview:
    """A row's bytes. A row that is too long is refused before it is read: a sparse file can hold gigabytes of zeros."""
    if len(value) > most:
        raise ValueError(f"it has {len(value)} bytes")
    return unseal(value)


def _table(body: memoryview) -> dict[str, Any]:
    found = parse_json(bytes(body))
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _require(row: Any, kinds: Mapping[str, tuple[type, ...]]) -> None:
    """`ValueError` unless the row has exactly these fields, each of its type, with whole numbers from 0 to 2^48."""
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")
    for name, value in row.items():
        if type(value) not in kinds.get(name, ()):
            raise ValueError(f"its {name} is of the wrong type")
        if type(value) is int and not 0 <= value < 1 << 48:
            raise ValueError(f"its {name} is out of range")
    if missing := kinds.keys() - row.keys():
        raise ValueError(f"its {min(missing)} is missing")


def _pack_json(row: dict[str, Any]) -> bytes:
    return seal(json.dumps(row).encode())


def _parsed(parse: Callable[[], T], what: str) -> T:
    try:
        return parse()
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptStoreError(
            f"{what} in the store is damaged ({error}): run `ragkv repair`, or restore a backup"
        ) from error
