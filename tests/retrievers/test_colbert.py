from __future__ import annotations

import numpy as np
import pytest

from ragkv.errors import RetrievalError
from ragkv.retrievers import colbert, colbert_scores


def unit_rows(tokens: int, seed: int, dtype: str = "float32", dimension: int = 32) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((tokens, dimension))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch_rows", [1, 50, 8192])
def test_scores_are_those_of_the_definition(dtype: str, batch_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colbert, "_BATCH_ROWS", batch_rows)
    documents = [unit_rows(tokens, tokens, dtype) for tokens in (1, 30, 7, 64, 2, 49, 51)]
    query = unit_rows(11, 99, dtype)
    expected = [
        float(np.mean([max(float(q.astype(float) @ d.astype(float)) for d in document) for q in query]))
        for document in documents
    ]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)
    assert colbert_scores(query, documents[::-1]) == pytest.approx(expected[::-1], abs=1e-6)


@pytest.mark.slow  # FlagEmbedding takes ten seconds to import
def test_scores_are_those_of_flag_embedding() -> None:
    from FlagEmbedding.inference.embedder.encoder_only.m3 import M3Embedder

    query, documents = unit_rows(11, 99), [unit_rows(tokens, tokens) for tokens in (1, 30, 7)]
    expected = [float(M3Embedder.colbert_score(None, query, document)) for document in documents]  # type: ignore[arg-type]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)


def test_by_hand() -> None:
    """Two query tokens; the best of the document is 0.6 for one and 0.8 for the other: mean 0.7."""
    query = np.eye(3, dtype=np.float32)[:2]
    document = np.array([[0.6, -0.8, 0], [0, 0.8, 0.6], [-1, 0, 0]], dtype=np.float32)
    assert colbert_scores(query, [document]) == pytest.approx([0.7])
    assert colbert_scores(query, [query]) == [1.0]


def test_a_text_without_tokens_is_the_least_relevant() -> None:
    query, empty = unit_rows(3, 1), np.empty((0, 32), dtype=np.float16)
    scores = colbert_scores(query, [empty, unit_rows(5, 2), empty])
    assert scores[0] == scores[2] == -1
    assert scores[1] == colbert_scores(query, [unit_rows(5, 2)])[0] > -1
    assert colbert_scores(empty, [query]) == [-1]
    assert colbert_scores(query, []) == []


def test_shapes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(RetrievalError, match="of 16 numbers cannot be compared with a query's of 32"):
        colbert_scores(unit_rows(3, 1), [unit_rows(3, 1), unit_rows(3, 1, dimension=16)])
    for query, document in ((unit_rows(3, 1)[0], unit_rows(3, 1)), (unit_rows(3, 1), unit_rows(3, 1)[0])):
        with pytest.raises(RetrievalError, match=r"must be \(tokens, d\)"):
            colbert_scores(query, [document])
