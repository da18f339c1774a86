"""Dense, sparse and ColBERT search against slow reference searches."""

import math
import tracemalloc

import numpy as np
import pytest
from package import run_fresh

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import DenseIndex, Hit, SparseIndex, colbert_scores, vectors
from ragkv.retrievers.arrays import term_hashes


def unit_vectors(rows: int, dimension: int, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def built(vectors: np.ndarray, factory: str = "Flat") -> DenseIndex:
    index = DenseIndex(factory)
    index.update([(f"c{at:05}", row) for at, row in enumerate(vectors)], [], generation=1, embedder="e")
    return index


def numpy_search(vectors: np.ndarray, query: np.ndarray, k: int) -> list[str]:
    return [f"c{at:05}" for at in np.argsort(-(vectors @ query), kind="stable")[:k]]


@pytest.mark.parametrize(
    "factory", ["IVF16,Flat", "IDMap2,IVF16,Flat", "HNSW32", "HNSW32,SQ8", "SQ8", "RR32,IVF4,SQ8", "IVF4,SQ8,RFlat"]
)
def test_approximate_indexes_find_nearly_everything_with_exact_scores(factory, tmp_path, monkeypatch):
    rows = unit_vectors(2000, 32)
    monkeypatch.setattr(vectors, "EXACT_BELOW", 500)
    monkeypatch.setattr(vectors, "EF_SEARCH", 200)
    index = built(rows, factory)
    (segment,) = index.segments
    assert segment.data.near is not None  # it is not found by the exact search of small segments
    index.update([], [f"c{at:05}" for at in range(300)], generation=2, embedder="e")
    index.save(tmp_path)
    recalled = 0
    for query in unit_vectors(30, 32, seed=2):
        hits = index.search(query, 10)
        assert hits == DenseIndex.load(tmp_path).search(query, 10)
        right = numpy_search(rows[300:], query, 10)
        right = [f"c{int(name[1:]) + 300:05}" for name in right]
        recalled += len({hit.chunk_id for hit in hits} & set(right))
        for hit in hits:
            assert int(hit.chunk_id[1:]) >= 300
            assert hit.score == pytest.approx(float(rows[int(hit.chunk_id[1:])] @ query), abs=1e-6)
    assert recalled >= 0.95 * 300


def test_nprobe_and_ef_search_reach_faiss(monkeypatch):
    rows = unit_vectors(2000, 32)
    queries = unit_vectors(20, 32, seed=3)
    monkeypatch.setattr(vectors, "EXACT_BELOW", 100)
    monkeypatch.setattr(vectors, "REFINE", 1)

    def recall(factory: str, name: str, number: int) -> int:
        monkeypatch.setattr(vectors, name, number)
        index = built(rows, factory)
        return sum(
            len({hit.chunk_id for hit in index.search(query, 10)} & set(numpy_search(rows, query, 10)))
            for query in queries
        )

    assert recall("IVF32,Flat", "NPROBE", 1) < recall("IVF32,Flat", "NPROBE", 8) < 200
    assert recall("IVF32,Flat", "NPROBE", 32) == 200
    assert recall("HNSW4", "EF_SEARCH", 1) < recall("HNSW4", "EF_SEARCH", 400)


def test_ivf_is_trained_again_when_it_has_grown(monkeypatch):
    monkeypatch.setattr(vectors, "EXACT_BELOW", 10)
    unit = unit_vectors(3000, 16)
    index = DenseIndex("IVF8,Flat")
    lists = []
    for start in range(0, 3000, 250):
        rows = [(f"c{at:05}", unit[at]) for at in range(start, start + 250)]
        index.update(rows, [], generation=start, embedder="e")
        near = index.segments[0].data.near
        lists.append((len(index), None if near is None else near.ntotal))
    assert lists[0] == (250, None)  # 312 vectors are the minimum to train 8 lists
    trained = [rows for _, rows in lists if rows is not None]
    assert 2 <= len(set(trained)) < len(trained)  # more than once, but not every time
    for here, rows in lists[1:]:
        assert rows is not None
        assert here <= 1.25 * rows + 250


def test_ties_are_broken_by_id_even_when_thousands_tie(monkeypatch):
    """Thousands of one-word chunks with the same few vectors."""
    monkeypatch.setattr(vectors, "EXACT_BELOW", 100)
    words = unit_vectors(4, 24)
    for factory in ("Flat", "IVF4,Flat"):
        index = DenseIndex(factory)
        order = np.random.default_rng(5).permutation(4000)
        index.update([(f"c{at:05}", words[at % 4]) for at in order], [], generation=1, embedder="e")
        hits = index.search(words[1], 5)
        assert [hit.chunk_id for hit in hits] == ["c00001", "c00005", "c00009", "c00013", "c00017"]
        index.update([], ["c00001", "c00009"], generation=2, embedder="e")
        assert [hit.chunk_id for hit in index.search(words[1], 2)] == ["c00005", "c00013"]
        assert len(index.search(words[1], 1500)) == 1500


def test_vectors_that_are_none_are_refused():
    good, other = unit_vectors(2, 8), unit_vectors(1, 9)[0]
    index = built(good)
    with pytest.raises(RetrievalError, match="of 9 numbers came among vectors of 8"):
        index.update([("new", other)], [], generation=2, embedder="e")
    with pytest.raises(RetrievalError, match="of 9 numbers came among vectors of 8"):
        built([*good, other])  # type: ignore[arg-type]
    with pytest.raises(RetrievalError, match="has 9 numbers and the index is of vectors of 8"):
        index.search(other, 1)
    for bad in (good[0] * 2, good[0] * np.nan, np.full(8, np.inf, dtype=np.float32)):
        with pytest.raises(RetrievalError, match="is of length"):
            index.update([("new", bad)], [], generation=2, embedder="e")
        with pytest.raises(RetrievalError, match="is of length"):
            index.search(bad, 1)
    with pytest.raises(RetrievalError, match=r"shape \(2, 8\)"):
        index.update([("new", good)], [], generation=2, embedder="e")
    assert (len(index), index.generation) == (2, 1)
    assert index.search(np.zeros(8, dtype=np.float32), 3) == []


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        *(
            (name, "none of the kinds")
            for name in ("nonsense", "", "IVF0,Flat", "Flat\0", "Flat\n", "LSH", "IVF४,Flat")
        ),
        ("IVF2,PQ7", "should be a multiple"),
        ("IVF999999999,Flat", "cannot make it"),
        *((name, "cannot leave deleted chunks out") for name in ("PQ8", "NSG16", "RQ4x8", "PQ8x4fs", "OPQ8,PQ8")),
    ],
)
def test_a_bad_factory_is_one_sentence_at_once(factory, why):
    for refuse in (lambda: vectors.make(factory, 32), lambda: built(unit_vectors(1, 32), factory)):
        with pytest.raises(ConfigError, match=why) as caught:
            refuse()
        assert "write a FAISS factory string such as" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "/faiss/" not in str(caught.value)


def test_half_precision_is_taken():
    rows = unit_vectors(50, 64)
    index, query = built(rows.astype(np.float16)), rows[7].astype(np.float16)
    assert index.search(query, 1) == [Hit(chunk_id="c00007", score=pytest.approx(1, abs=1e-3))]


def test_faiss_loads_when_it_is_needed():
    code = """
import sys
import ragkv.retrievers as r
r.DenseIndex("HNSW32"); r.SparseIndex()
print([m for m in ("faiss", "scipy", "bm25s", "torch") if m in sys.modules])
"""
    assert run_fresh(code)[0] == "[]\n"


# ---- sparse and ColBERT


def built_sparse(vectors: list[dict[str, float]]) -> SparseIndex:
    index = SparseIndex()
    index.update([(f"c{at:04}", vector) for at, vector in enumerate(vectors)], [], generation=1, embedder="e")
    return index


@pytest.mark.slow  # FlagEmbedding takes ten seconds to import
def test_scores_are_those_of_flag_embedding():
    from FlagEmbedding.inference.embedder.encoder_only.m3 import M3Embedder

    rng = np.random.default_rng(1)
    vectors = [{str(t): np.float32(rng.gamma(2, 0.1)) for t in rng.integers(0, 60, 30)} for _ in range(40)]
    index = built_sparse(vectors[1:])
    for hit in index.search(vectors[0], 40):
        other = vectors[int(hit.chunk_id[1:]) + 1]
        score = M3Embedder.compute_lexical_matching_score(None, vectors[0], other)  # type: ignore[arg-type]
        assert hit.score == pytest.approx(score, abs=1e-6)
    query, documents = unit_vectors(11, 32, 99), [unit_vectors(tokens, 32, tokens) for tokens in (1, 30, 7)]
    expected = [float(M3Embedder.colbert_score(None, query, document)) for document in documents]  # type: ignore[arg-type]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)


def test_sparse_ties_are_broken_by_id_even_when_thousands_tie():
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
    index = built_sparse([{"a": 1.0}, {"b": 1.0}, {}, {"c": 0.0}])
    assert [hit.chunk_id for hit in index.search({"b": 1.0, "x": 9.0}, 5)] == ["c0001"]
    assert index.search({}, 5) == index.search({"a": 0.0}, 5) == index.search({"c": 1.0}, 5) == []
    index = built_sparse([{"kept": 1.0, f"gone{at}": 1.0} for at in range(100)])
    index.update([], [f"c{at:04}" for at in range(1, 100)], generation=2, embedder="e")
    (segment,) = index.segments
    assert set(segment.data.words) == set(term_hashes(["kept", "gone0"]))
    assert index.search({"kept": 1.0}, 5) == [Hit(chunk_id="c0000", score=1.0)]


@pytest.mark.parametrize("bad", [{"a": -1.0}, {"a": math.nan}, {"a": math.inf}, {"a": 1.0, "b": -math.inf}])
def test_weights_that_are_none_are_refused(bad):
    index = built_sparse([{"a": 1.0}])
    with pytest.raises(RetrievalError, match="negative or no number"):
        index.update([("new", bad)], [], generation=2, embedder="e")
    with pytest.raises(RetrievalError, match="negative or no number"):
        index.search(bad, 1)
    assert (len(index), index.generation) == (1, 1)


def test_a_loaded_index_is_mapped_not_read(tmp_path):
    rng = np.random.default_rng(0)
    index = built_sparse([{str(token): 0.5 for token in rng.integers(0, 300, 200)} for _ in range(3000)])
    index.save(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("data-*/*.npy"))
    tracemalloc.start()
    loaded = SparseIndex.load(tmp_path)
    hits = loaded.search({"7": 1.0}, 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hits == index.search({"7": 1.0}, 4)
    assert peak < size / 3


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch_rows", [1, 50, 8192])
def test_scores_are_those_of_the_definition(dtype, batch_rows, monkeypatch):
    monkeypatch.setattr(vectors, "_BATCH_ROWS", batch_rows)
    documents = [unit_vectors(tokens, 32, tokens).astype(dtype) for tokens in (1, 30, 7, 64, 2, 49, 51)]
    query = unit_vectors(11, 32, 99).astype(dtype)
    expected = [
        float(np.mean([max(float(q.astype(float) @ d.astype(float)) for d in document) for q in query]))
        for document in documents
    ]
    assert colbert_scores(query, documents) == pytest.approx(expected, abs=1e-6)
    assert colbert_scores(query, documents[::-1]) == pytest.approx(expected[::-1], abs=1e-6)


def test_colbert_by_hand():
    """Two query tokens, whose best matches in the document are 0.6 and 0.8: mean 0.7."""
    query = np.eye(3, dtype=np.float32)[:2]
    document = np.array([[0.6, -0.8, 0], [0, 0.8, 0.6], [-1, 0, 0]], dtype=np.float32)
    assert colbert_scores(query, [document]) == pytest.approx([0.7])
    assert colbert_scores(query, [query]) == [1.0]
    query, empty = unit_vectors(3, 32, 1), np.empty((0, 32), dtype=np.float16)
    scores = colbert_scores(query, [empty, unit_vectors(5, 32, 2), empty])
    assert scores[0] == scores[2] == -1
    assert scores[1] == colbert_scores(query, [unit_vectors(5, 32, 2)])[0] > -1
    assert colbert_scores(empty, [query]) == [-1]
    assert colbert_scores(query, []) == []
    with pytest.raises(RetrievalError, match="of 16 numbers cannot be compared with a query's of 32"):
        colbert_scores(unit_vectors(3, 32, 1), [unit_vectors(3, 32, 1), unit_vectors(3, 16, 1)])
    rows = unit_vectors(3, 32, 1)
    for query, document in ((rows[0], rows), (rows, rows[0])):
        with pytest.raises(RetrievalError, match=r"must be \(tokens, d\)"):
            colbert_scores(query, [document])
