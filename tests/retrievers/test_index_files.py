"""Files of an index that are damaged or made by somebody else: damage or harmless, and no effect outside."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import xxhash
from mutation import mutants
from package import in_child

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import BM25, DenseIndex, SparseIndex, vectors
from ragkv.retrievers.vectors import make
from ragkv.util import files as ownmark

WIDTH = 8


@pytest.fixture(autouse=True, scope="module")
def approximate() -> Iterator[None]:
    """Even the smallest segments have an approximate index."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "EXACT_BELOW", 1)
        yield


def unit_vectors(rows: int, dimension: int) -> np.ndarray:
    made = np.random.default_rng(0).standard_normal((rows, dimension), dtype=np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


NAMES = [f"c{n}" for n in range(12)]


def fill(kind: str) -> tuple[Any, Callable[[Any], object]]:
    """An index of 12 chunks in two segments, and a function that searches it."""
    index: Any
    question: Any
    content: list[Any]
    if kind == "bm25":
        index, question, content = BM25(), "common word3", [f"word{n} common" for n in range(len(NAMES))]
    elif kind == "sparse":
        index, question = SparseIndex(), {"all": 1.0, "tc3": 0.5}
        content = [{f"t{name}": 0.5, "all": 1.0} for name in NAMES]
    else:
        index, content = DenseIndex(kind), [*unit_vectors(len(NAMES), WIDTH)]
        question = content[3]
    pairs = list(zip(NAMES, content, strict=True))
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
        copied = replace(self, root=root)
        shutil.rmtree(copied.folder, ignore_errors=True)
        shutil.copytree(self.folder, copied.folder)
        (root / "outside").mkdir(exist_ok=True)
        (root / "outside" / "precious").write_text("precious")
        return copied

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
def saved_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    index, search = fill(request.param)
    saved = Saved(type(index), search, tmp_path_factory.mktemp("kept"))
    index.save(saved.folder)
    return saved


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is killed here, so nothing needs to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def arena(saved_index: Saved, tmp_path: Path) -> Saved:
    return saved_index.copy(tmp_path)


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


def test_folders_that_are_links_are_replaced_and_not_written_through(saved_index, arena, tmp_path):
    index, folder = saved_index.kind.load(saved_index.folder), arena.folder
    other = tmp_path / "outside" / "index"
    shutil.move(folder, other)
    folder.symlink_to(other)
    (other / "data-1234").mkdir()
    before = arena.surroundings()
    with pytest.raises(RetrievalError):
        arena.kind.load(folder)
    index.save(folder)
    assert not folder.is_symlink()
    (folder / "data-link").symlink_to(other)
    index.save(folder)
    assert not os.path.lexists(folder / "data-link")
    assert arena.surroundings() == before
    arena.search(arena.kind.load(folder))


@pytest.mark.usefixtures("no_sync")
def test_mutated_json_is_damage_or_harmless(saved_index, tmp_path):
    rng = random.Random(1)
    outcomes = set()
    for what, changed in mutants(saved_index.manifest(), rng, 40):
        saved = saved_index.copy(tmp_path)
        saved.reseal(changed, files="/files" not in what)
        try:
            outcomes.add(saved.use())
        except Exception as error:
            raise AssertionError(what) from error
    assert "damaged" in outcomes


@pytest.mark.usefixtures("no_sync")
def test_mutated_arrays_are_damage_or_harmless(saved_index, tmp_path):
    """Changed numbers in arrays, and arrays of other types and lengths."""
    rng = np.random.default_rng(2)
    for path in saved_index.files(".npy"):
        source = np.load(path)
        if not len(source):  # no row is hidden
            source = np.zeros(1, source.dtype)
        other = source.astype("S8" if source.dtype.kind == "S" else "f8")
        others = [source[:-1], other, source[None], np.zeros(0, source.dtype), np.array(["a"] * 3)]
        for value in (-1, 12, 1 << 30, -(1 << 31)):
            changed = source.copy()
            changed[rng.integers(len(source)) :][:1] = np.array(value).astype(source.dtype)
            others.append(changed)
        if source.dtype.kind == "f":
            others += [np.full_like(source, np.nan), np.full_like(source, np.inf)]
        for changed in others:
            saved = saved_index.copy(tmp_path)
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
                make(factory, 8)

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
    ("saved_index", "head"),
    [
        pytest.param(kind, head, marks=[pytest.mark.nightly] * (place % len(DAMAGED) != at), id=f"{kind}-{place}")
        for at, kind in enumerate(DAMAGED)
        for place, head in enumerate(HEADS)
    ],
    indirect=["saved_index"],
)
def test_whatever_describes_an_array_is_damage(arena, head):
    """All kinds read arrays with the same function; `make test` tests each header with one kind."""
    for number, path in enumerate(arena.files(".npy")):
        version = 1 + number % 3
        size = struct.pack("<H" if version == 1 else "<I", len(head))
        arena.refuse(path, b"\x93NUMPY" + bytes([version, 0]) + size + head + path.read_bytes()[128:])
    assert arena.use() == "used"


@pytest.mark.parametrize("error", [tokenize.TokenError, SyntaxError, MemoryError, RecursionError, AssertionError])
def test_whatever_reading_raises_is_damage(saved_index, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error("of a library")

    monkeypatch.setattr(saved_index.kind, "_read", fail)
    with pytest.raises(RetrievalError, match="rebuild it"):
        saved_index.kind.load(saved_index.folder)
