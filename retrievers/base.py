"""Protocols of vector searches, embedders and rerankers, and the functions that combine scores.

Nothing here knows a store. Retrievers return raw scores, in the scale of their kind. `fuse` maps raw scores to the
relevance r in [0, 1) that PCED decodes with (Appendix B, Eqs. 4-7; Eq. 2 adds gamma * log r to an expert's logits).
NaN and infinity raise ValueError: they are a fault of the model or the index and must not become a rank.

`relative_score_fusion` and `reciprocal_rank_fusion` merge several rankings into one. They only order chunks: PCED's
relevance always comes from the raw scores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ragkv.retrievers.arrays import IdSet

V = TypeVar("V", contravariant=True)
"""A vector of an index: `(d,)` float32 if dense, else a mapping of token to weight."""

ScoreKind = Literal["dense", "sparse", "colbert"]
"""The scale of a raw score: a cosine in [-1, 1] (dense, colbert), or from 0 up (sparse, and BM25)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk found by a retriever, with its raw score."""

    chunk_id: str
    score: float


def best_hits(hits: Iterable[Hit], k: int | None = None) -> list[Hit]:
    """The best `k` hits (all when None), best first, ties by chunk id."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))[:k]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """The vectors of `n` texts, of the requested kinds.

    dense: (n, d), unit rows; sparse: n mappings of token to weight; colbert: n arrays (tokens, d) of unit rows.
    """

    dense: NDArray[np.float32] | None = None
    sparse: Sequence[Mapping[str, float]] | None = None
    colbert: Sequence[NDArray[np.float32]] | None = None


@runtime_checkable
class Embedder(Protocol):
    """Turns texts into vectors; `modes` are the kinds that it supports. Thread-safe.

    `fingerprint` is a hex digest over weights, tokenizer, length limit and everything else that changes a vector.
    Vectors of different fingerprints are never compared. An empty text gets a zero dense vector, no sparse weights and
    no ColBERT rows, so it is never the best match.
    """

    name: str
    modes: frozenset[ScoreKind]

    @property
    def fingerprint(self) -> str: ...

    def embed_documents(self, texts: Sequence[str]) -> Embedding: ...

    def embed_query(self, text: str) -> Embedding:
        """As `embed_documents` for one text, with the instruction that the model expects before questions."""
        ...


class VectorSearch(Protocol[V]):
    """What a question needs of an index over vectors of one kind. Thread-safe."""

    def search(self, query: V, k: int, *, among: Collection[str] | IdSet | None = None) -> list[Hit]:
        """At most `k` hits, best first, ties by chunk id; fewer if fewer match.

        `among` restricts the search to the chunks of this set.
        """
        ...


@runtime_checkable
class Reranker(Protocol):
    """A cross-encoder: one raw logit per text, higher for a more relevant text. Thread-safe.

    Empty questions and texts are scored by the model like any other.
    """

    name: str

    def score(self, question: str, texts: Sequence[str]) -> list[float]: ...


EPSILON = 1e-8


def normalise_retrieval(score: float, kind: ScoreKind) -> float:
    """Eq. 4 for dense and colbert: clip((s + 1) / 2); Eq. 5 for sparse: clip(2 / pi * arctan(max(s, 0)))."""
    _require_finite(score)
    if kind == "sparse":
        return _clip(2 / math.pi * math.atan(max(score, 0.0)))
    if kind in ("dense", "colbert"):
        return _clip((score + 1) / 2)
    raise ValueError(f"unknown kind of score: {kind!r}")


def normalise_rerank(logit: float) -> float:
    """Eq. 6: the clipped sigmoid of a raw reranker logit, in a form that never overflows."""
    _require_finite(logit)
    small = math.exp(-abs(logit))  # in (0, 1]
    return _clip((1.0 if logit >= 0 else small) / (1.0 + small))


def fuse(retrieval: float, rerank: float | None) -> float:
    """Eq. 7: the harmonic mean of two normalised scores; without a reranker, r is the retrieval score."""
    for score in (retrieval, 0.0 if rerank is None else rerank):
        if not 0.0 <= score < 1.0:
            raise ValueError(f"a normalised score must be in [0, 1), not {score!r}")
    if rerank is None:
        return retrieval
    return 2 * retrieval * rerank / (retrieval + rerank + EPSILON)


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0 - EPSILON)


def _require_finite(score: float) -> None:
    if not math.isfinite(score):
        raise ValueError(f"a score must be a finite number, not {score!r}")


def relative_score_fusion(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Every chunk of `rankings` by the sum of (s - least) / (greatest - least) over the rankings that found it.

    The best of each ranking adds 1. The last one adds nothing, like a chunk that was not found. If all scores of a
    ranking are equal, each adds 1. The order of the rankings does not matter; ties by chunk id. `ValueError` when a
    ranking has a chunk twice, or a score that is not finite.
    """
    return _fused(rankings, _relative)


def reciprocal_rank_fusion(rankings: Sequence[Sequence[Hit]], *, k: int = 60) -> list[Hit]:
    """Every chunk of `rankings` (each best first) by the sum of 1 / (k + rank), with ranks from 1; ties by chunk id.

    Neither the order of the rankings nor the scores in them matter. `ValueError` when a ranking has a chunk twice.
    """
    if k < 0:
        raise ValueError(f"k must be 0 or more, not {k}")
    return _fused(rankings, lambda ranking: (1 / (k + rank) for rank in range(1, len(ranking) + 1)))


def _fused(rankings: Sequence[Sequence[Hit]], shares_of: Callable[[Sequence[Hit]], Iterable[float]]) -> list[Hit]:
    """Every chunk by the sum of its shares; `shares_of` a ranking gives one share per hit."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        if len({hit.chunk_id for hit in ranking}) != len(ranking):
            raise ValueError("a ranking has a chunk twice")
        for hit, share in zip(ranking, shares_of(ranking), strict=True):
            shares[hit.chunk_id].append(share)
    return best_hits(Hit(chunk_id=chunk_id, score=math.fsum(found)) for chunk_id, found in shares.items())


def _relative(ranking: Sequence[Hit]) -> list[float]:
    if not all(math.isfinite(hit.score) for hit in ranking):
        raise ValueError("a ranking has a score that is not finite")
    least = min((hit.score for hit in ranking), default=0.0)
    span = max((hit.score for hit in ranking), default=0.0) - least
    return [(hit.score - least) / span if span else 1.0 for hit in ranking]
