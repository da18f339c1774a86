"""The contract of search indexes: any order of updates finds what the definition says, also on disk, with threads."""

from __future__ import annotations

import json
import os
import random
import shutil
import string
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import bm25s
import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from package import in_child

from ragkv.config import QdrantConfig
from ragkv.errors import RetrievalError
from ragkv.retrievers import BM25, DenseIndex, Hit, SparseIndex, arrays, qdrant, segments, vectors
from ragkv.retrievers.arrays import IdSet, id_key
from ragkv.retrievers.bm25 import tokenise

POOL = 320
DIMENSION = 16
IDS = [f"c{number:03}" for number in range(POOL)]
random.Random(3).shuffle(IDS)  # rows and ids in different orders
BLANK = IDS[:3]


def unit_vectors(rows: int, dimension: int = DIMENSION, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


_rng = random.Random(4)
DENSE: dict[str, Any] = dict(zip(IDS, unit_vectors(POOL), strict=True))
DENSE |= {other: DENSE[one] for one, other in zip(IDS[:40], IDS[40:80], strict=True)}  # ties
DENSE |= dict.fromkeys(BLANK, np.zeros(DIMENSION, dtype=np.float32))
SPARSE: dict[str, Any] = {
    chunk_id: {token: _rng.choice([0.1, 0.25, 0.5, 0.7]) for token in _rng.sample(string.ascii_lowercase, 6)}
    for chunk_id in IDS
}
SPARSE |= {IDS[0]: {}, IDS[1]: {"a": 0.0}, IDS[2]: {}}
TEXTS: dict[str, Any] = {chunk_id: " ".join(_rng.choices("abcdefgh", k=_rng.randrange(1, 9))) for chunk_id in IDS}
TEXTS |= {IDS[0]: "", IDS[1]: "...", IDS[2]: " "}


class QdrantVectors:
    """A collection of Qdrant with the interface of the other indexes; the store's vectors are a dictionary."""

    def __init__(self, kind: Any) -> None:
        self.generation, self.embedder, self.kind, self.vectors = 0, "", kind, dict[str, Any]()
        self.collection = qdrant.QdrantCollection(QdrantConfig(url="memory://"), f"{id(self):x}")
        self.collection._call("delete_collection")
        self.collection.make("e", [kind], DIMENSION)

    def update(self, added: Iterable[tuple[str, Any]], removed: Collection[str], *, generation: int, **_: Any) -> None:
        pairs = dict(added)
        self.vectors = {name: vector for name, vector in self.vectors.items() if name not in set(removed)} | pairs
        self.collection.drop(id_key(name) for name in removed)
        points = [qdrant.Point(chunk_id=name, terms=[], vectors={self.kind: pairs[name]}) for name in pairs]
        self.collection.send(points, str(generation))
        self.generation = generation

    def search(self, query: Any, k: int, *, among: Collection[str] | IdSet | None = None) -> list[Hit]:
        index = qdrant.QdrantIndex(
            collection=self.collection,
            score_kind=self.kind,
            vectors=lambda names: {name: self.vectors[name] for name in names if name in self.vectors},
        )
        return index.search(query, k, among=among)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "flat": (DenseIndex, DENSE),
    "ivf": (lambda: DenseIndex("IVF2,Flat"), DENSE),
    "hnsw": (lambda: DenseIndex("HNSW8"), DENSE),
    "sq8": (lambda: DenseIndex("SQ8"), DENSE),
    "sparse": (SparseIndex, SPARSE),
    "bm25": (BM25, TEXTS),
    "qdrant": (lambda: QdrantVectors("dense"), DENSE),
    "qdrant sparse": (lambda: QdrantVectors("sparse"), SPARSE),
}
NEARLY = ("hnsw", "sq8")  # they may miss hits, but must not be wrong otherwise
SAVED = [kind for kind in KINDS if "qdrant" not in kind]
every_kind = pytest.mark.parametrize("kind", KINDS)
saved_kind = pytest.mark.parametrize("kind", SAVED)
few_kinds = pytest.mark.parametrize("kind", ["ivf", "bm25"])  # for `Segmented` itself


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Approximate indexes of few rows that search all lists; searches in Qdrant and merges that are split."""
    monkeypatch.setattr(vectors, "EXACT_BELOW", 20)
    monkeypatch.setattr(vectors, "EF_SEARCH", POOL)
    monkeypatch.setattr(qdrant, "MAX_TERMS", 50)
    monkeypatch.setattr(arrays, "_BLOCK", 100)


def built(kind: str, ids: Collection[str], generation: int = 1) -> Any:
    make, content = KINDS[kind]
    index = make()
    index.update([(chunk_id, content[chunk_id]) for chunk_id in ids], [], generation=generation, embedder="e")
    return index


def held(index: Any) -> set[str]:
    """The ids of all visible chunks."""
    return {part.id_table[row] for part in index.segments for row in (~part.hidden).nonzero()[0].tolist()}


def queries(kind: str) -> list[Any]:
    if kind == "bm25":
        return ["a", "b a b x", "h g f e a", "nothing", ""]
    if "sparse" in kind:
        return [{"a": 0.3, "b": 0.9, "missing": 1.0}, {"z": 0.2}, *(SPARSE[chunk_id] for chunk_id in IDS[3:6])]
    return [*unit_vectors(3, seed=9), DENSE[IDS[3]], DENSE[IDS[79]]]


@lru_cache(maxsize=8)
def lucene(ids: frozenset[str]) -> tuple[Any, dict[str, int]]:
    """bm25s over these texts, and its vocabulary."""
    vocabulary = {word: n for n, word in enumerate(sorted({word for i in ids for word in tokenise(TEXTS[i])}))}
    scorer = bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
    words = [[vocabulary[word] for word in tokenise(TEXTS[i])] for i in sorted(ids)]
    scorer.index((words, vocabulary), create_empty_token=False, show_progress=False)
    return scorer, vocabulary


def reference(kind: str, ids: Collection[str], query: Any) -> dict[str, float]:
    """The scores of all hits: bm25s', or those of the definition in float64."""
    if kind == "bm25":
        words = {word for i in ids for word in tokenise(TEXTS[i])}
        if not words.intersection(tokenise(query)):
            return {}
        scorer, vocabulary = lucene(frozenset(ids))
        found = scorer.get_scores_from_ids([vocabulary[word] for word in tokenise(query) if word in vocabulary])
        return {i: float(score) for i, score in zip(sorted(ids), found, strict=True) if score > 0}
    if "sparse" in kind:
        scores = {i: sum(weight * SPARSE[i].get(token, 0.0) for token, weight in query.items()) for i in ids}
        return {i: score for i, score in scores.items() if score > 0}
    return {i: float(DENSE[i].astype(float) @ query.astype(float)) for i in ids if DENSE[i].any()}


def assert_right(kind: str, index: Any, ids: set[str], *, fresh: Any = None) -> None:
    tolerance = 0 if kind == "bm25" else 1e-6
    if kind in SAVED:
        assert held(index) == (ids if kind == "bm25" else ids.difference(BLANK))
        assert len(index) == len(held(index))
    for query in queries(kind):
        expected = reference(kind, ids, query)
        for k, among in (
            (1, None),
            (7, None),
            (POOL * 2, None),
            (5, {*IDS[::3], "never seen"}),
            (2, [IDS[50]]),
            (1, []),
        ):
            hits = index.search(query, k, among=among)
            right = {i: score for i, score in expected.items() if among is None or i in among}
            assert all(abs(hit.score - right[hit.chunk_id]) <= tolerance for hit in hits)  # no removed id
            assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))
            assert len({hit.chunk_id for hit in hits}) == len(hits) <= k
            if kind not in NEARLY or among is not None:
                best = sorted(right.values(), reverse=True)[:k]
                assert [hit.score for hit in hits] == pytest.approx(best, abs=tolerance, rel=tolerance)
                assert fresh is None or hits == fresh.search(query, k, among=among)
            else:
                assert hits or not right


# A step adds or removes a range of the pool; some ranges are long enough to build, hide and merge approximate indexes.
# The last value: whether segments are merged, as by the commands that write.
steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, POOL - 1), st.sampled_from([1, 3, 30, 120, POOL]), st.booleans()),
    min_size=1,
    max_size=9,
)


@every_kind
@settings(max_examples=12)
@given(steps=steps)
def test_any_order_of_updates_equals_a_fresh_build(kind, steps):
    (make, content), there = KINDS[kind], set[str]()
    index = make()
    for number, (adding, start, length, merge) in enumerate(steps):
        run = IDS[start : start + length]
        if adding:  # existing ids are replaced: removed and added in one update
            again = run[: len(run) // 2]
            new = [chunk_id for chunk_id in run if chunk_id in again or chunk_id not in there]
            index.update([(i, content[i]) for i in new], again, generation=number, embedder="e", merge=merge)
            there |= set(run)
        else:
            index.update([], run, generation=number, embedder="e", merge=merge)
            there -= set(run)
        assert index.generation == number
    assert_right(kind, index, there, fresh=built(kind, sorted(there)))


@few_kinds
def test_many_small_updates_leave_few_segments(kind):
    (make, content) = KINDS[kind]
    index = make()
    for number, chunk_id in enumerate(IDS):
        index.update([(chunk_id, content[chunk_id])], [], generation=number, embedder="e")
        sizes = [segment.living for segment in index.segments]
        assert all(large >= 4 * small for large, small in pairwise(sizes))
    assert_right(kind, index, set(IDS), fresh=built(kind, IDS))
    for number in range(0, POOL, 8):
        index.update([], IDS[number : number + 8], generation=number, embedder="e")
        for segment in index.segments:
            assert segment.living >= 0.75 * len(segment.hidden)
    assert index.segments == ()
    assert_right(kind, index, set())


def test_a_question_merges_only_what_is_small():
    index = BM25()
    for size, start in ((5000, 0), (1500, 10_000)):
        run = ((f"c{start + n}", "word") for n in range(size))
        index.update(run, (), generation=1, embedder="", merge=False)
    for number in range(30):
        index.update([(f"new{number}", "word")], (), generation=2, embedder="", merge=False)
    sizes = [segment.living for segment in index.segments]
    assert sizes[:2] == [5000, 1500]
    assert len(sizes) < 6
    assert index.merge()
    assert index.segments[0].living == 6500
    assert not index.merge()


@every_kind
def test_a_new_index_is_empty(kind):
    index = KINDS[kind][0]()
    assert (index.generation, index.embedder) == (0, "")
    assert index.search(queries(kind)[0], 3) == []
    with pytest.raises(ValueError, match="at least 1"):
        index.search(queries(kind)[0], 0)


@saved_kind
def test_duplicates_and_other_embedders_are_refused_and_change_nothing(kind):
    index, content = built(kind, IDS[:100]), KINDS[kind][1]
    for added in ([IDS[5]], [IDS[200], IDS[200]], [IDS[200], IDS[99]]):
        with pytest.raises(RetrievalError, match="already"):
            index.update([(i, content[i]) for i in added], [IDS[50]], generation=2, embedder="e")
    with pytest.raises(RetrievalError, match="another embedder"):
        index.update([(IDS[200], content[IDS[200]])], [IDS[50]], generation=2, embedder="f")
    assert (index.generation, index.embedder) == (1, "e")
    assert_right(kind, index, set(IDS[:100]))
    index.update([(IDS[200], content[IDS[200]])], IDS[:100], generation=2, embedder="f")
    assert (index.generation, index.embedder, held(index)) == (2, "f", {IDS[200]})


@saved_kind
def test_searches_see_the_old_index_while_an_update_runs(kind):
    index, content, query = built(kind, IDS[:100]), KINDS[kind][1], queries(kind)[0]
    before = index.search(query, 10)
    seen = []

    def slowly() -> Any:
        for chunk_id in IDS[100:200]:
            seen.append(index.search(query, 10) == before)
            yield chunk_id, content[chunk_id]

    index.update(slowly(), IDS[:50], generation=2, embedder="e")
    assert seen == [True] * 100
    assert_right(kind, index, set(IDS[50:200]))


@saved_kind
def test_50_threads_search_during_updates(kind):
    content, query = KINDS[kind][1], queries(kind)[0]
    possible = [built(kind, ids).search(query, 20) for ids in (IDS, IDS[:160])]
    index = built(kind, IDS)
    with ThreadPoolExecutor(50) as pool:
        results = pool.map(lambda _: index.search(query, 20), range(400))
        for number in range(6):
            index.update([], IDS[160:], generation=number, embedder="e")
            index.update([(i, content[i]) for i in IDS[160:]], [], generation=number, embedder="e")
        found = list(results)
    assert all(result in possible or (result and kind in NEARLY) for result in found)
    assert_right(kind, index, set(IDS))


# ---- files


@saved_kind
def test_a_loaded_index_equals_the_saved_one_and_goes_on(kind, tmp_path):
    index, content = built(kind, IDS[:200], generation=4), KINDS[kind][1]
    index.update([], IDS[10:40], generation=5, embedder="e")
    index.save(tmp_path)
    loaded = type(index).load(tmp_path)
    assert (loaded.generation, loaded.embedder, loaded.fields()) == (5, "e", index.fields())
    there = set(IDS[:10] + IDS[40:200])
    assert_right(kind, loaded, there, fresh=index)
    (tmp_path / "data-left-by-a-crash").mkdir()
    for number in range(3):  # update mapped segments, and replace the files that they are read from
        run = IDS[200 + 40 * number : 240 + 40 * number]
        loaded.update([(i, content[i]) for i in run], IDS[40 : 44 + number], generation=6, embedder="e")
        loaded.save(tmp_path)
        there = there.union(run) - set(IDS[40 : 44 + number])
        loaded = type(index).load(tmp_path)
        assert_right(kind, loaded, there)
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert_right(kind, index, set(IDS[:10] + IDS[40:200]))  # its mapped files exist until it is freed


@few_kinds
def test_saving_again_links_what_has_not_changed(kind, tmp_path):
    index, content = built(kind, IDS[:250]), KINDS[kind][1]

    def large() -> set[int]:
        name = json.loads((tmp_path / "manifest.json").read_text())["segments"][0]
        return {path.stat().st_ino for path in tmp_path.glob(f"data-*/{name}.*") if "hidden" not in path.name}

    index.save(tmp_path)
    first = large()
    index.update([(i, content[i]) for i in IDS[250:260]], IDS[20:25], generation=2, embedder="e")
    index.save(tmp_path)
    assert large() == first
    shutil.rmtree(next(tmp_path.glob("data-*")))  # another process has deleted the files to link
    index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[:20] + IDS[25:260]))


@saved_kind
@pytest.mark.parametrize("ids", [[], BLANK])
def test_indexes_with_nothing_to_find(kind, ids, tmp_path):
    built(kind, ids).save(tmp_path)
    loaded = type(KINDS[kind][0]()).load(tmp_path)
    assert loaded.search(queries(kind)[0], 3) == []
    assert held(loaded) == (set(ids) if kind == "bm25" else set())


@saved_kind
def test_every_damaged_file_is_noticed(kind, tmp_path):
    good = tmp_path / "good"
    index = built(kind, IDS[:120])
    index.update([], IDS[4:9], generation=2, embedder="e")
    index.save(good)
    for path in [path.relative_to(good) for path in good.rglob("*") if path.is_file()]:
        for damage in ("missing", "flipped", "short"):
            folder = tmp_path / damage
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            content = bytearray((folder / path).read_bytes())
            content[len(content) // 2] ^= 0xFF
            (folder / path).unlink()
            if damage != "missing":
                (folder / path).write_bytes(content if damage == "flipped" else content[:-3])
            with pytest.raises(RetrievalError, match="rebuild it"):
                type(index).load(folder)


@saved_kind
def test_another_kinds_folder_is_refused(kind, tmp_path):
    built(kind, IDS[:9]).save(tmp_path)
    for other in {BM25, DenseIndex, SparseIndex} - {type(KINDS[kind][0]())}:
        with pytest.raises(RetrievalError, match="rebuild it"):
            other.load(tmp_path)


@few_kinds
@pytest.mark.parametrize("step", ["pathlib.Path.mkdir", "numpy.save", "pathlib.Path.replace"])
def test_a_failed_save_keeps_the_old_index(kind, step, tmp_path, monkeypatch):
    built(kind, IDS[:100]).save(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    index = built(kind, IDS[100:200])
    with monkeypatch.context() as patch:
        patch.setattr(step, full)
        with pytest.raises(RetrievalError, match="No space left"):
            index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[:100]))
    index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[100:200]))


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace", "shutil.rmtree"])
def test_a_save_that_is_killed_leaves_the_old_index_or_the_new_one(step, tmp_path, monkeypatch):
    built("ivf", IDS[:200]).save(tmp_path)

    def save() -> None:
        index = DenseIndex.load(tmp_path)
        index.update([], IDS[:50], generation=2, embedder="e")
        monkeypatch.setattr(step, lambda *_, **__: os._exit(9))
        index.save(tmp_path)

    assert in_child(save) == 9
    new = step == "shutil.rmtree"
    loaded = DenseIndex.load(tmp_path)
    assert loaded.generation == (2 if new else 1)
    assert_right("ivf", loaded, set(IDS[50:200] if new else IDS[:200]))
    loaded.save(tmp_path)  # deletes the other's leftovers
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert_right("ivf", DenseIndex.load(tmp_path), set(IDS[50:200] if new else IDS[:200]))


def test_a_load_follows_a_replacement_that_happens_meanwhile(tmp_path, monkeypatch):
    built("bm25", IDS[:9]).save(tmp_path)
    stale = json.loads((tmp_path / "manifest.json").read_text())
    built("bm25", IDS[9:20]).save(tmp_path)
    read, answers = segments._manifest, [stale]
    monkeypatch.setattr(segments, "_manifest", lambda folder: answers.pop() if answers else read(folder))
    assert_right("bm25", BM25.load(tmp_path), set(IDS[9:20]))


def test_faiss_that_cannot_write_is_one_sentence(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise RuntimeError("Error in FileIOWriter: write error: No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    with pytest.raises(RetrievalError, match=r"cannot be written: .*No space left"):
        built("hnsw", IDS[:90]).save(tmp_path)
