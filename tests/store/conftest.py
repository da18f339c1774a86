"""Fixtures: an empty store, and a library of three documents that can repair itself."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from storekit import document, identity, kv_of, vectors_of

from ragkv.attention.kv import ChunkKV
from ragkv.ingest.chunker import chunk_id
from ragkv.store import ChunkVectors, KVIdentity, Store
from ragkv.store.tables import TABLES, Transaction, digest
from ragkv.types import Chunk


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as opened:
        yield opened


class Library:
    """Three documents as an ingest writes them, and everything that a repair may ask for: texts cut into chunks with
    known spans, token ids by span, and KV and vectors that are functions of their chunk.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.encoded: list[KVIdentity] = []
        self.embedder = True
        for name, text in (
            ("a", "one two three\nfour five\nsix seven eight\nnine"),
            ("b", "one two three\nten eleven"),
            ("c", "twelve"),
        ):
            self.write(name, text)
        self.prefix = identity(1, 2, 3)
        store.keep_kv(self.prefix, kv_of(self.prefix))
        store.put_meta("prompt", {"model": "c0ffee", "prefix_ids": [1, 2, 3]})

    def write(self, name: str, text: str, *, pages: bool = False) -> list[Chunk]:
        written = document(name, f"hash of {text}")
        chunks, start = [], 0
        for ordinal, piece in enumerate(text.split("\n")):
            end = start + len(piece)
            chunks.append(
                Chunk(
                    chunk_id=chunk_id(written, ordinal, start, end),
                    document_id=name,
                    ordinal=ordinal,
                    text=piece,
                    token_ids=self.tokens(piece),
                    start=start,
                    end=end,
                    page=ordinal if pages else None,
                )
            )
            start = end + 1
        needed = {chunk.chunk_id: self.identities(chunk) for chunk in chunks}
        new = {identity for identities in needed.values() for identity in identities}
        self.store.write_document(
            written,
            text,
            chunks,
            recipe="recipe",
            records=[(identity, kv_of(identity)) for identity in new],
            references=needed,
            vectors={chunk.chunk_id: vectors_of(chunk) for chunk in chunks},
        )
        return chunks

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def identities(self, chunk: Chunk) -> list[KVIdentity]:
        return [identity(*chunk.token_ids), identity(*chunk.token_ids, prefix_ids=(1, 2, 3))]

    def encode(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        self.encoded += identities
        return [kv_of(identity) for identity in identities]

    def embed(self, chunks: Sequence[Chunk]) -> dict[str, ChunkVectors] | None:
        return {chunk.chunk_id: vectors_of(chunk) for chunk in chunks} if self.embedder else None

    def rows(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """Every live row, without the generation and the change history."""
        with self.store._live().read() as txn:
            result = {
                table: [(key, bytes(value)) for key, value in txn.scan(table)] for table in TABLES if table != "changes"
            }
        result["meta"] = [(key, value) for key, value in result["meta"] if key != b"generation"]
        return result

    def edit(self, change: Callable[[Transaction], object]) -> None:
        """Modify rows without the store's knowledge."""
        self.store._live().write(change)

    def place(self, name: str, ordinal: int) -> bytes:
        return digest(name) + ordinal.to_bytes(4, "big")


@pytest.fixture
def library(store: Store) -> Library:
    return Library(store)
