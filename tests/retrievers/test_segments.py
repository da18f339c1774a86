"""What dense and sparse indexes share: any order of updates equals a fresh build, also on disk and with threads."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import string
import struct
import tokenize
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import mutants
from package import in_child

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import BM25, DenseConfig, DenseIndex, Hit, SparseIndex
from ragkv.retrievers.vectors import make
from ragkv.util import files as ownmark

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
EXACT = ("flat", "ivf", "sparse")  # the others are approximate: they may miss hits, but must not be wrong otherwise
every_kind = pytest.mark.parametrize("kind", KINDS)
two_kinds = pytest.mark.parametrize("kind", ["ivf", "sparse"])  # for `Segmented` itself


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
    """Slow reference by the definition, in float64."""
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
            assert all(hit.score == pytest.approx(scores[hit.chunk_id], abs=1e-6) for hit in hits)  # no removed id
            assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))
            assert len({hit.chunk_id for hit in hits}) == len(hits) <= k
            if kind in EXACT or among is not None:
                best = [hit.score for hit in expected[:k]]
                assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-6)
                if fresh is not None:
                    assert hits == fresh.search(query, k, among=among)
            else:
                assert hits or not expected


# A step adds or removes a range of the pool; some ranges are long enough to build, hide and merge approximate indexes.
steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, POOL - 1), st.sampled_from([1, 3, 30, 120, POOL])), min_size=1, max_size=9
)


@every_kind
@settings(max_examples=12)
@given(steps=steps)
def test_any_order_of_updates_equals_a_fresh_build(kind, steps):
    index, vectors, there = KINDS[kind](), vectors_of(kind), set[str]()
    for number, (adding, start, length) in enumerate(steps):
        run = IDS[start : start + length]
        if adding:  # existing ids are replaced: removed and added in one update
            again = run[: len(run) // 2]
            new = [chunk_id for chunk_id in run if chunk_id in again or chunk_id not in there]
            index.update([(i, vectors[i]) for i in new], again, generation=number, embedder="e")
            there |= set(run)
        else:
            index.update([], run, generation=number, embedder="e")
            there -= set(run)
        assert index.generation == number
    assert_right(kind, index, there, fresh=built(kind, sorted(there)))


@two_kinds
def test_many_small_updates_leave_few_segments(kind):
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


@two_kinds
def test_a_new_index_is_empty(kind):
    index = KINDS[kind]()
    assert (index.generation, index.embedder, len(index), index.chunk_ids()) == (0, "", 0, frozenset())
    assert index.search(queries(kind)[0], 3) == []
    with pytest.raises(ValueError, match="at least 1"):
        index.search(queries(kind)[0], 0)


@two_kinds
def test_duplicates_and_other_embedders_are_refused_and_change_nothing(kind):
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


@two_kinds
def test_searches_see_the_old_index_while_an_update_runs(kind):
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
def test_50_threads_search_during_updates(kind):
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
def test_a_loaded_index_equals_the_saved_one_and_goes_on(kind, tmp_path):
    index, vectors = built(kind, IDS[:200], generation=4), vectors_of(kind)
    index.update([], IDS[10:40], generation=5, embedder="e")
    index.save(tmp_path)
    loaded = type(index).load(tmp_path)
    assert (loaded.generation, loaded.embedder) == (5, "e")
    there = set(IDS[:10] + IDS[40:200])
    for query in queries(kind):
        assert loaded.search(query, 9) == index.search(query, 9)
    assert_right(kind, loaded, there)
    for number in range(3):  # update mapped segments, and replace the files that they are read from
        run = IDS[200 + 40 * number : 240 + 40 * number]
        loaded.update([(i, vectors[i]) for i in run], IDS[40 : 44 + number], generation=6, embedder="e")
        loaded.save(tmp_path)
        there = there.union(run) - set(IDS[40 : 44 + number])
        loaded = type(index).load(tmp_path)
        assert_right(kind, loaded, there)
    assert len(list(tmp_path.glob("data-*"))) == 1


@two_kinds
def test_saving_again_links_what_has_not_changed(kind, tmp_path):
    index, vectors = built(kind, IDS[:250]), vectors_of(kind)

    def large() -> set[int]:
        name = json.loads((tmp_path / "manifest.json").read_text())["segments"][0]
        return {path.stat().st_ino for path in tmp_path.glob(f"data-*/{name}.*")}

    index.save(tmp_path)
    first = large()
    index.update([(i, vectors[i]) for i in IDS[250:260]], IDS[20:25], generation=2, embedder="e")
    index.save(tmp_path)
    assert large() == first
    shutil.rmtree(next(tmp_path.glob("data-*")))  # another process has deleted the files to link
    index.save(tmp_path)
    assert_right(kind, type(index).load(tmp_path), set(IDS[:20] + IDS[25:260]))


@two_kinds
@pytest.mark.parametrize("ids", [[], IDS[:3]])
def test_indexes_with_nothing_to_find(kind, ids, tmp_path):
    built(kind, ids).save(tmp_path)
    loaded = type(KINDS[kind]()).load(tmp_path)
    assert loaded.search(queries(kind)[0], 3) == []
    assert loaded.chunk_ids() == set(ids)


@pytest.mark.parametrize("kind", [*KINDS, "bm25"])
def test_every_damaged_file_is_noticed(kind, tmp_path):
    good = tmp_path / "good"
    index = fill(kind)[0] if kind == "bm25" else built(kind, IDS[:120])
    index.save(good)
    load = type(index).load
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


@two_kinds
def test_another_kinds_folder_is_refused(kind, tmp_path):
    built(kind, IDS[:9]).save(tmp_path)
    other: Any = DenseIndex if kind == "sparse" else SparseIndex
    with pytest.raises(RetrievalError, match="rebuild it"):
        other.load(tmp_path)


@two_kinds
@pytest.mark.parametrize("step", ["mkdir", "write_text", "replace"])
def test_a_failed_save_keeps_the_old_index(kind, step, tmp_path, monkeypatch):
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
    assert_right("ivf", DenseIndex.load(tmp_path), set(loaded.chunk_ids()))


def test_faiss_that_cannot_write_is_one_sentence(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise RuntimeError("Error in FileIOWriter: write error: No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    with pytest.raises(RetrievalError, match=r"cannot be written: .*No space left"):
        built("flat", IDS[:9]).save(tmp_path)


# ---- hostile

WIDTH = 8
NAMES = [f"c{n}" for n in range(12)]


def fill(kind: str) -> tuple[Any, Callable[[Any], object]]:
    """An index of 12 chunks in two segments, and a function that searches it."""
    index: Any
    question: Any
    vectors: list[Any]
    if kind == "bm25":
        index, question, vectors = BM25(), "common word3", [f"word{n} common" for n in range(len(NAMES))]
    elif kind == "sparse":
        index, question = SparseIndex(), {"all": 1.0, "tc3": 0.5}
        vectors = [{f"t{name}": 0.5, "all": 1.0} for name in NAMES]
    else:
        index, vectors = DenseIndex(DenseConfig(factory=kind, exact_below=1)), [*unit_vectors(len(NAMES), WIDTH)]
        question = vectors[3]
    pairs = list(zip(NAMES, vectors, strict=True))
    for run, gone in ((pairs[:10], ()), (pairs[10:], NAMES[:1])):
        index.update(run, gone, generation=3, embedder="e")
    return index, lambda index: index.search(question, 5)


@dataclass(frozen=True)
class Saved:
    """An index saved in `folder`, two folders below `root`, and operations on it."""

    kind: type[Any]
    search: Callable[[Any], object]
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "a" / "b" / "index"

    @property
    def data(self) -> Path:
        [found] = self.folder.glob("data-*")
        return found

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return found

    def files(self, end: str) -> list[Path]:
        """The files of its larger segment: segments are read independently."""
        manifest = self.manifest()
        other = manifest["segments"][1]
        return [self.data / name for name in manifest["files"] if name.endswith(end) and not name.startswith(other)]

    def copy(self, root: Path) -> Saved:
        """A copy, with an unrelated file beside its folders."""
        made = replace(self, root=root)
        shutil.rmtree(made.folder, ignore_errors=True)
        shutil.copytree(self.folder, made.folder)
        (root / "outside").mkdir(exist_ok=True)
        (root / "outside" / "precious").write_text("precious")
        return made

    def reseal(self, manifest: Any = None, *, files: bool = True) -> None:
        """Write a manifest with right checksums for those of its files that exist."""
        manifest = self.manifest() if manifest is None else manifest
        if files and isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
            for name in manifest["files"]:
                path = self.data / name
                if "/" not in name and path.is_file():
                    manifest["files"][name] = xxhash.xxh3_128(path.read_bytes()).hexdigest()
        (self.folder / "manifest.json").write_text(json.dumps(manifest))

    def surroundings(self) -> dict[str, tuple[int, bytes]]:
        """Every file outside the index, with its link count and content."""
        return {
            str(path): (path.lstat().st_nlink, path.read_bytes()) if path.is_file() else (0, b"")
            for path in sorted(self.root.rglob("*"))
            if self.folder not in path.parents and path != self.folder
        }

    def use(self) -> str:
        """The outcome of loading, searching, updating and saving; only RetrievalError is allowed, and no effect
        outside.
        """
        before = self.surroundings()
        try:
            index = self.kind.load(self.folder)
        except RetrievalError:
            outcome = "damaged"
        else:
            self.search(index)
            index.update([], NAMES[:2], generation=4, embedder=index.embedder)
            index.save(self.folder)
            self.search(self.kind.load(self.folder))
            outcome = "used"
        assert self.surroundings() == before
        return outcome

    def refuse(self, path: Path, *contents: bytes) -> None:
        """Check that each of these contents of a file, with right checksums, is detected as damage; then restore the
        file.
        """
        honest = path.read_bytes()
        for content in contents:
            path.write_bytes(content)
            self.reseal()
            assert self.use() == "damaged"
        path.write_bytes(honest)
        self.reseal()


DAMAGED = ("bm25", "Flat", "HNSW8", "sparse")


@pytest.fixture(scope="module", params=DAMAGED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    index, search = fill(request.param)
    saved = Saved(type(index), search, tmp_path_factory.mktemp("kept"))
    index.save(saved.folder)
    return saved


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is killed here, so nothing needs to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def arena(made: Saved, tmp_path: Path) -> Saved:
    return made.copy(tmp_path)


def npy(array: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


@pytest.mark.parametrize("name", [".", "..", "../../../outside/precious", "", "x" * 17, "0123456789abcdef\n"])
def test_a_segments_name_leads_nowhere(arena, name):
    """The attack: every file that begins with "." would belong to the segment, be linked to where its name leads, and
    be deleted there.
    """
    manifest = arena.manifest()
    old = manifest["segments"][0]
    table = json.loads((arena.data / "table.json").read_text())
    table["hidden"][name] = table["hidden"].pop(old)
    (arena.data / "table.json").write_text(json.dumps(table))
    for file in [file for file in manifest["files"] if file.startswith(old)]:
        own = f"{name}{file.removeprefix(old)}"
        manifest["files"][own] = manifest["files"].pop(file)
        if "/" not in own:
            (arena.data / file).rename(arena.data / own)
    manifest["segments"][0] = name
    manifest["files"]["../../../outside/precious"] = "0" * 32
    arena.reseal(manifest)
    assert arena.use() == "damaged"


@pytest.mark.parametrize("name", ["..", ".", "/", "../index/DATA", "DATA/", "DATA/../DATA", "data-0", "DATA\n"])
def test_the_data_folders_name_leads_nowhere(arena, name):
    manifest = arena.manifest()
    manifest["data"] = name.replace("DATA", manifest["data"])
    arena.reseal(manifest)
    assert arena.use() == "damaged"


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_files_that_are_none_count_as_damage(arena, tmp_path, kind):
    moved = tmp_path / "outside" / "moved"
    for path in (*arena.data.iterdir(), arena.folder / "manifest.json"):
        shutil.move(path, moved)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(moved if kind == "link" else "/dev/zero")
        assert arena.use() == "damaged"
        path.rmdir() if kind == "folder" else path.unlink()
        shutil.move(moved, path)
    assert arena.use() == "used"


def test_folders_that_are_links_are_replaced_and_not_written_through(made, arena, tmp_path):
    index, folder = made.kind.load(made.folder), arena.folder
    other = tmp_path / "outside" / "index"
    shutil.move(folder, other)
    folder.symlink_to(other)
    (other / "data-1234").mkdir()
    before = arena.surroundings()
    with pytest.raises(RetrievalError):
        made.kind.load(folder)
    index.save(folder)
    assert not folder.is_symlink()
    (folder / "data-link").symlink_to(other)
    index.save(folder)
    assert not os.path.lexists(folder / "data-link")
    assert arena.surroundings() == before
    made.search(made.kind.load(folder))


@pytest.mark.usefixtures("no_sync")
def test_mutated_json_is_damage_or_harmless(made, tmp_path):
    rng = random.Random(1)
    outcomes = set()
    for source in (made.folder / "manifest.json", *made.files(".json")):
        whole = source.name == "manifest.json"
        for what, changed in mutants(json.loads(source.read_text()), rng, 30 if whole else 8):
            saved = made.copy(tmp_path)
            if whole:
                saved.reseal(changed, files="/files" not in what)
            else:
                (saved.data / source.name).write_text(json.dumps(changed))
                saved.reseal()
            try:
                outcomes.add(saved.use())
            except Exception as error:
                raise AssertionError(f"{source.name}: {what}") from error
    assert "damaged" in outcomes


@pytest.mark.usefixtures("no_sync")
def test_mutated_arrays_are_damage_or_harmless(made, tmp_path):
    """Changed numbers in arrays, and arrays of other types and lengths."""
    rng = np.random.default_rng(2)
    for path in made.files(".npy"):
        source = np.load(path)
        other = source.astype("S8" if source.dtype.kind == "S" else "f8")
        others = [source[:-1], other, source[None], np.zeros(0, source.dtype), np.array(["a"] * 3)]
        for value in (-1, 12, 1 << 30, -(1 << 31)):
            changed = source.copy()
            changed[rng.integers(len(source))] = np.array(value).astype(source.dtype)
            others.append(changed)
        if source.dtype.kind == "f":
            others += [np.full_like(source, np.nan), np.full_like(source, np.inf)]
        for changed in others:
            saved = made.copy(tmp_path)
            (saved.data / path.name).write_bytes(npy(changed))
            saved.reseal()
            saved.use()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("text", lambda array: np.full_like(array, 0xFF)),  # not UTF-8
        ("text", lambda array: np.concatenate([array[:1], np.frombuffer("😀".encode(), "u1"), array[5:]])),  # cut
        ("cuts", lambda array: array[::-1].copy()),
        ("keys", lambda array: array[::-1].copy()),
        ("keys", lambda array: np.repeat(array[:1], len(array))),
        ("order", lambda array: np.zeros_like(array)),
        ("order", lambda array: np.concatenate([array[1:], array[-1:]])),
        ("words", lambda array: array[::-1].copy()),
        ("words", lambda array: np.repeat(array[:1], len(array))),
        ("starts", lambda array: np.zeros_like(array)),
        ("numbers", lambda array: np.zeros_like(array)),
        ("lengths", lambda array: np.zeros_like(array)),
        ("lengths", lambda array: array + 1),
    ],
)
def test_arrays_that_contradict_each_other_are_damage(arena, file, change):
    for path in arena.files(f".{file}.npy"):
        changed = change(np.load(path))
        if changed.dtype.kind != "f":  # weights of 0 are allowed: they find nothing
            arena.refuse(path, npy(changed))
    assert arena.use() == "used"


def test_arrays_of_pickles_of_holes_and_of_more_than_the_file_are_damage(arena):
    head = b"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904,), }"
    huge = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head
    for path in arena.files(".npy"):
        arena.refuse(path, npy(np.array([{}], dtype=object), allow_pickle=True), huge)
    # A sparse file of a terabyte would take an hour to checksum.
    os.truncate(arena.files("")[0], 1 << 40)
    assert arena.use() == "damaged"


def test_the_head_of_a_flat_index_is_checked_byte_by_byte(arena):
    for path in arena.files(".flat"):
        honest, wrong = path.read_bytes(), []
        for at, what in ((0, "<4s"), (4, "<i"), (8, "<q"), (32, "<B"), (33, "<i"), (37, "<Q")):
            for value in [b"IxF2", b"Iwfl"] if what == "<4s" else [0, 1, 5, 100]:
                changed = bytearray(honest)
                struct.pack_into(what, changed, at, value)
                wrong.append(bytes(changed))
        arena.refuse(path, *(content for content in wrong if content != honest))
    assert arena.use() == "used"


def test_an_approximate_index_of_somebody_else_is_not_given_to_faiss(arena, tmp_path, monkeypatch):
    """Changed, without a mark, with a mark for another file or another user: FAISS never reads the file."""
    near = sorted(arena.data.glob("*.near"))
    if not near:
        pytest.skip("has none")
    read: set[str] = set()
    honestly = faiss.read_index
    monkeypatch.setattr(faiss, "read_index", lambda path, *more: read.add(path) or honestly(path, *more))
    manifest, marks = arena.manifest(), [path.with_suffix(".mark") for path in near]
    mark, changed = marks[0].read_bytes(), bytearray(near[0].read_bytes())
    changed[-1] ^= 1
    arena.refuse(near[0], bytes(changed), b"")
    other = marks[-1].read_bytes() if len(marks) > 1 else b"0"
    arena.refuse(marks[0], b"", b"0" * 64, b"\xff" * 64, bytes(1 << 16), other)
    marks[0].unlink()
    del manifest["files"][marks[0].name]
    arena.reseal(manifest)
    assert arena.use() == "damaged"
    marks[0].write_bytes(mark)
    manifest["files"][marks[0].name] = ""
    arena.reseal(manifest)
    ownmark._key.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path.parent / "another"))
        assert arena.use() == "damaged"
    ownmark._key.cache_clear()
    assert str(near[0]) not in read
    assert arena.use() == "used"
    assert str(near[0]) in read


@pytest.mark.parametrize(
    "factory",
    [
        "IVF2000000000,Flat",
        "HNSW100000",
        "OPQ4_1000000,Flat",
        "IMI2x24,Flat",
        "PQ4x24",
        "Flat," * 100,
        "IVF" + "9" * 5000,
    ],
)
def test_a_factory_that_takes_gigabytes_is_refused(factory):
    with pytest.raises(ConfigError, match="cannot be the dense index"):
        make(factory, WIDTH)


def test_a_factory_that_ends_the_process_is_refused():
    """FAISS divides by zero or crashes with some of these, so they are tested in a child process."""
    factories = ["IVF4,FlatPanorama0", "IVF4,FlatPanorama8", "IVF1,PQ0", "PCA0,Flat", "HNSW0", "HNSW1"]
    factories += ["IVF8_HNSW1,Flat", "HNSW8_0+PQ8", "IVF4(HNSW0),Flat"]

    def check() -> None:
        for factory in factories:
            with pytest.raises(ConfigError, match="none of the kinds that ragkv knows"):
                DenseConfig(factory=factory).check(8)

    assert in_child(check) == 0


HEADS = [
    b"(((((",
    b"(" * 60_000,
    b"{" * 60_000,
    b"[" * 200 + b"]" * 200,
    b"-" * 60_000 + b"1",
    b"\xff\xfe\x00",
    b"'''",
    b"\\",
    b"  1\n 2",
    b"{'descr': '<i4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }",
    b"{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }",
    b"{'descr': 'O', 'fortran_order': False, 'shape': (1,), }",
    b"{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,), }",
    b"{'descr': '<i4', 'fortran_order': True, 'shape': (1,), }",
    b"",
]


@pytest.mark.parametrize(
    ("made", "head"),
    [
        pytest.param(kind, head, marks=[pytest.mark.nightly] * (place % len(DAMAGED) != at), id=f"{kind}-{place}")
        for at, kind in enumerate(DAMAGED)
        for place, head in enumerate(HEADS)
    ],
    indirect=["made"],
)
def test_whatever_describes_an_array_is_damage(arena, head):
    """All kinds read arrays with the same function; `make test` tests each header with one kind."""
    for number, path in enumerate(arena.files(".npy")):
        version = 1 + number % 3
        size = struct.pack("<H" if version == 1 else "<I", len(head))
        arena.refuse(path, b"\x93NUMPY" + bytes([version, 0]) + size + head + path.read_bytes()[128:])
    assert arena.use() == "used"


@pytest.mark.parametrize("error", [tokenize.TokenError, SyntaxError, MemoryError, RecursionError, AssertionError])
def test_whatever_reading_raises_is_damage(made, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error("of a library")

    monkeypatch.setattr(made.kind, "_read", fail)
    with pytest.raises(RetrievalError, match="rebuild it"):
        made.kind.load(made.folder)
