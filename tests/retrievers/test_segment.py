"""What dense and sparse indexes share: any order of updates equals a fresh build, on disk and among threads too."""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import RetrievalError
from ragkv.retrievers import DenseConfig, DenseIndex, Hit, SparseIndex, VectorIndex

POOL = 320
DIMENSION = 16
IDS = [f"c{number:03}" for number in range(POOL)]
random.Random(3).shuffle(IDS)  # rows and ids in different orders


def unit_vectors(rows: int, dimension: int = DIMENSION, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((rows, dimension), dtype=np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


DENSE = dict(zip(IDS, unit_vectors(POOL), strict=True))
for one, other in zip(IDS[:40], IDS[40:80], strict=True):
    DENSE[other] = DENSE[one]  # ties
DENSE |= dict.fromkeys(IDS[:3], np.zeros(DIMENSION, dtype=np.float32))

_rng = random.Random(4)
SPARSE: dict[str, dict[str, float]] = {
    chunk_id: {token: _rng.choice([0.1, 0.25, 0.5, 0.7]) for token in _rng.sample(string.ascii_lowercase, 6)}
    for chunk_id in IDS
}
SPARSE |= {IDS[0]: {}, IDS[1]: {"a": 0.0}, IDS[2]: {}}

KINDS: dict[str, Callable[[], Any]] = {
    "flat": DenseIndex,
    "ivf": lambda: DenseIndex(DenseConfig(factory="IVF2,Flat", nprobe=2, exact_below=80)),
    "hnsw": lambda: DenseIndex(DenseConfig(factory="HNSW8", exact_below=20, ef_search=POOL)),
    "sq8": lambda: DenseIndex(DenseConfig(factory="SQ8", exact_below=20)),
    "sparse": SparseIndex,
}
EXACT = ("flat", "ivf", "sparse")  # the others may miss something, and may do nothing else
every_kind = pytest.mark.parametrize("kind", KINDS)


def vectors_of(kind: str) -> dict[str, Any]:
    return SPARSE if kind == "sparse" else DENSE


def built(kind: str, ids: list[str], generation: int = 1) -> Any:
    index = KINDS[kind]()
    vectors = vectors_of(kind)
    index.update([(chunk_id, vectors[chunk_id]) for chunk_id in ids], [], generation=generation, embedder="e")
    return index


def queries(kind: str) -> list[Any]:
    if kind == "sparse":
        return [{"a": 0.3, "b": 0.9, "missing": 1.0}, {"z": 0.2}, *(SPARSE[chunk_id] for chunk_id in IDS[3:6])]
    return [*unit_vectors(3, seed=9), DENSE[IDS[3]], DENSE[IDS[79]]]


def slow_search(kind: str, ids: set[str], query: Any, k: int) -> list[Hit]:
    """By the definition, in float64."""
    if kind == "sparse":
        scores = {i: sum(w * SPARSE[i].get(token, 0.0) for token, w in query.items()) for i in ids}
        scores = {i: score for i, score in scores.items() if score > 0}
    else:
        scores = {i: float(DENSE[i].astype(float) @ query.astype(float)) for i in ids if DENSE[i].any()}
    hits = [Hit(chunk_id=i, score=float(np.float32(score))) for i, score in scores.items()]
    return sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))[:k]


def assert_right(kind: str, index: Any, ids: set[str], *, fresh: Any = None) -> None:
    assert index.chunk_ids() == ids
    assert len(index) == len(ids)
    some = set(IDS[::3]) | {"never seen"}
    for query in queries(kind):
        for k, among in ((1, None), (7, None), (POOL * 2, None), (5, some)):
            hits = index.search(query, k, among=among)
            expected = slow_search(kind, ids if among is None else ids & some, query, POOL)
            scores = {hit.chunk_id: hit.score for hit in expected}
            assert all(hit.score == pytest.approx(scores[hit.chunk_id], abs=1e-6) for hit in hits)  # and no removed id
            assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))
            assert len({hit.chunk_id for hit in hits}) == len(hits) <= k
            if kind in EXACT or among is not None:
                best = [hit.score for hit in expected[:k]]
                assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-6)
                if fresh is not None:
                    assert hits == fresh.search(query, k, among=among)
            else:
                assert hits or not expected


# A step adds or removes a run of the pool: some runs are long enough to make, hide and merge approximate indexes.
steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, POOL - 1), st.sampled_from([1, 3, 30, 120, POOL])), min_size=1, max_size=9
)


@every_kind
@settings(deadline=None, max_examples=12)
@given(steps=steps)
def test_any_order_of_updates_equals_a_fresh_build(kind: str, steps: list[tuple[bool, int, int]]) -> None:
    index, vectors, there = KINDS[kind](), vectors_of(kind), set[str]()
    for number, (adding, start, length) in enumerate(steps):
        run = IDS[start : start + length]
        if adding:  # what is there already is replaced: removed and added in one update
            again = run[: len(run) // 2]
            new = [chunk_id for chunk_id in run if chunk_id in again or chunk_id not in there]
            index.update([(i, vectors[i]) for i in new], again, generation=number, embedder="e")
            there |= set(run)
        else:
            index.update([], run, generation=number, embedder="e")
            there -= set(run)
        assert index.generation == number
    assert_right(kind, index, there, fresh=built(kind, sorted(there)))


@every_kind
def test_many_small_updates_leave_few_segments(kind: str) -> None:
    index, vectors = KINDS[kind](), vectors_of(kind)
    for number, chunk_id in enumerate(IDS):
        index.update([(chunk_id, vectors[chunk_id])], [], generation=number, embedder="e")
        sizes = [segment.living for segment in index._state.segments]
        assert all(large >= 4 * small for large, small in pairwise(sizes))
    assert_right(kind, index, set(IDS), fresh=built(kind, IDS))
    for number in range(0, POOL, 8):
        index.update([], IDS[number : number + 8], generation=number, embedder="e")
        for segment in index._state.segments:
            assert segment.living >= 0.75 * len(segment.hidden)
    assert index._state.segments == ()
    assert_right(kind, index, set())


@every_kind
def test_it_is_a_vector_index(kind: str) -> None:
    index: VectorIndex[Any] = KINDS[kind]()
    assert isinstance(index, VectorIndex)
    assert (index.generation, index.embedder, len(index), index.chunk_ids()) == (0, "", 0, frozenset())
    assert index.search(queries(kind)[0], 3) == []
    with pytest.raises(ValueError, match="at least 1"):
        index.search(queries(kind)[0], 0)


@every_kind
def test_duplicates_and_other_embedders_are_refused_and_change_nothing(kind: str) -> None:
    index, vectors = built(kind, IDS[:100]), vectors_of(kind)
    for added in ([IDS[5]], [IDS[200], IDS[200]], [IDS[200], IDS[99]], [IDS[0]], [IDS[200], IDS[1]]):
        with pytest.raises(RetrievalError, match="already"):
            index.update([(i, vectors[i]) for i in added], [IDS[50]], generation=2, embedder="e")
    with pytest.raises(RetrievalError, match="another embedder"):
        index.update([(IDS[200], vectors[IDS[200]])], [IDS[50]], generation=2, embedder="f")
    assert (index.generation, index.embedder) == (1, "e")
    assert_right(kind, index, set(IDS[:100]))
    index.update([(IDS[200], vectors[IDS[200]])], IDS[:100], generation=2, embedder="f")
    assert (index.generation, index.embedder, index.chunk_ids()) == (2, "f", {IDS[200]})


@every_kind
def test_searches_see_the_old_index_while_an_update_runs(kind: str) -> None:
    index, vectors, query = built(kind, IDS[:100]), vectors_of(kind), queries(kind)[0]
    before = index.search(query, 10)
    seen = []

    def slowly() -> Any:
        for chunk_id in IDS[100:200]:
            seen.append(index.search(query, 10) == before and len(index) == 100)
            yield chunk_id, vectors[chunk_id]

    index.update(slowly(), IDS[:50], generation=2, embedder="e")
    assert seen == [True] * 100
    assert_right(kind, index, set(IDS[50:200]))


@every_kind
def test_50_threads_search_during_updates(kind: str) -> None:
    vectors, query = vectors_of(kind), queries(kind)[0]
    whole, half = built(kind, IDS), built(kind, IDS[:160])
    possible = (whole.search(query, 20), half.search(query, 20))
    index = built(kind, IDS)

    def search(_: int) -> list[Hit]:
        return index.search(query, 20)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(50) as pool:
        results = pool.map(search, range(400))
        for number in range(6):
            index.update([], IDS[160:], generation=number, embedder="e")
            index.update([(i, vectors[i]) for i in IDS[160:]], [], generation=number, embedder="e")
        found = list(results)
    if kind in EXACT:
        assert all(result in possible for result in found)
    assert all(result for result in found)
    assert_right(kind, index, set(IDS))


# ---- files


@every_kind
def test_a_loaded_index_equals_the_saved_one_and_goes_on(kind: str, tmp_path: Path) -> None:
    index, vectors = built(kind, IDS[:200], generation=4), vectors_of(kind)
    index.update([], IDS[10:40], generation=5, embedder="e")
    index.save(tmp_path)
    loaded = type(index).load(tmp_path)
    assert (loaded.generation, loaded.embedder) == (5, "e")
    there = set(IDS[:10] + IDS[40:200])
    for query in queries(kind):
        assert loaded.search(query, 9) == index.search(query, 9)
    assert_right(kind, loaded, there)
    for number in range(3):  # updates of mapped segments, saved onto the files that they read from
        run = IDS[200 + 40 * number : 240 + 40 * number]
        loaded.update([(i, vectors[i]) for i in run], IDS[40 : 44 + number], generation=6, embedder="e")
        loaded.save(tmp_path)
        there = there.union(run) - set(IDS[40 : 44 + number])
        loaded = type(index).load(tmp_path)
        assert_right(kind, loaded, there)
    assert len(list(tmp_path.glob("data-*"))) == 1


@every_kind
def test_saving_again_links_what_has_not_changed(kind: str, tmp_path: Path) -> None:
    index, vectors = built(kind, IDS[:250]), vectors_of(kind)

    def large() -> set[int]:
        name = json.loads((tmp_path / "manifest.json").read_text())["segments"][0]
        return {path.stat().st_ino for path in tmp_path.glob(f"data-*/{name}.*")}

    index.save(tmp_path)
    first = large()
    index.update([(i, vectors[i]) for i in IDS[250:260]], IDS[20:25], generation=2, embedder="e")
    index.save(tmp_path)
    assert large() == first
    shutil.rmtree(next(tmp_path.glob("data-*")))  # another process has replaced what could be linked
    index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[:20] + IDS[25:260]))


@every_kind
@pytest.mark.parametrize("ids", [[], IDS[:3]])
def test_indexes_with_nothing_to_find(kind: str, ids: list[str], tmp_path: Path) -> None:
    built(kind, ids).save(tmp_path)
    loaded = type(KINDS[kind]()).load(tmp_path)
    assert loaded.search(queries(kind)[0], 3) == []
    assert loaded.chunk_ids() == set(ids)


@every_kind
def test_every_damaged_file_is_noticed(kind: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    built(kind, IDS[:120]).save(good)
    load = type(KINDS[kind]()).load
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
                load(folder)


@every_kind
def test_another_kinds_folder_is_refused(kind: str, tmp_path: Path) -> None:
    built(kind, IDS[:9]).save(tmp_path)
    other: Any = DenseIndex if kind == "sparse" else SparseIndex
    with pytest.raises(RetrievalError, match="rebuild it"):
        other.load(tmp_path)


@every_kind
@pytest.mark.parametrize("step", ["mkdir", "write_text", "replace"])
def test_a_failed_save_keeps_the_old_index(
    kind: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(kind, IDS[:100]).save(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    index = built(kind, IDS[100:200])
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, full)
        with pytest.raises(RetrievalError, match="No space left"):
            index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[:100]))
    index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[100:200]))


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace", "shutil.rmtree"])
def test_a_save_that_is_killed_leaves_the_old_index_or_the_new_one(step: str, tmp_path: Path) -> None:
    built("ivf", IDS[:200]).save(tmp_path)
    code = f"""
import os, pathlib, shutil, sys
from ragkv.retrievers import DenseIndex
index = DenseIndex.load(pathlib.Path({str(tmp_path)!r}))
index.update([], {IDS[:50]!r}, generation=2, embedder="e")
{step} = lambda *_, **__: os._exit(9)
index.save(pathlib.Path({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    new = step == "shutil.rmtree"
    loaded = DenseIndex.load(tmp_path)
    assert loaded.generation == (2 if new else 1)
    assert_right("ivf", loaded, set(IDS[50:200] if new else IDS[:200]))
    loaded.save(tmp_path)  # and what the other left goes
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert_right("ivf", DenseIndex.load(tmp_path), set(loaded.chunk_ids()))


def test_faiss_that_cannot_write_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("Error in FileIOWriter: write error: No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    with pytest.raises(RetrievalError, match=r"cannot be written: .*No space left"):
        built("flat", IDS[:9]).save(tmp_path)
