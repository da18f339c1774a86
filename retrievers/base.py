"""What finds and judges chunks, as protocols: they know texts and ids, no store.

Scores stay raw here, in the scale of their kind; `fusion` maps them to the relevance that PCED decodes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Embedder", "Embedding", "Hit", "Reranker", "Retriever", "ScoreKind"]

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
    """Texts to vectors; `modes` are the forms that it can give. A query is embedded as n = 1."""

    name: str
    modes: frozenset[ScoreKind]

    def embed_documents(self, texts: Sequence[str]) -> Embedding: ...

    def embed_query(self, text: str) -> Embedding: ...


@runtime_checkable
class Retriever(Protocol):
    """A derived index over chunks, rebuilt whole when its `generation` is behind the store's."""

    name: str
    score_kind: ScoreKind
    generation: int

    def build(self, chunks: Iterable[tuple[str, str]], generation: int) -> None:
        """Replace the index by one over (chunk id, text) pairs; ids are unique, else `RetrievalError`."""

    def search(self, question: str, k: int) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id; fewer when fewer match. Thread-safe."""
        ...

    def save(self, folder: Path) -> None:
        """Write the index to `folder`, replacing what is there in one step (a crash leaves either)."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Open what `save` wrote; `RetrievalError` when it is absent or damaged: the caller rebuilds."""
        ...


@runtime_checkable
class Reranker(Protocol):
    """A cross-encoder: one raw logit per text, the higher the more relevant to the question."""

    name: str

    def score(self, question: str, texts: Sequence[str]) -> list[float]: ...
