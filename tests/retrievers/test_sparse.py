import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import RetrievalError
from ragkv.retrievers import Hit, SparseIndex, colbert_scores, vectors
from ragkv.retrievers.arrays import term_hashes

weights = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 4, width=32), max_size=6)


def built(vectors: list[dict[str, float]]) -> SparseIndex:
    index = SparseIndex()
    index.update([(f"c{at:04}", vector) for at, vector in enumerate(vectors)], [], generation=1, embedder="e")
    return index


@settings(max_examples=100)
@given(st.lists(weights, max_size=12), weights, st.integers(1, 15))
def test_scores_are_inner_products(vectors, query, k):
    expected = {
        f"c{at:04}": sum(weight * vector.get(token, 0.0) for token, weight in query.items())
        for at, vector in enumerate(vectors)
    }
    hits = built(vectors).search(query, k)
    for hit in hits:
        assert hit.score == pytest.approx(expected[hit.chunk_id], rel=1e-5, abs=1e-30)
    best = sorted((score for score in expected.values() if score > 1e-30), reverse=True)[:k]
    assert [hit.score for hit in hits if hit.score > 1e-30] == pytest.approx(best, rel=1e-5)


@pytest.mark.slow  # FlagEmbedding takes ten seconds to import
def test_scores_are_those_of_flag_embedding():
    from FlagEmbedding.inference.embedder.encoder_only.m3 import M3Embedder

    rng = np.random.default_rng(1)
    vectors = [{str(t): np.float32(rng.gamma(2, 0.1)) for t in rng.integers(0, 60, 30)} for _ in range(40)]
    index = built(vectors[1:])
    for hit in index.search(vectors[0], 40):
        other = vectors[int(hit.chunk_id[1:]) + 1]
        score = M3Embedder.compute_lexical_matching_score(None, vectors[0], other)  # type: ignore[arg-type]
        assert hit.score == pytest.approx(score, abs=1e-6)
    query, documents = unit_rows(11, 99), [unit_rows(tokens, tokens) for tokens in (1, 30, 7)]
    expected = [float(M3Embedder.colbert_score(None, query, document)) for document in documents]  # type: ignore[arg-type]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)


def test_ties_are_broken_by_id_even_when_thousands_tie():
    """Thousands of one-word chunks."""
    index = SparseIndex()
    order = np.random.default_rng(5).permutation(4000)
    index.update([(f"c{at:05}", {str(at % 4): 0.5}) for at in order], [], generation=1, embedder="e")
    assert index.search({"1": 2.0}, 3) == [Hit(chunk_id=f"c{at:05}", score=1.0) for at in (1, 5, 9)]
    assert len(index.search({"1": 2.0}, 5000)) == 1000
    assert index.search({"1": 2.0}, 2, among=["c03997", "c00002", "c00401"]) == [
        Hit(chunk_id="c00401", score=1.0),
        Hit(chunk_id="c03997", score=1.0),
    ]


def test_what_shares_no_token_is_not_found():
    index = built([{"a": 1.0}, {"b": 1.0}, {}, {"c": 0.0}])
    assert [hit.chunk_id for hit in index.search({"b": 1.0, "x": 9.0}, 5)] == ["c0001"]
    assert index.search({}, 5) == index.search({"a": 0.0}, 5) == index.search({"c": 1.0}, 5) == []
    index = built([{"kept": 1.0, f"gone{at}": 1.0} for at in range(100)])
    index.update([], [f"c{at:04}" for at in range(1, 100)], generation=2, embedder="e")
    (segment,) = index._state.segments
    assert set(segment.data.words) == set(term_hashes(["kept", "gone0"]))
    assert index.search({"kept": 1.0}, 5) == [Hit(chunk_id="c0000", score=1.0)]


@pytest.mark.parametrize("bad", [{"a": -1.0}, {"a": math.nan}, {"a": math.inf}, {"a": 1.0, "b": -math.inf}])
def test_weights_that_are_none_are_refused(bad):
    index = built([{"a": 1.0}])
    with pytest.raises(RetrievalError, match="negative or no number"):
        index.update([("new", bad)], [], generation=2, embedder="e")
    with pytest.raises(RetrievalError, match="negative or no number"):
        index.search(bad, 1)
    assert index.chunk_ids() == {"c0000"}


def test_a_loaded_index_is_mapped_not_read(tmp_path):
    rng = np.random.default_rng(0)
    index = built([{str(token): 0.5 for token in rng.integers(0, 300, 200)} for _ in range(3000)])
    index.save(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("data-*/*.npy"))
    tracemalloc.start()
    loaded = SparseIndex.load(tmp_path)
    hits = loaded.search({"7": 1.0}, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hits == index.search({"7": 1.0}, 4)
    assert peak < size / 3


def unit_rows(tokens: int, seed: int, dtype: str = "float32", dimension: int = 32) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((tokens, dimension))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch_rows", [1, 50, 8192])
def test_scores_are_those_of_the_definition(dtype, batch_rows, monkeypatch):
    monkeypatch.setattr(vectors, "_BATCH_ROWS", batch_rows)
    documents = [unit_rows(tokens, tokens, dtype) for tokens in (1, 30, 7, 64, 2, 49, 51)]
    query = unit_rows(11, 99, dtype)
    expected = [
        float(np.mean([max(float(q.astype(float) @ d.astype(float)) for d in document) for q in query]))
        for document in documents
    ]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)
    assert colbert_scores(query, documents[::-1]) == pytest.approx(expected[::-1], abs=1e-6)


def test_colbert_by_hand():
    """Two query tokens; the best of the document is 0.6 for one and 0.8 for the other: mean 0.7."""
    query = np.eye(3, dtype=np.float32)[:2]
    document = np.array([[0.6, -0.8, 0], [0, 0.8, 0.6], [-1, 0, 0]], dtype=np.float32)
    assert colbert_scores(query, [document]) == pytest.approx([0.7])
    assert colbert_scores(query, [query]) == [1.0]
    query, empty = unit_rows(3, 1), np.empty((0, 32), dtype=np.float16)
    scores = colbert_scores(query, [empty, unit_rows(5, 2), empty])
    assert scores[0] == scores[2] == -1
    assert scores[1] == colbert_scores(query, [unit_rows(5, 2)])[0] > -1
    assert colbert_scores(empty, [query]) == [-1]
    assert colbert_scores(query, []) == []
    with pytest.raises(RetrievalError, match="of 16 numbers cannot be compared with a query's of 32"):
        colbert_scores(unit_rows(3, 1), [unit_rows(3, 1), unit_rows(3, 1, dimension=16)])
    for query, document in ((unit_rows(3, 1)[0], unit_rows(3, 1)), (unit_rows(3, 1), unit_rows(3, 1)[0])):
        with pytest.raises(RetrievalError, match=r"must be \(tokens, d\)"):
            colbert_scores(query, [document])
