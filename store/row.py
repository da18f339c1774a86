"""Documents and chunks as the bytes that the tables hold, each under a checksum."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ragkv.errors import CorruptStoreError
from ragkv.store.identity import pack_ids, unpack_ids
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
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDocument:
    """A document and how it came in: `recipe` as given, `ingested_at` in seconds since 1970."""

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
        row = json.loads(bytes(unseal(value)))
        return StoredDocument(**{**row, "document": Document(**row["document"])})

    return _parsed(parse, "a document")


def pack_chunk(chunk: Chunk) -> bytes:
    """uint32 length of the JSON, the JSON of all fields but the token ids, the token ids as uint32."""
    fields = asdict(chunk)
    del fields["token_ids"]
    head = json.dumps(fields).encode()
    return seal(_LENGTH.pack(len(head)), head, pack_ids(chunk.token_ids))


def parse_chunk(value: Buffer) -> Chunk:
    def parse() -> Chunk:
        body = unseal(value)
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        return Chunk(**json.loads(bytes(body[_LENGTH.size : end])), token_ids=unpack_ids(body[end:]))

    return _parsed(parse, "a chunk")


def pack_text(text: str) -> bytes:
    """UTF-8; lone surrogates, which a text of broken origin may hold, survive."""
    return seal(text.encode("utf-8", "surrogatepass"))


def parse_text(value: Buffer) -> str:
    return _parsed(lambda: bytes(unseal(value)).decode("utf-8", "surrogatepass"), "a text")


def _pack_json(row: dict[str, Any]) -> bytes:
    return seal(json.dumps(row).encode())


def _parsed(parse: Callable[[], T], what: str) -> T:
    try:
        return parse()
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptStoreError(
            f"{what} in the store is damaged ({error}): run `ragkv repair`, or restore a backup"
        ) from error
