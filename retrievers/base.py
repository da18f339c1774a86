"""What finds and judges chunks, as protocols: they know texts and ids, no store.

Scores stay raw here, in the scale of their kind; `fusion` maps them to the relevance that PCED decodes with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Embedder", "Embedding", "Hit", "Reranker", "Retriever", "ScoreKind", "VectorIndex"]

V = TypeVar("V", contravariant=True)
"""What is searched: a dense vector `(d,)` float32, or a mapping of token to weight."""

ScoreKind = Literal["dense", "sparse", "colbert"]
"""The scale of a raw score: cosine in [-1, 1] (dense, colbert) or from 0 up (sparse, BM25 too)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that a retriever found, with its raw score."""

    chunk_id: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """What an embedder says of `n` texts, in the forms that it was asked for.

    dense: (n, d) unit rows; sparse: n mappings of token to weight; colbert: n arrays (tokens, d) of unit
    rows.
    """

    dense: NDArray[np.float32] | None = None
    sparse: Sequence[Mapping[str, float]] | None = None
    colbert: Sequence[NDArray[np.float32]] | None = None


@runtime_checkable
class Embedder(Protocol):
    """Texts to vectors; `modes` are the forms that it can give. Thread-safe.

    `fingerprint` is a hex digest over the weights, the tokenizer, the length limit and whatever else changes a
    vector: vectors of different fingerprints are never compared. A text that is empty gets a zero dense vector, no
    sparse weights and no ColBERT rows, so that it is never the best match of anything.
    """

    name: str
    modes: frozenset[ScoreKind]

    @property
    def fingerprint(self) -> str: ...

    def embed_documents(self, texts: Sequence[str]) -> Embedding: ...

    def embed_query(self, text: str) -> Embedding:
        """As `embed_documents` of one text, with the instruction that the model wants before questions."""
        ...


@runtime_checkable
class Retriever(Protocol):
    """An index over texts, rebuilt whole when its `generation` is behind the store's."""

    name: str
    score_kind: ScoreKind
    generation: int

    def build(self, chunks: Iterable[tuple[str, str]], generation: int) -> None:
        """Replace the index by one over (chunk id, text) pairs; ids are unique, else `RetrievalError`."""

    def search(self, question: str, k: int, *, among: Collection[str] | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id; fewer when fewer match. Thread-safe.

        `among`: only chunks with these ids, of which the best `k` are found however far down they rank.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the index to `folder`, replacing what is there in one step (a crash leaves either)."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open what `save` wrote; `RetrievalError` when it is absent or damaged: the caller rebuilds."""
        ...


@runtime_checkable
class VectorIndex(Protocol[V]):
    """An index over vectors of one kind, kept up with the store by adding and removing chunks. Thread-safe.

    `generation` is the store's when the index was last brought up to date, `embedder` the fingerprint of what made
    the vectors; both are the caller's to set with `update`, and are saved and loaded with the index.
    """

    score_kind: ScoreKind
    generation: int
    embedder: str

    def __len__(self) -> int: ...

    def chunk_ids(self) -> frozenset[str]:
        """What the index holds, for the caller to compare with the store."""
        ...

    def update(
        self, added: Iterable[tuple[str, V]], removed: Collection[str], *, generation: int, embedder: str
    ) -> None:
        """Remove, then add; searches that run meanwhile see the old index. `RetrievalError` for an id that is there."""

    def search(self, query: V, k: int, *, among: Collection[str] | None = None) -> list[Hit]:
        """As `Retriever.search`, of a query vector."""
        ...

    def save(self, folder: Path) -> None:
        """As `Retriever.save`."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """As `Retriever.load`."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """A cross-encoder: one raw logit per text, the higher the more relevant to the question. Thread-safe.

    A question or text without a word in it gets the logit that the model gives; no texts, an empty list.
    """

    name: str

    def score(self, question: str, texts: Sequence[str]) -> list[float]: ...
