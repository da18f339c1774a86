"""Retrieval indexes that somebody else made, every checksum in them right: found damaged, or searched without harm."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from mutation import mutants

from ragkv.boundary import ownmark
from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import BM25, DenseConfig, DenseIndex, SparseIndex
from ragkv.retrievers.factory import make

WIDTH = 8
IDS = [f"c{n}" for n in range(12)]
Made = tuple[type[Any], Path, Callable[[Any], object]]


def unit(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).standard_normal(WIDTH).astype("f4")
    return vector / np.linalg.norm(vector)


def fill(kind: str) -> tuple[Any, Callable[[Any], object]]:
    """An index of 12 chunks in two segments, and a search in it."""
    index: Any
    question: Any
    vectors: list[Any]
    if kind == "bm25":
        index, question, vectors = BM25(), "common word3", [f"word{n} common" for n in range(len(IDS))]
    elif kind == "sparse":
        index, question = SparseIndex(), {"all": 1.0, "tc3": 0.5}
        vectors = [{f"t{name}": 0.5, "all": 1.0} for name in IDS]
    else:
        index, question = DenseIndex(DenseConfig(factory=kind, exact_below=1)), unit(3)
        vectors = [unit(n) for n in range(len(IDS))]
    pairs = list(zip(IDS, vectors, strict=True))
    for run, gone in ((pairs[:10], ()), (pairs[10:], IDS[:1])):
        index.update(run, gone, generation=3, embedder="e")
    return index, lambda index: index.search(question, 5)


@pytest.fixture(scope="module", params=["bm25", "Flat", "HNSW8", "sparse"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    index, search = fill(request.param)
    folder = tmp_path_factory.mktemp("kept") / "index"
    index.save(folder)
    return type(index), folder, search


@pytest.fixture
def arena(made: Made, tmp_path: Path) -> Path:
    """A copy of the index, two folders down, with somebody's file beside them."""
    folder = tmp_path / "a" / "b" / "index"
    shutil.copytree(made[1], folder)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    return folder


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def reseal(folder: Path, manifest: Any, *, files: bool = True) -> None:
    """Write a manifest, its checksums those of the files that it names as far as they are there."""
    if files and isinstance(manifest, dict) and isinstance(manifest.get("files"), dict):
        [data] = folder.glob("data-*")
        for name in manifest["files"]:
            path = data / name
            if "/" not in name and path.is_file():
                manifest["files"][name] = xxhash.xxh3_128(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def surroundings(root: Path, index: Path) -> dict[str, tuple[int, bytes]]:
    """Every file that is not of the index, with its links and content."""
    return {
        str(path): (path.lstat().st_nlink, path.read_bytes()) if path.is_file() else (0, b"")
        for path in sorted(root.rglob("*"))
        if index not in path.parents and path != index
    }


def use(made: Made, folder: Path, root: Path) -> str:
    """What comes of opening, searching, changing and saving; nothing but RetrievalError may, and nothing outside."""
    kind, _, search = made
    before = surroundings(root, folder)
    try:
        index = kind.load(folder)
    except RetrievalError:
        outcome = "damaged"
    else:
        search(index)
        index.update([], IDS[:2], generation=4, embedder=index.embedder)
        index.save(folder)
        search(kind.load(folder))
        outcome = "used"
    assert surroundings(root, folder) == before
    return outcome


def test_an_honest_index_is_used(made: Made, arena: Path, tmp_path: Path) -> None:
    assert use(made, arena, tmp_path) == "used"


@pytest.mark.parametrize("name", [".", "..", "../../../outside/precious", "", "x" * 17, "0123456789abcdef\n"])
def test_a_segments_name_leads_nowhere(made: Made, arena: Path, tmp_path: Path, name: str) -> None:
    """The attack: all that begins with "." is the segment's own, linked to where its name leads, and deleted there."""
    manifest = manifest_of(arena)
    data = arena / manifest["data"]
    old = manifest["segments"][0]
    table = json.loads((data / "table.json").read_text())
    table["hidden"][name] = table["hidden"].pop(old)
    (data / "table.json").write_text(json.dumps(table))
    for file in [file for file in manifest["files"] if file.startswith(old)]:
        own = f"{name}{file.removeprefix(old)}"
        manifest["files"][own] = manifest["files"].pop(file)
        if "/" not in own:
            (data / file).rename(data / own)
    manifest["segments"][0] = name
    manifest["files"]["../../../outside/precious"] = "0" * 32
    reseal(arena, manifest)
    assert use(made, arena, tmp_path) == "damaged"


@pytest.mark.parametrize("name", ["..", ".", "/", "../index/DATA", "DATA/", "DATA/../DATA", "data-0", "DATA\n"])
def test_the_data_folders_name_leads_nowhere(made: Made, arena: Path, tmp_path: Path, name: str) -> None:
    manifest = manifest_of(arena)
    manifest["data"] = name.replace("DATA", manifest["data"])
    reseal(arena, manifest)
    assert use(made, arena, tmp_path) == "damaged"


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_files_that_are_none_count_as_damage(made: Made, arena: Path, tmp_path: Path, kind: str) -> None:
    data = arena / manifest_of(arena)["data"]
    for path in (*data.iterdir(), arena / "manifest.json"):
        shutil.move(path, tmp_path / "outside" / "moved")
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "outside" / "moved" if kind == "link" else "/dev/zero")
        assert use(made, arena, tmp_path) == "damaged"
        path.rmdir() if kind == "folder" else path.unlink()
        shutil.move(tmp_path / "outside" / "moved", path)
    assert use(made, arena, tmp_path) == "used"


def test_folders_that_are_links_are_replaced_and_not_written_through(made: Made, arena: Path, tmp_path: Path) -> None:
    kind, folder, search = made
    index = kind.load(folder)
    other = tmp_path / "outside" / "index"
    shutil.move(arena, other)
    arena.symlink_to(other)
    (other / "data-1234").mkdir()
    before = surroundings(tmp_path, arena)
    with pytest.raises(RetrievalError):
        kind.load(arena)
    index.save(arena)
    assert not arena.is_symlink()
    (arena / "data-link").symlink_to(other)
    index.save(arena)
    assert not os.path.lexists(arena / "data-link")
    assert surroundings(tmp_path, arena) == before
    search(kind.load(arena))


def test_mutated_json_is_damage_or_harmless(made: Made, tmp_path: Path) -> None:
    rng = random.Random(1)
    files = ["manifest.json", *(name for name in manifest_of(made[1])["files"] if name.endswith(".json"))]
    outcomes = set()
    for file in files:
        folder = tmp_path / "a" / "b" / "index"
        source = made[1] / file if file == "manifest.json" else made[1] / manifest_of(made[1])["data"] / file
        for what, changed in mutants(json.loads(source.read_text()), rng, 30 if file == "manifest.json" else 8):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made[1], folder)
            manifest = manifest_of(folder)
            if file == "manifest.json":
                reseal(folder, changed, files="/files" not in what)
            else:
                (folder / manifest["data"] / file).write_text(json.dumps(changed))
                reseal(folder, manifest)
            try:
                outcomes.add(use(made, folder, tmp_path))
            except Exception as error:
                raise AssertionError(f"{file}: {what}") from error
    assert "damaged" in outcomes


def test_mutated_arrays_are_damage_or_harmless(made: Made, tmp_path: Path) -> None:
    """Numbers of the arrays, and whole arrays of other types and lengths."""
    rng = np.random.default_rng(2)
    files = [name for name in manifest_of(made[1])["files"] if name.endswith(".npy")]
    for file in files:
        source = np.load(made[1] / manifest_of(made[1])["data"] / file)
        other = source.astype("S8" if source.dtype.kind == "S" else "f8")
        others = [source[:-1], other, source[None], np.zeros(0, source.dtype), np.array(["a"] * 3)]
        for value in (-1, 12, 1 << 30, -(1 << 31)):
            changed = source.copy()
            changed[rng.integers(len(source))] = np.array(value).astype(source.dtype)
            others.append(changed)
        if source.dtype.kind == "f":
            others += [np.full_like(source, np.nan), np.full_like(source, np.inf)]
        for changed in others:
            folder = tmp_path / "a" / "b" / "index"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made[1], folder)
            manifest = manifest_of(folder)
            np.save(folder / manifest["data"] / file, changed)
            reseal(folder, manifest)
            use(made, folder, tmp_path)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("text", lambda array: np.full_like(array, 0xFF)),  # no UTF-8
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
def test_arrays_that_contradict_each_other_are_damage(
    made: Made, arena: Path, tmp_path: Path, file: str, change: Callable[[Any], Any]
) -> None:
    manifest = manifest_of(arena)
    for path in sorted((arena / manifest["data"]).glob(f"*.{file}.npy")):
        honest = path.read_bytes()
        changed = change(np.load(path))
        if changed.dtype.kind == "f":
            continue  # weights of 0 are no damage: nothing is found by them
        np.save(path, changed)
        reseal(arena, manifest)
        assert use(made, arena, tmp_path) == "damaged"
        path.write_bytes(honest)
    reseal(arena, manifest)
    assert use(made, arena, tmp_path) == "used"


def test_arrays_of_pickles_and_of_more_than_the_file_are_damage(made: Made, arena: Path, tmp_path: Path) -> None:
    manifest = manifest_of(arena)
    for file in [name for name in manifest["files"] if name.endswith(".npy")]:
        path = arena / manifest["data"] / file
        honest = path.read_bytes()
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
        reseal(arena, manifest)
        assert use(made, arena, tmp_path) == "damaged"
        head = b"{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904,), }"
        path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
        reseal(arena, manifest)
        assert use(made, arena, tmp_path) == "damaged"
        path.write_bytes(honest)
        reseal(arena, manifest)


def test_the_head_of_a_flat_index_is_checked_byte_by_byte(made: Made, arena: Path, tmp_path: Path) -> None:
    manifest = manifest_of(arena)
    for file in [name for name in manifest["files"] if name.endswith(".flat")]:
        path = arena / manifest["data"] / file
        honest = path.read_bytes()
        for at, what in ((0, "<4s"), (4, "<i"), (8, "<q"), (32, "<B"), (33, "<i"), (37, "<Q")):
            for value in [b"IxF2", b"Iwfl"] if what == "<4s" else [0, 1, 5, 100]:
                changed = bytearray(honest)
                struct.pack_into(what, changed, at, value)
                if changed != honest:
                    path.write_bytes(changed)
                    reseal(arena, manifest)
                    assert use(made, arena, tmp_path) == "damaged"
        path.write_bytes(honest)
        reseal(arena, manifest)
    assert use(made, arena, tmp_path) == "used"


def test_an_approximate_index_of_somebody_else_is_not_given_to_faiss(
    made: Made, arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed, without a mark, with a mark of another file or of another user: FAISS sees none of it."""
    import faiss

    manifest = manifest_of(arena)
    near = sorted((arena / manifest["data"]).glob("*.near"))
    if not near:
        pytest.skip("has none")
    read: set[str] = set()
    honestly = faiss.read_index

    def noted(path: str, *more: object) -> object:
        read.add(path)
        return honestly(path, *more)

    monkeypatch.setattr(faiss, "read_index", noted)
    honest = {path: path.read_bytes() for path in (arena / manifest["data"]).iterdir()}
    marks = [path.with_suffix(".mark") for path in near]
    changed = bytearray(honest[near[0]])
    changed[-1] ^= 1
    for path, content in (
        (near[0], bytes(changed)),
        (near[0], b""),
        (marks[0], b""),
        (marks[0], b"0" * 64),
        (marks[0], b"\xff" * 64),
        (marks[0], bytes(1 << 16)),
        (marks[0], honest[marks[-1]] if len(marks) > 1 else b"0"),
    ):
        path.write_bytes(content)
        reseal(arena, manifest)
        assert use(made, arena, tmp_path) == "damaged"
        path.write_bytes(honest[path])
    marks[0].unlink()
    del manifest["files"][marks[0].name]
    reseal(arena, manifest)
    assert use(made, arena, tmp_path) == "damaged"
    marks[0].write_bytes(honest[marks[0]])
    manifest["files"][marks[0].name] = ""
    reseal(arena, manifest)
    ownmark._key.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path.parent / "another"))
        assert use(made, arena, tmp_path) == "damaged"
    ownmark._key.cache_clear()
    assert str(near[0]) not in read
    assert use(made, arena, tmp_path) == "used"
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
def test_a_factory_that_takes_gigabytes_is_refused(factory: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the dense index"):
        make(factory, WIDTH)
