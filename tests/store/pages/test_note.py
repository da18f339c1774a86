"""A process that writes checks all pages, unless the last writer did and nothing has touched the file since."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.errors import CorruptStoreError
from ragkv.store import Store
from ragkv.store.pages.file import read_meta
from ragkv.store.pages.note import NOTE_FILE, Note
from ragkv.store.pages.tree import Tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., object]) -> Path:
    path = tmp_path_factory.mktemp("noted")
    with Store.create(path, map_size=8 << 20) as store:
        for n in range(8):
            write(store, f"{n}", *[(n, m) for m in range(60)])
        store.delete_document("3")
    return path


@pytest.fixture
def index(made: Path, tmp_path: Path) -> Path:
    """A copy that a process has written to: a copied file has a time of its own."""
    shutil.copytree(made / "store", tmp_path / "store")
    with Store.open(tmp_path) as store:
        assert not store.writes_cheaply or store._live()._guard is not None
        store.put_meta("model", "one")
    return tmp_path


def checked(path: Path, change: Callable[[Store], object]) -> tuple[int, bool]:
    """How many pages a process checks that writes, and whether it has checked all."""
    with Store.open(path) as store:
        guard = store._live()._guard
        assert guard is not None
        change(store)
        return guard.checked, store._live()._guard is None


def test_the_next_process_checks_the_pages_that_it_changes(index: Path, write: Callable[..., object]) -> None:
    with Store.open(index, readonly=True) as store:
        pages = store._live().check_pages().live
    few, all_of_them = checked(index, lambda store: store.put_meta("model", "two"))
    assert (0 < few < pages // 4, all_of_them) == (True, False)
    assert not checked(index, lambda store: write(store, "5", (5, 1), (5, 99)))[1]
    with Store.open(index) as store:
        assert store.writes_cheaply
        assert store._live()._guard is not None
        store._live().check_pages()
        assert store.get_meta("model") == "two"
        assert [chunk.token_ids for chunk in store.chunks("5")] == [(5, 1), (5, 99)]


def test_who_writes_much_checks_all(index: Path) -> None:
    def much(store: Store) -> None:
        for n in range(300):
            store.put_meta(f"model-{n}", "x" * 90)
            if store._live()._guard is None:
                return

    assert checked(index, much)[1]


@pytest.mark.parametrize("what", ["touched", "copied", "another state", "gone", "cut", "not ours", "a link"])
def test_a_note_that_does_not_hold(index: Path, what: str, tmp_path: Path) -> None:
    data, note = index / "store" / "data.mdb", index / "store" / NOTE_FILE
    told = note.read_bytes()
    if what == "touched":
        os.utime(data)
    elif what == "copied":
        shutil.copy2(data, tmp_path / "copy")
        (tmp_path / "copy").replace(data)
    elif what == "another state":
        checked(index, lambda store: store.put_meta("model", "two"))
        note.write_bytes(told)
    elif what == "a link":
        note.replace(tmp_path / "elsewhere")
        note.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(Exception, match="cannot be used"):
            Store.open(index)
        return
    else:
        note.write_bytes({"gone": b"", "cut": told[:-1], "not ours": bytes(1 << 20)}[what])
    assert checked(index, lambda store: store.put_meta("model", "three"))[1]
    assert not checked(index, lambda store: store.put_meta("model", "four"))[1]


def is_wrong_list(data: Path, raw: bytes, at: int, told: Note) -> bool:
    """Flip a bit: whether the list of free pages does not contradict itself then, but names pages that are in use."""
    changed = bytearray(raw)
    changed[at] ^= 1
    data.write_bytes(changed)
    found = Note.of(data, told.transaction)
    if found is None or found.free == told.free:
        return False
    with Store.open(data.parents[1], readonly=True) as store:
        try:
            store._live().check_pages()
        except CorruptStoreError:
            return True
    return False


def test_a_list_of_free_pages_that_a_disk_has_changed_is_noticed(index: Path) -> None:
    """The file's times are as they were noted, and the list is in order, but names a page that is in use."""
    data = index / "store" / "data.mdb"
    told = Note.read(index / "store")
    assert told is not None
    meta = read_meta(os.open(data, os.O_RDONLY), told.transaction)
    assert meta is not None
    start = Tree.parse(meta.free).root * meta.page_size
    raw = data.read_bytes()
    assert any(is_wrong_list(data, raw, at, told) for at in range(start, start + meta.page_size, 8))
    now = data.stat()
    noted = Note(now.st_dev, now.st_ino, now.st_size, now.st_ctime_ns, now.st_mtime_ns, told.transaction, told.free)
    noted.write(index / "store")
    with Store.open(index) as store:
        with pytest.raises(CorruptStoreError):
            store.put_meta("model", "two")
        assert store.get_meta("model") == "one"
