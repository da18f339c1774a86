"""Protocols for what finds chunks and judges their relevance. They know texts and ids, but no store.

Scores are raw here, in the scale of their kind; `fusion` maps them to the relevance that PCED decodes with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.retrievers.roster import KeySet

__all__ = ["Embedder", "Embedding", "Hit", "Reranker", "Retriever", "ScoreKind", "VectorIndex", "best_hits"]

V = TypeVar("V", contravariant=True)
"""A vector of an index: `(d,)` float32 if dense, else a mapping of token to weight."""

ScoreKind = Literal["dense", "sparse", "colbert"]
"""The scale of a raw score: a cosine in [-1, 1] (dense, colbert), or from 0 up (sparse, and BM25)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that a retriever found, with its raw score."""

    chunk_id: str
    score: float


def best_hits(hits: Iterable[Hit], k: int | None = None) -> list[Hit]:
    """The best `k` hits (all when None), best first, ties by chunk id."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))[:k]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """The vectors of `n` texts, of the kinds that the embedder was asked for.

    dense: (n, d), unit rows; sparse: n mappings of token to weight; colbert: n arrays (tokens, d) of unit rows.
    """

    dense: NDArray[np.float32] | None = None
    sparse: Sequence[Mapping[str, float]] | None = None
    colbert: Sequence[NDArray[np.float32]] | None = None


@runtime_checkable
class Embedder(Protocol):
    """Texts to vectors; `modes` are the kinds of vectors that it can give. Thread-safe.

    `fingerprint` is a hex digest over the weights, the tokenizer, the length limit and whatever else changes a vector.
    Vectors of different fingerprints are never compared. An empty text gets a zero dense vector, no sparse weights and
    no ColBERT rows, so that it is never the best match.
    """

    name: str
    modes: frozenset[ScoreKind]

    @property
    def fingerprint(self) -> str: ...

    def embed_documents(self, texts: Sequence[str]) -> Embedding: ...

    def embed_query(self, text: str) -> Embedding:
        """As `embed_documents` for one text, with the instruction that the model expects before questions."""
        ...


@runtime_checkable
class Retriever(Protocol):
    """An index over texts, at the `generation` of the store that it was built or updated for."""

    name: str
    score_kind: ScoreKind
    generation: int

    def build(self, chunks: Iterable[tuple[str, str]], generation: int) -> None:
        """Replace the index by one over (chunk id, text) pairs; `RetrievalError` when an id occurs twice."""

    def search(self, question: str, k: int, *, among: Collection[str] | KeySet | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id; fewer when fewer match. Thread-safe.

        `among`: search only the chunks with these ids, of which the best `k` are found however far down they rank.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the index to `folder`. It replaces the one that is there in one step, so that a crash leaves either."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open what `save` wrote; `RetrievalError` when it is missing or damaged, and the caller has to rebuild it."""
        ...


@runtime_checkable
class VectorIndex(Protocol[V]):
    """An index over vectors of one kind, which is updated by adding and removing chunks. Thread-safe.

    `generation` is that of the store at the last update, `embedder` the fingerprint of the model that made the vectors.
    The caller sets both with `update`; they are saved and loaded with the index.
    """

    score_kind: ScoreKind
    generation: int
    embedder: str

    def __len__(self) -> int: ...

    def chunk_ids(self) -> frozenset[str]:
        """The ids of all chunks in the index."""
        ...

    def update(
        self,
        added: Iterable[tuple[str, V]],
        removed: Collection[str] | KeySet,
        *,
        generation: int,
        embedder: str,
        merge: bool = True,
    ) -> None:
        """Remove, then add; searches that run meanwhile see the old index.

        `RetrievalError` for an added id that is already in the index. `merge` False: no more work than these chunks
        make, for a question that finds the index behind.
        """

    def search(self, query: V, k: int, *, among: Collection[str] | KeySet | None = None) -> list[Hit]:
        """As `Retriever.search`, for a query vector."""
        ...

    def save(self, folder: Path) -> None:
        """As `Retriever.save`."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """As `Retriever.load`."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """A cross-encoder: one raw logit per text, higher for a text that is more relevant to the question. Thread-safe.

    An empty question or text gets whatever logit the model gives.
    """

    name: str

    def score(self, question: str, texts: Sequence[str]) -> list[float]: ...
