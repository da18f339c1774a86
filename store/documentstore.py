"""The documents of a store with their texts, chunks and vectors: written as one, and read in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ragkv.store.document import DocumentChange, drop_document, vector_of
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.row import (
    StoredDocument,
    parse_chunk,
    parse_document,
    parse_text,
)
from ragkv.store.format.vector import VECTOR_KINDS, ChunkVectors, Vector, VectorKind, vector_prefix
from ragkv.store.history import NAME_BYTES
from ragkv.store.openstore import KVRecords, OpenStore
from ragkv.store.transaction import (
    PLACE_BYTES,
    Transaction,
    digest,
    document_digest,
    document_key,
)
from ragkv.types import Chunk, Document

__all__ = ["DocumentStore"]


class DocumentStore(OpenStore):
    """The part of `Store` that keeps documents."""

    def write_document(
        self,
        document: Document,
        text: str,
        chunks: Sequence[Chunk],
        *,
        recipe: str,
        records: KVRecords = (),
        references: Mapping[str, Sequence[KVIdentity]],
        vectors: Mapping[str, ChunkVectors] | None = None,
        lenient: bool = False,
    ) -> None:
        """Make a document with its chunks, their vectors and their KV visible at once, replacing its earlier version.

        As `write_changes` of one `change`; see there.
        """
        rest: Any = {"recipe": recipe, "records": records, "references": references, "vectors": vectors}
        self.write_changes([self.change(document, text, chunks, **rest, lenient=lenient)])

    def change(
        self,
        document: Document,
        text: str,
        chunks: Sequence[Chunk],
        *,
        recipe: str,
        records: KVRecords = (),
        references: Mapping[str, Sequence[KVIdentity]],
        vectors: Mapping[str, ChunkVectors] | None = None,
        lenient: bool = False,
    ) -> DocumentChange:
        """A document's new version, checked and encoded, for `write_changes`; nothing is written yet.

        `recipe` says how the document was processed, for `is_current`. `references` names the KV that each chunk needs,
        by chunk id; records that are in the store already need not be among `records`. KV that no chunk needs any more
        is deleted then. A record that a reference lacks makes `write_changes` fail; `lenient` leaves the reference out,
        as others may have evicted the record meanwhile. `StoreError` for parts that do not belong together.
        """
        return DocumentChange(
            document=document,
            text=text,
            chunks=chunks,
            recipe=recipe,
            records={record.key: record for record in self._encode(records)},
            references={
                chunk_id: {identity.key(): identity for identity in identities}
                for chunk_id, identities in references.items()
            },
            vectors=vectors or {},
            lenient=lenient,
        )

    def write_changes(self, changes: Sequence[DocumentChange]) -> None:
        """Make documents visible in one transaction, in this order: all of them or, after an error, none.

        A transaction waits for the disk, so that small documents are better written together. `StoreError` when a
        reference has no record, or a chunk belongs to another document.
        """

        def apply(txn: Transaction) -> None:
            for change in changes:
                change.apply(txn)

        if changes:
            self._write(apply, need=sum(change.size for change in changes))

    def delete_document(self, document_id: str) -> bool:
        """Delete a document, its chunks, their vectors, and the KV that only they needed; False when there is none."""
        return self._write(lambda txn: drop_document(txn, document_id))

    def is_current(self, document_id: str, content_hash: str, recipe: str) -> bool:
        """Whether the document is stored with this content and processed in this way, so that ingest can skip it."""
        stored = self.document(document_id)
        return stored is not None and (stored.document.content_hash, stored.recipe) == (content_hash, recipe)

    def document(self, document_id: str) -> StoredDocument | None:
        with self._live().read() as txn:
            value = txn.get("documents", document_key(document_id))
            return None if value is None else parse_document(value)

    @property
    def empty(self) -> bool:
        """Whether the store holds no document."""
        return next(self.documents(), None) is None

    def documents(self, *, after: str = "") -> Iterator[StoredDocument]:
        """The documents in the order of their ids, all or those behind the id `after`, which need not be there.

        They are read in batches, each from a snapshot of its own.
        """
        for batch in self._live().batches("documents", after=document_key(after) if after else None):
            for _, value in batch:
                yield parse_document(value)

    def text(self, document_id: str) -> str | None:
        with self._live().read() as txn:
            value = txn.get("texts", digest(document_id))
            return None if value is None else parse_text(value)

    # Chunks

    def chunks(self, document_id: str | None = None) -> Iterator[Chunk]:
        """The chunks of one document, or of all, in an order that only depends on the documents in the store.

        They are read in batches, each from a snapshot of its own; compare `generation` to see whether others wrote.
        """
        for batch in self._live().batches("chunks", b"" if document_id is None else digest(document_id)):
            for _, value in batch:
                yield parse_chunk(value)

    def chunk(self, chunk_id: str) -> Chunk | None:
        return self.chunk_many([chunk_id]).get(chunk_id)

    def chunk_many(self, chunk_ids: Iterable[str]) -> dict[str, Chunk]:
        """The chunks by id, from one snapshot; ids that are not in the store are left out."""
        found = {}
        with self._live().read() as txn:
            for chunk_id in chunk_ids:
                place = txn.get("places", digest(chunk_id))
                value = None if place is None else txn.get("chunks", bytes(place))
                chunk = None if value is None else parse_chunk(value)
                # A place has no checksum, so that a damaged one may lead to another chunk.
                if chunk is not None and chunk.chunk_id == chunk_id:
                    found[chunk_id] = chunk
        return found

    def chunks_named(self, names: Iterable[bytes]) -> list[Chunk]:
        """The chunks that `Changes` names, from one snapshot, without those that are not in the store."""
        with self._live().read() as txn:
            places = [(key, bytes(place)) for name in names for key, place in txn.scan("places", name)]
            rows = [(key, txn.get("chunks", place)) for key, place in places]
            found = [(key, parse_chunk(row)) for key, row in rows if row is not None]
        return [chunk for key, chunk in found if digest(chunk.chunk_id) == key]

    def documents_named(self, names: Iterable[bytes]) -> list[tuple[StoredDocument, list[str]]]:
        """The documents that `Changes` names, with the ids of their chunks, from one snapshot, without those that are
        not in the store."""
        found: list[tuple[StoredDocument, list[str]]] = []
        bare: set[bytes] = set()
        with self._live().read() as txn:
            for name in names:
                chunks = [parse_chunk(row) for _, row in txn.scan("chunks", name)]
                row = txn.get("documents", document_key(chunks[0].document_id)) if chunks else None
                if row is not None:
                    found.append((parse_document(row), [chunk.chunk_id for chunk in chunks]))
                elif not chunks and any(txn.scan("texts", name, limit=1)):
                    bare.add(name)
            if bare:  # no chunk tells the id of a document without chunks
                keys = [key for key in txn.keys("documents") if document_digest(key)[:NAME_BYTES] in bare]
                rows = (txn.get("documents", key) for key in keys)
                found += [(parse_document(row), []) for row in rows if row is not None]
        return found

    def vectors(self, kind: VectorKind) -> Iterator[tuple[str, Vector]]:
        """Every chunk id with its vector of a kind, in the order of `chunks`; chunks without one are left out.

        Retrieval indexes are built from this. Vectors are read in batches, as chunks are.
        """
        for batch in self._live().batches("chunks", size=64):
            with self._live().read() as txn:
                found = [(value, vector_of(txn, kind, key)) for key, value in batch]
            yield from ((parse_chunk(value).chunk_id, vector) for value, vector in found if vector is not None)

    def vector_kinds(self) -> frozenset[VectorKind]:
        """The kinds of vectors that any chunk has."""
        with self._live().read() as txn:
            return frozenset(kind for kind in VECTOR_KINDS if any(txn.scan("vectors", vector_prefix(kind), limit=1)))

    def vector_many(self, kind: VectorKind, chunk_ids: Iterable[str]) -> dict[str, Vector]:
        """The vectors of these chunks, from one snapshot; ids without a vector are left out."""
        found = {}
        with self._live().read() as txn:
            for chunk_id in chunk_ids:
                place = txn.get("places", digest(chunk_id))
                vector = None if place is None or len(place) != PLACE_BYTES else vector_of(txn, kind, bytes(place))
                if vector is not None:
                    found[chunk_id] = vector
        return found

    def places(self) -> Iterator[tuple[bytes, bytes]]:
        """Of every chunk, the digest of its id and that of its document's id (`H` in docs/formats.md), in batches."""
        for batch in self._live().batches("places", size=4096):
            for name, place in batch:
                yield name, place[:32]
