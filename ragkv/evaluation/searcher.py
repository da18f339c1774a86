"""The pipeline's own search over texts that are in no index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ragkv.index.search import Searcher
from ragkv.retrievers import BM25, DenseIndex, Embedder, Reranker, ScoreKind, SparseIndex, VectorIndex

__all__ = ["build_searcher"]


def build_searcher(
    texts: Mapping[str, str],
    *,
    vectors: Mapping[ScoreKind, Iterable[tuple[str, Any]]],
    colbert: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    bm25: bool = False,
    embedder: Embedder | None = None,
    reranker: Reranker | None = None,
) -> Searcher:
    """Index `texts` in memory by id: `vectors` are pairs of (id, vector), dense or sparse.

    `colbert` returns the `(tokens, d)` arrays of some ids; `bm25` also builds a BM25 index.
    """
    indexes: dict[ScoreKind, VectorIndex[Any]] = {}
    for kind, pairs in vectors.items():
        indexes[kind] = DenseIndex() if kind == "dense" else SparseIndex()
        indexes[kind].update(pairs, (), generation=1, embedder="")
    words = None
    if bm25:
        words = BM25()
        words.build(texts.items(), 1)
    return Searcher(
        embedder=embedder,
        indexes=indexes,
        bm25=words,
        texts=lambda ids: {name: texts[name] for name in ids},
        colbert=colbert or (lambda ids: {}),
        reranker=reranker,
    )
