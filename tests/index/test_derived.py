"""Retrieval indexes over a store: they follow what changed, and are built again when their files are damaged."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragkv.index.derived import Derived, Tell, stale_derived
from ragkv.retrievers import BM25, DenseConfig, DenseIndex, SparseIndex
from ragkv.retrievers.persistence import SavedElsewhereError
from ragkv.retrievers.segment import SegmentedIndex
from ragkv.store import ChunkVectors, Store
from ragkv.types import Chunk, Document

SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from ragkv.index.derived import Derived
from ragkv.retrievers import DenseConfig
from ragkv.store import ChunkVectors, Store
from ragkv.types import Chunk, Document

def vector(n):
    found = np.zeros(256, np.float32)
    found[n] = 1
    return ChunkVectors(dense=found, sparse={str(n): 1.0})

folder = Path(sys.argv[1])
store = Store.create(folder)
chunks = [Chunk(chunk_id=f"c{n}", document_id="a", ordinal=n, text=f"word{n} and more words", token_ids=(n,),
                start=n, end=n + 1) for n in range(200)]
store.write_document(Document(document_id="a", source="a", content_hash="0"), "x" * 200, chunks, recipe="r",
                     references={chunk.chunk_id: [] for chunk in chunks},
                     vectors={chunk.chunk_id: vector(chunk.ordinal) for chunk in chunks})

def ask(derived):
    config = DenseConfig()
    return [
        derived.bm25().search("word7", 1)[0].chunk_id,
        derived.vectors("dense", embedder="e", config=config).search(vector(7).dense, 1)[0].chunk_id,
        derived.vectors("sparse", embedder="e", config=config).search({"7": 1.0}, 1)[0].chunk_id,
        "c7" if derived.fields().chunks({"source": ["a"]})[0] == 1 else "?",
    ]

ask(Derived(store, folder / "derived", lambda keep: keep()))
derived = Derived(store, folder / "derived", lambda keep: keep())  # maps what the first one has saved
for length in (0, 4096, 1):
    assert ask(derived) == ["c7"] * 4
    for path in (folder / "derived").glob("*/data-*/*"):
        os.truncate(path, min(length, path.stat().st_size))
assert ask(derived) == ["c7"] * 4
readonly = Derived(store, folder / "derived", lambda keep: None)
assert ask(readonly) == ["c7"] * 4
print("ok")
"""


def test_mapped_files_that_are_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


KINDS: dict[str, Callable[[Derived], Any]] = {
    "bm25": lambda derived: derived.bm25(),
    "dense": lambda derived: derived.vectors("dense", embedder="e", config=DenseConfig()),
    "sparse": lambda derived: derived.vectors("sparse", embedder="e", config=DenseConfig()),
    "fields": lambda derived: derived.fields(),
}
QUESTIONS: dict[str, list[Any]] = {
    "bm25": ["common", "w3 w5 w3", "w1 common w7", "nothing"],
    "dense": [np.eye(8, dtype=np.float32)[at] for at in range(3)],
    "sparse": [{"common": 1.0}, {"w3": 0.5, "w5": 2.0}],
    "fields": [{"source": ["d3"]}, {"source": ["d1*", "d?1"], "document_id": ["*1"]}, {"source": ["*"]}, {"no": ["*"]}],
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as made:
        yield made


def derived(store: Store, *, readonly: bool = False) -> Derived:
    return Derived(
        store, store.directory.parent / "derived", (lambda write: None) if readonly else lambda write: write()
    )


def write(store: Store, name: str, texts: list[str], *, salt: int = 0) -> None:
    chunks = [
        Chunk(chunk_id=f"{name}/{n}", document_id=name, ordinal=n, text=text, token_ids=(n,), start=n, end=n + 1)
        for n, text in enumerate(texts)
    ]
    rng = np.random.default_rng([len(name), *map(ord, "".join(texts)), salt])
    vectors = {}
    for chunk in chunks:
        vector = rng.standard_normal(8).astype(np.float32)
        words = chunk.text.split()
        vectors[chunk.chunk_id] = ChunkVectors(
            dense=vector / np.linalg.norm(vector), sparse={word: words.count(word) / 4 for word in words}
        )
    document = Document(document_id=name, source=name, content_hash=f"{salt}")
    references: dict[str, list[Any]] = {chunk.chunk_id: [] for chunk in chunks}
    store.write_document(document, "x" * len(texts), chunks, recipe="r", references=references, vectors=vectors)


def fill(store: Store, documents: int, chunks: int = 10) -> None:
    for number in range(documents):
        write(store, f"d{number}", [f"common w{number} w{n}" for n in range(chunks)])


def answers(kind: str, index: Any) -> list[Any]:
    if kind == "fields":
        found = map(index.chunks, QUESTIONS[kind])
        return [(documents, keys if keys is None else keys.tolist()) for documents, keys in found]
    return [index.search(question, 50) for question in QUESTIONS[kind]]


def fresh(kind: str, store: Store, tmp_path: Path) -> list[Any]:
    """What an index finds that is built now, of all chunks."""
    return answers(
        kind, KINDS[kind](Derived(store, tmp_path / "elsewhere" / str(store.generation), lambda write: None))
    )


def no_rebuild(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """From now on, nothing may read all chunks or vectors."""
    if hasattr(store, "chunks"):
        monkeypatch.setattr(store, "vectors", lambda *_: pytest.fail("all vectors are read"))
        monkeypatch.setattr(store, "chunks", lambda *_: pytest.fail("all chunks are read"))
        monkeypatch.setattr(store, "places", lambda *_: pytest.fail("all places are read"))


@every_kind
def test_any_changes_by_any_process_are_followed_and_equal_a_fresh_build(
    kind: str, store: Store, tmp_path: Path
) -> None:
    """Two processes ask now and then, one of them cannot save, and who wrote is killed before the indexes follow."""
    rng = random.Random(5)
    fill(store, 12)
    one, other = derived(store), derived(store, readonly=True)
    for step in range(40):
        name = f"d{rng.randrange(14)}"
        if rng.random() < 0.3:
            store.delete_document(name)
        else:
            texts = [
                f"common {' '.join(f'w{rng.randrange(12)}' for _ in range(4))}" for _ in range(rng.randrange(1, 12))
            ]
            write(store, name, texts, salt=step)
        if rng.random() < 0.5:
            expected = fresh(kind, store, tmp_path)
            for process in (one, other, derived(store)):
                if rng.random() < 0.7:
                    assert answers(kind, KINDS[kind](process)) == expected
            if rng.random() < 0.3:
                one.merge(kind)
                assert answers(kind, KINDS[kind](one)) == expected


TOLD: dict[str, Callable[[Derived, Tell], Any]] = {
    "bm25": lambda derived, tell: derived.bm25(tell),
    "dense": lambda derived, tell: derived.vectors("dense", embedder="e", config=DenseConfig(), tell=tell),
    "sparse": lambda derived, tell: derived.vectors("sparse", embedder="e", config=DenseConfig(), tell=tell),
    "fields": lambda derived, tell: derived.fields(tell),
}


@every_kind
def test_how_far_it_is_is_told_and_who_is_told_may_end_it(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is built, and one that takes up changes, is as it was when that was ended."""
    monkeypatch.setattr("ragkv.index.derived._BATCH", 4)
    asked, told = derived(store), list[tuple[int, int]]()

    def end(done: int, total: int) -> None:
        told.append((done, total))
        if done:
            raise InterruptedError

    fill(store, 9, chunks=2)
    for _ in range(2):  # all of it, then what changed
        with pytest.raises(InterruptedError):
            TOLD[kind](asked, end)
        size = told[0][1]
        assert told == [(0, size), (4, size)]
        told.clear()
        TOLD[kind](asked, lambda done, total: told.append((done, total)))
        assert told == [*((done, size) for done in range(0, size, 4)), (size, size)]
        assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
        told.clear()
        TOLD[kind](asked, end)  # nothing to do, and nothing to tell
        assert told == []
        for number in range(5):
            write(store, f"d{number}", [f"common w{number} again", "w1"], salt=1)


@every_kind
def test_a_change_reads_only_the_chunks_that_changed(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 40)
    asked = derived(store)
    KINDS[kind](asked)
    write(store, "d7", [f"common w{n} again" for n in range(10)], salt=1)
    write(store, "d8", [f"common w8 w{n}" for n in range(9)])  # but for one, as it was, vectors too if the seed is
    store.delete_document("d9")
    expected = fresh(kind, store, tmp_path)
    no_rebuild(monkeypatch, store)
    read: list[bytes] = []
    reader = "documents_named" if kind == "fields" else "chunks_named"
    named = getattr(store, reader)
    monkeypatch.setattr(store, reader, lambda names: read.extend(names) or named(names))
    assert answers(kind, KINDS[kind](asked)) == expected
    assert len(read) == (3 if kind == "fields" else 10 + 10 + 10)
    read.clear()
    assert answers(kind, KINDS[kind](asked)) == expected
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert read == []


@every_kind
def test_another_process_takes_what_was_saved_and_only_opens_what_is_new(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 40)
    one, other = derived(store), derived(store)
    large = KINDS[kind](other)._state.segments[0]
    KINDS[kind](one)
    write(store, "d7", ["common w5"], salt=1)
    KINDS[kind](one)
    expected = fresh(kind, store, tmp_path)
    monkeypatch.setattr(store, "changes", lambda since: pytest.fail("it follows the changes itself"))
    followed = KINDS[kind](other)
    assert followed._state.segments[0].data is large.data
    assert answers(kind, followed) == expected


@every_kind
def test_an_index_that_is_too_far_behind_or_ahead_is_built_again(
    kind: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 5)
    asked = derived(store)
    KINDS[kind](asked)
    write(store, "d1", ["common w5"], salt=1)
    store._live().write(lambda txn: [txn.delete("changes", key) for key in list(txn.keys("changes"))])
    assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
    store._live().write(
        lambda txn: txn.put("meta", b"generation", (2).to_bytes(8, "big"))
    )  # an older copy was put back
    write(store, "d1", ["common w7"], salt=2)
    assert answers(kind, KINDS[kind](asked)) == fresh(kind, store, tmp_path)
    assert answers(kind, KINDS[kind](derived(store))) == fresh(kind, store, tmp_path)


@every_kind
def test_an_index_that_is_being_saved_is_not_saved_by_another(kind: str, store: Store, tmp_path: Path) -> None:
    """Each would delete the other's files. Who could not save goes on with what it has, and the next one follows."""
    fill(store, 3)
    folder = store.directory.parent / "derived" / kind
    KINDS[kind](derived(store))
    saved = (folder / "manifest.json").read_text()
    write(store, "d1", ["common w5"], salt=1)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    expected = fresh(kind, store, tmp_path)
    asked = derived(store)
    assert answers(kind, KINDS[kind](asked)) == expected
    with pytest.raises(SavedElsewhereError):
        KINDS[kind](asked).save(folder)
    assert (folder / "manifest.json").read_text() == saved
    assert len(list(folder.glob("data-*"))) == 1
    os.close(descriptor)
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert (folder / "manifest.json").read_text() != saved


def test_bm25_counts_every_chunk_without_words_and_ties_are_by_id(store: Store, tmp_path: Path) -> None:
    write(store, "a", ["", "...", "w1"])
    asked = derived(store)
    assert len(asked.bm25()) == 3
    write(store, "b", ["w1", ""])
    assert [hit.chunk_id for hit in asked.bm25().search("w1", 5)] == ["a/2", "b/0"]
    assert answers("bm25", asked.bm25()) == fresh("bm25", store, tmp_path)


@every_kind
def test_files_of_the_format_before_are_replaced(kind: str, store: Store) -> None:
    fill(store, 3)
    expected = answers(kind, KINDS[kind](derived(store)))
    manifest = store.directory.parent / "derived" / kind / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    assert answers(kind, KINDS[kind](derived(store))) == expected
    assert json.loads(manifest.read_text())["format"] == 2


def test_words_of_another_version_of_unicode_are_cut_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 3)
    derived(store).bm25()
    with monkeypatch.context() as patch:
        patch.setattr("unicodedata.unidata_version", "1.1.0")
        with pytest.raises(Exception, match="another version of Unicode"):
            BM25.load(store.directory.parent / "derived" / "bm25")
        assert len(derived(store).bm25()) == 30


def test_gc_leaves_an_index_that_can_be_brought_up_to_date(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 3)
    derived(store).bm25()
    folder = store.directory.parent / "derived"
    monkeypatch.setattr("ragkv.index.derived.SETTLED_SECONDS", -(10**9))
    write(store, "d1", ["common w5"], salt=1)
    assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) == []
    store._live().write(lambda txn: txn.delete("changes", store.generation.to_bytes(8, "big")))
    assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) == [folder / "bm25"]
    manifest = folder / "bm25" / "manifest.json"
    for odd in (-1, 10**400, None, "1", 1.5, True):
        manifest.write_text(json.dumps({"generation": odd, "mark": ""}))
        assert list(stale_derived(folder, lambda since: store.changes(since) is not None)) in ([folder / "bm25"], [])


def test_the_indexes_are_of_one_kind() -> None:
    assert all(issubclass(kind, SegmentedIndex) for kind in (BM25, DenseIndex, SparseIndex))
