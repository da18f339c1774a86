"""Late interaction (ColBERT, bge-m3's third mode): compare a question's token vectors with those of each candidate.

This is too expensive for all chunks, so that it is used for the candidates of a cheaper index. Their vectors come from
the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragkv.errors import RetrievalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["colbert_scores"]

_BATCH_ROWS = 8192
"""Chunk tokens per matrix product: 32 MiB of float32 at 1024 dimensions, however many candidates there are."""

_NOTHING = -1.0
"""The score of a text without a token: the least mean of cosines, which is relevance 0 by PCED Eq. 4."""


def colbert_scores(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> list[float]:
    """For each document, the mean over query tokens of the best inner product with a document token.

    query: (tokens, d); documents: each (tokens, d), of any float type, computed in float32. The scores are those of
    FlagEmbedding's `colbert_score`; without rows, the score is -1. `RetrievalError` when dimensions differ.
    """
    import numpy as np

    query = _rows(query)
    rows = [_rows(document) for document in documents]
    scores = np.full(len(rows), _NOTHING, dtype=np.float32)
    if not len(query):
        return [_NOTHING] * len(rows)
    batch: list[int] = []
    size = 0
    for at, document in enumerate(rows):
        if not len(document):
            continue
        if document.shape[1] != query.shape[1]:
            raise RetrievalError(
                f"A ColBERT vector of {document.shape[1]} numbers cannot be compared with a query's of "
                f"{query.shape[1]}: they are of different embedders; embed the documents again."
            )
        if batch and size + len(document) > _BATCH_ROWS:
            scores[batch] = _batch(query, [rows[i] for i in batch])
            batch, size = [], 0
        batch.append(at)
        size += len(document)
    if batch:
        scores[batch] = _batch(query, [rows[i] for i in batch])
    return [float(score) for score in scores]


def _rows(vectors: NDArray[Any]) -> NDArray[Any]:
    if vectors.ndim != 2:
        raise RetrievalError(f"ColBERT vectors must be (tokens, d), not of shape {vectors.shape}.")
    return vectors


def _batch(query: NDArray[Any], documents: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(documents,): the scores of documents that all have rows."""
    import numpy as np

    lengths = [len(document) for document in documents]
    stacked = np.empty((sum(lengths), query.shape[1]), dtype=np.float32)
    np.concatenate(documents, out=stacked, casting="same_kind")
    products = stacked @ query.astype(np.float32).T  # (document tokens, query tokens)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    best = np.maximum.reduceat(products, starts, axis=0)  # (documents, query tokens)
    return best.mean(axis=1)  # type: ignore[no-any-return]
