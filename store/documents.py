"""Write, replace and delete a document with everything that belongs to it, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store.codecs import Buffer, DamagedError
from ragkv.store.counters import advance
from ragkv.store.record import PASSED_ON, EncodedRecord, KVIdentity, Manifest, pack_shape
from ragkv.store.tables import (
    VECTOR_KINDS,
    ChunkVectors,
    StoredDocument,
    Transaction,
    Vector,
    VectorKind,
    chunk_key,
    digest,
    document_key,
    pack_chunk,
    pack_document,
    pack_text,
    parse_chunk,
    parse_document,
    parse_vector,
    shape_key,
    vector_prefix,
    vector_rows,
)
from ragkv.types import Chunk, Document, Encoding, KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentChange:
    """A document's new version, checked and encoded before the transaction, so that `apply` can be retried.

    `records` are by KV key; `references` are, for each chunk id, the identities of the KV that it needs, by KV key;
    `vectors` are by chunk id. `lenient`: skip references to records that have been evicted meanwhile.
    """

    document: Document
    text: str
    chunks: Sequence[Chunk]
    recipe: str
    records: Mapping[bytes, EncodedRecord]
    references: Mapping[str, Mapping[bytes, KVIdentity]]
    vectors: Mapping[str, ChunkVectors] = field(default_factory=dict)
    lenient: bool = False
    _rows: list[bytes] = field(init=False)
    _vectors: dict[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        name = self.document.document_id
        ids = {chunk.chunk_id for chunk in self.chunks}
        if not name:
            raise StoreError("a document needs an id that is not empty")
        if len(ids) != len(self.chunks) or any(chunk.document_id != name for chunk in self.chunks):
            raise StoreError(f"the chunks of {name!r} are not all its own, each with its own id")
        if not self.references.keys() <= ids:
            raise StoreError(f"{name!r} refers to KV for chunks that it does not have")
        if not self.records.keys() <= {key for needed in self.references.values() for key in needed}:
            raise StoreError(f"{name!r} brings KV records that none of its chunks refers to")
        if not self.vectors.keys() <= ids:
            raise StoreError(f"{name!r} brings vectors for chunks that it does not have")
        object.__setattr__(self, "_rows", [pack_chunk(chunk) for chunk in self.chunks])
        object.__setattr__(self, "_vectors", dict(self._pack_vectors()))
        try:  # a caller's ids, pages and metadata may be what a reader takes for damage
            for row in self._rows:
                parse_chunk(row)
            parse_document(self._pack())
        except CorruptStoreError as error:
            raise StoreError(f"{name!r} cannot be stored, because it could not be read: {error.__cause__}") from None

    def _pack(self) -> bytes:
        """The document's own row."""
        stored = StoredDocument(
            document=self.document,
            recipe=self.recipe,
            chunks=len(self.chunks),
            tokens=sum(len(chunk.token_ids) for chunk in self.chunks),
            ingested_at=time.time(),
        )
        return pack_document(stored)

    def _pack_vectors(self) -> Iterator[tuple[bytes, bytes]]:
        document = digest(self.document.document_id)
        for ordinal, chunk in enumerate(self.chunks):
            if chunk.chunk_id in self.vectors:
                yield from vector_rows(self.vectors[chunk.chunk_id], chunk_key(document, ordinal))

    @property
    def size(self) -> int:
        """The approximate number of bytes that `apply` writes."""
        values = (*self._rows, *self._vectors.values())
        return len(self.text) + sum(map(len, values)) + sum(record.stored_bytes for record in self.records.values())

    def apply(self, txn: Transaction) -> set[bytes]:
        """Write it; returns the keys of the KV records that it needed before, for `collect`."""
        name = self.document.document_id
        document = digest(name)
        known = _document_of(txn, name)
        rows, released = _drop_chunks(txn, document)
        before = _Content(rows, drop_vectors(txn, document))
        for ordinal, (chunk, row) in enumerate(zip(self.chunks, self._rows, strict=True)):
            key = chunk_key(document, ordinal)
            if txn.get("places", digest(chunk.chunk_id)) is not None:
                raise StoreError(f"chunk {chunk.chunk_id!r} belongs to another document already")
            txn.put("places", digest(chunk.chunk_id), key)
            txn.put("chunks", key, row)
        for key, value in self._vectors.items():
            txn.put("vectors", key, value)
        for record in self.records.values():
            txn.put_record(record)
        for chunk_id, needed in self.references.items():
            for key, identity in needed.items():
                if key not in self.records and not holds(txn, key, identity):
                    if self.lenient:
                        continue
                    raise StoreError(f"{name!r} refers to a KV record that is neither stored nor given")
                txn.refer(digest(chunk_id), key)
        txn.put("documents", document_key(name), self._pack())
        txn.put("texts", document, pack_text(self.text))
        keys = [chunk_key(document, ordinal) for ordinal in range(len(self._rows))]
        after = _Content(dict(zip(keys, self._rows, strict=True)), self._vectors)
        if before != after or known != _described(self.document):
            touched = before.differing(after)
            advance(txn, None if touched is None else name, touched or ())
        return released


@dataclass(frozen=True, slots=True)
class _Content:
    """A document's rows in `chunks` and `vectors`, by their keys."""

    chunks: Mapping[bytes, bytes]
    vectors: Mapping[bytes, bytes]

    def differing(self, other: _Content) -> set[str] | None:
        """The ids of the chunks whose text or vectors differ; None if a row is unreadable."""
        with suppress(CorruptStoreError):
            mine, others = self._by_id(other), other._by_id(self)
            return {chunk_id for chunk_id in mine.keys() | others.keys() if mine.get(chunk_id) != others.get(chunk_id)}
        return None

    def _by_id(self, other: _Content) -> dict[str, tuple[str, dict[bytes, bytes]]]:
        """Text and vectors by chunk id, without the chunks that are the same in `other` and at the same place."""
        mine, others = self._vectors(), other._vectors()
        by_id = {}
        for key, row in self.chunks.items():
            vectors = mine.get(key, {})
            if row != other.chunks.get(key) or vectors != others.get(key, {}):
                chunk = parse_chunk(row)
                by_id[chunk.chunk_id] = chunk.text, vectors
        return by_id

    def _vectors(self) -> dict[bytes, dict[bytes, bytes]]:
        """By the keys of chunks, their rows in `vectors` by kind and part."""
        found: dict[bytes, dict[bytes, bytes]] = {}
        for key, row in self.vectors.items():
            found.setdefault(key[1:-4], {})[key[:1] + key[-4:]] = row
        return found


def _document_of(txn: Transaction, document_id: str) -> Document | None:
    value = txn.get("documents", document_key(document_id))
    with suppress(CorruptStoreError):
        return None if value is None else _described(parse_document(value).document)
    return None


def _described(document: Document) -> Document:
    """The fields of a document that conditions can use: all but the hash."""
    return replace(document, content_hash="", metadata=dict(document.metadata))


def drop_document(txn: Transaction, document_id: str) -> bool:
    """Delete a document and what only it needed; False if there is none."""
    if not (document_id and txn.delete("documents", document_key(document_id))):
        return False
    released, content = _drop(txn, digest(document_id))
    touched = content.differing(_Content({}, {}))
    advance(txn, None if touched is None else document_id, touched or ())
    txn.collect(released)
    return True


def drop_rows(txn: Transaction, document: bytes) -> set[bytes]:
    """Delete a document's text, chunks and vectors, by the digest of its id; returns the KV keys that they needed."""
    released, _ = _drop(txn, document)
    advance(txn)
    return released


def _drop(txn: Transaction, document: bytes) -> tuple[set[bytes], _Content]:
    rows, released = _drop_chunks(txn, document)
    vectors = drop_vectors(txn, document)
    txn.delete("texts", document)
    return released, _Content(rows, vectors)


def matching(value: Buffer, identity: KVIdentity) -> Manifest:
    """The manifest in `value`; `DamagedError` unless it has the full `identity`.

    The key is a hash of the identity, but an untrusted store may have any record under any key.
    """
    manifest = Manifest.parse(value)
    if manifest.identity != identity:
        raise DamagedError("it was made for another chunk, prompt or model")
    return manifest


def require_shape(txn: Transaction | None, manifest: Manifest, shape: KVShape | None = None) -> None:
    """`DamagedError` unless a record's tensors have the shape of its model's KV.

    `shape` comes from the model; unset, it is the recorded one (`Store.keep_shape`), if any.
    """
    packed = None if shape is not None or txn is None else txn.get("meta", shape_key(manifest.identity.model))
    if shape is None and packed is None:
        return
    found = manifest.shape
    if manifest.identity.encoding is Encoding.LONG:  # its state of passed tokens depends on its own length
        found = found._replace(states=tuple(state for state in found.states if state.name != PASSED_ON))
    if found != shape if packed is None else pack_shape(found) != packed:
        raise DamagedError("its layers are not those of its model")
    if manifest.encoded_at != manifest.identity.position:
        raise DamagedError("its position is not the one behind its prefix")


def chunk_by_id(txn: Transaction, chunk_id: str) -> Chunk | None:
    """The chunk with this id. A place has no checksum, so a damaged one may lead to another chunk."""
    place = txn.get("places", digest(chunk_id))
    value = None if place is None else txn.get("chunks", bytes(place))
    chunk = None if value is None else parse_chunk(value)
    return chunk if chunk is not None and chunk.chunk_id == chunk_id else None


def holds(txn: Transaction, key: bytes, identity: KVIdentity) -> bool:
    """Whether the store has a record with exactly this identity."""
    value = txn.get("kv", key)
    try:
        if value is not None:
            require_shape(txn, matching(value, identity))
        return value is not None
    except DamagedError:
        return False


def read_vector(txn: Transaction, kind: VectorKind, chunk: bytes) -> Vector | None:
    """A chunk's vector by its key in `chunks`; `DamagedError` if it is unreadable."""
    parts = list(txn.scan("vectors", vector_prefix(kind, chunk)))
    if [key[-4:] for key, _ in parts] != [number.to_bytes(4, "big") for number in range(len(parts))]:
        raise DamagedError("a part of it is missing")
    return parse_vector(kind, [value for _, value in parts]) if parts else None


def vector_of(txn: Transaction, kind: VectorKind, chunk: bytes) -> Vector | None:
    """Like `read_vector`, with `CorruptStoreError`."""
    try:
        return read_vector(txn, kind, chunk)
    except DamagedError as error:
        raise CorruptStoreError(f"the store is damaged ({error}): run `ragkv repair`, or ingest again") from error


def _drop_chunks(txn: Transaction, document: bytes) -> tuple[dict[bytes, bytes], set[bytes]]:
    """Delete a document's chunks; returns their rows by key, and the keys of the records that they needed."""
    rows = {key: bytes(value) for key, value in txn.scan("chunks", document)}
    released: set[bytes] = set()
    for key, row in rows.items():
        for name in _chunk_names(txn, key, row):
            released.update(txn.release(name))
            txn.delete("places", name)
        txn.delete("chunks", key)
    return rows, released


def _chunk_names(txn: Transaction, key: bytes, row: bytes) -> list[bytes]:
    """The digest of a chunk's id. For a damaged row, all digests that lead to it, so that it can be deleted."""
    with suppress(CorruptStoreError):
        name = digest(parse_chunk(row).chunk_id)
        if txn.get("places", name) in (None, key):  # otherwise it copies another chunk's row, and that chunk stays
            return [name]
    return names_of(txn, key)


def names_of(txn: Transaction, key: bytes) -> list[bytes]:
    """The digests of the chunk ids that lead to a key in `chunks`, found by looking at every place."""
    return [name for name, place in txn.scan("places") if place == key]


def drop_vectors(txn: Transaction, place: bytes) -> dict[bytes, bytes]:
    """Delete the vectors of all chunks whose keys begin with `at`; returns the rows that they were."""
    rows: dict[bytes, bytes] = {}
    for kind in VECTOR_KINDS:
        rows.update((key, bytes(value)) for key, value in txn.scan("vectors", vector_prefix(kind, place)))
    for key in rows:
        txn.delete("vectors", key)
    return rows
