"""Small, deterministic documents, chunks and KV for every test of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragkv.attention.kv import ChunkKV
from ragkv.ingest.span import chunk_id, find_chunk
from ragkv.store import ChunkVectors, KVIdentity, Store
from ragkv.store.transaction import TABLES, Transaction, digest
from ragkv.types import Chunk, Document, Encoding


def _kv(
    tokens: int,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    encoded_at: int = 0,
) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)

    def tensor() -> torch.Tensor:
        return torch.randn(kv_heads, tokens, head_dim, generator=generator).to(dtype)

    return ChunkKV(
        keys=tuple(tensor() for _ in range(layers)),
        values=tuple(tensor() for _ in range(layers)),
        encoded_at=encoded_at,
    )


def _identity(*chunk_ids: int, prefix_ids: tuple[int, ...] = (), model: str = "c0ffee") -> KVIdentity:
    encoding = Encoding.PREFIXED if prefix_ids else Encoding.STANDALONE
    return KVIdentity(model=model, encoding=encoding, prefix_ids=prefix_ids, chunk_ids=chunk_ids)


def _document(name: str, content_hash: str = "00") -> Document:
    return Document(document_id=name, source=f"{name}.txt", content_hash=content_hash, metadata={"author": "A"})


def _chunk(name: str, ordinal: int, token_ids: tuple[int, ...]) -> Chunk:
    return Chunk(
        chunk_id=f"{name}#{ordinal}",
        document_id=name,
        ordinal=ordinal,
        text=f"text {token_ids}",
        token_ids=token_ids,
        start=ordinal,
        end=ordinal + 1,
        page=ordinal,
        heading="H",
    )


def _equal(left: ChunkKV | None, right: ChunkKV) -> bool:
    return (
        left is not None
        and left.encoded_at == right.encoded_at
        and left.dtype == right.dtype
        and left.shape == right.shape
        and all(
            torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
            for a, b in zip(left.tensors, right.tensors, strict=True)
        )
    )


def _write(store: Store, name: str, *token_ids: tuple[int, ...], content_hash: str = "00") -> list[Chunk]:
    """A document of one chunk per tuple of ids, each with its standalone record."""
    chunks = [_chunk(name, ordinal, ids) for ordinal, ids in enumerate(token_ids)]
    identities = {chunk.chunk_id: _identity(*chunk.token_ids) for chunk in chunks}
    store.write_document(
        _document(name, content_hash),
        f"the text of {name}",
        chunks,
        recipe="recipe",
        records=((identity, _kv_of(identity)) for identity in identities.values()),
        references={chunk_id: [identity] for chunk_id, identity in identities.items()},
        vectors={chunk.chunk_id: _vectors_of(chunk) for chunk in chunks},
    )
    return chunks


def _vectors_of(chunk: Chunk) -> ChunkVectors:
    """Vectors that are a function of the chunk."""
    numbers = np.random.default_rng([chunk.ordinal, *chunk.token_ids])
    return ChunkVectors(
        dense=numbers.random(8, np.float32),
        sparse={f"t{token}": float(numbers.integers(9)) / 8 for token in chunk.token_ids},
        colbert=numbers.random((len(chunk.token_ids), 4)).astype(np.float16),
    )


def _kv_of(identity: KVIdentity) -> ChunkKV:
    """A KV that is a function of the identity, so that a test can tell whose it was given."""
    return _kv(len(identity.chunk_ids), seed=int.from_bytes(identity.key()[:4], "big"))


@pytest.fixture(scope="session")
def make_kv() -> Callable[..., ChunkKV]:
    return _kv


@pytest.fixture(scope="session")
def kv_of() -> Callable[[KVIdentity], ChunkKV]:
    return _kv_of


@pytest.fixture(scope="session")
def identity() -> Callable[..., KVIdentity]:
    return _identity


@pytest.fixture(scope="session")
def document() -> Callable[..., Document]:
    return _document


@pytest.fixture(scope="session")
def chunk() -> Callable[..., Chunk]:
    return _chunk


@pytest.fixture(scope="session")
def equal() -> Callable[[ChunkKV | None, ChunkKV], bool]:
    return _equal


@pytest.fixture(scope="session")
def write() -> Callable[..., list[Chunk]]:
    return _write


@pytest.fixture(scope="session")
def vectors_of() -> Callable[[Chunk], ChunkVectors]:
    return _vectors_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as opened:
        yield opened


class Library:
    """Three documents as an ingest writes them, and all that a repair may ask: texts cut into chunks that know their
    spans, ids by span, KV and vectors that are functions of their chunk."""

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
        self.prefix = _identity(1, 2, 3)
        store.keep_kv(self.prefix, _kv_of(self.prefix))
        store.put_meta("prompt", {"model": "c0ffee", "prefix_ids": [1, 2, 3]})

    def write(self, name: str, text: str, *, pages: bool = False) -> list[Chunk]:
        document = _document(name, f"hash of {text}")
        chunks, start = [], 0
        for ordinal, piece in enumerate(text.split("\n")):
            end = start + len(piece)
            chunks.append(
                Chunk(
                    chunk_id=chunk_id(document, ordinal, start, end),
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
            document,
            text,
            chunks,
            recipe="recipe",
            records=[(identity, _kv_of(identity)) for identity in new],
            references=needed,
            vectors={chunk.chunk_id: _vectors_of(chunk) for chunk in chunks},
        )
        return chunks

    def find_chunk(self, *arguments: Any) -> tuple[str, int, int] | None:
        return find_chunk(*arguments)

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def identities(self, chunk: Chunk) -> list[KVIdentity]:
        return [_identity(*chunk.token_ids), _identity(*chunk.token_ids, prefix_ids=(1, 2, 3))]

    def encode(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        self.encoded += identities
        return [_kv_of(identity) for identity in identities]

    def embed(self, chunks: Sequence[Chunk]) -> dict[str, ChunkVectors] | None:
        return {chunk.chunk_id: _vectors_of(chunk) for chunk in chunks} if self.embedder else None

    def rows(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """Every live row, less the generation and the history."""
        with self.store._live().read() as txn:
            found = {
                table: [(key, bytes(value)) for key, value in txn.scan(table)] for table in TABLES if table != "changes"
            }
        found["meta"] = [(key, value) for key, value in found["meta"] if key != b"generation"]
        return found

    def edit(self, change: Callable[[Transaction], object]) -> None:
        """Change rows behind the store's back."""
        self.store._live().write(change)

    def place(self, name: str, ordinal: int) -> bytes:
        return digest(name) + ordinal.to_bytes(4, "big")


@pytest.fixture
def library(store: Store) -> Library:
    return Library(store)
