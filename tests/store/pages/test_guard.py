"""Pages are checked when they are needed: no more of them in a larger store, none that LMDB gets to unchecked."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.errors import CorruptStoreError
from ragkv.store import Store
from ragkv.store.pages import guard

PAGE = 4096


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, write: Callable[..., object]) -> Path:
    """An index with several levels of pages in most tables, closed."""
    path = tmp_path_factory.mktemp("large")
    with Store.create(path, map_size=8 << 20) as store:
        for n in range(8):
            write(store, f"{n}", *[(n, m) for m in range(100)])
        write(store, "shared", *[(9, 9)] * 100)
    return path


def open_pages(path: Path) -> int:
    """Pages that are checked before the store is of use, and by a look at one chunk."""
    with Store.open(path, readonly=True) as store:
        assert store.chunk("0#1") is not None
        found = store._live()._guard
        assert found is not None
        return found.checked


def test_a_larger_store_has_no_more_pages_checked(tmp_path: Path, large: Path, write: Callable[..., object]) -> None:
    with Store.create(tmp_path) as store:
        write(store, "0", (0, 0), (0, 1))
    assert open_pages(large) <= open_pages(tmp_path) + 2  # a level of branch pages in each of two tables


def test_every_scan_is_complete_and_ahead_of_itself(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a guarded scan yields is what an unguarded one does, and no leaf is entered before it was checked."""
    with Store.open(large, readonly=True) as store, store._live().read() as txn:
        guarded = {name: list(map(bytes, txn.keys(name))) for name in txn.tables}
        pairs = {name: [(key, bytes(value)) for key, value in txn.scan(name)] for name in ("chunks", "segments")}
        owners = {key: txn.values("references", key) for key in guarded["references"]}
        after = {key: next(txn.keys("places", after=key), None) for key in guarded["places"]}
    with Store.open(large, readonly=True) as store:
        store._live().check_pages()
        assert store._live()._guard is None
        with store._live().read() as txn:
            assert guarded == {name: list(map(bytes, txn.keys(name))) for name in txn.tables}
            assert pairs == {name: [(key, bytes(value)) for key, value in txn.scan(name)] for name in pairs}
            assert owners == {key: txn.values("references", key) for key in owners}
            assert after == {key: next(txn.keys("places", after=key), None) for key in after}
    assert max(map(len, owners.values())) == 100  # a tree of their own
    assert len(guarded["places"]) == 900


def test_a_page_that_was_not_needed_yet_is_refused_when_it_is(large: Path, tmp_path: Path) -> None:
    """One leaf or branch page of the tables at a time: all reads give the right answer or an error."""
    raw = (large / "store" / "data.mdb").read_bytes()
    with Store.open(large, readonly=True) as store:
        names = [chunk.chunk_id for chunk in store.chunks()]
        chunks = store.chunk_many(names)
    pages = [at for at in range(2 * PAGE, len(raw), PAGE) if raw[at : at + 8] == struct.pack("=q", at // PAGE)]
    pages = [at for at in pages if raw[at + 10] in (1, 2, 0x22)]
    chosen = random.Random(1).sample(pages, 16)
    refused = 0
    (tmp_path / "store").mkdir()
    for at in chosen:
        changed = bytearray(raw)
        changed[at + 14] ^= 0xFF  # where its nodes begin
        (tmp_path / "store" / "data.mdb").write_bytes(changed)
        try:
            with Store.open(tmp_path, readonly=True) as store:
                assert store.chunk_many(names[:3]) == {name: chunks[name] for name in names[:3]}
                assert {chunk.chunk_id: chunk for chunk in store.chunks()} == chunks
                assert store.models() == {"c0ffee"}
        except CorruptStoreError:
            refused += 1
    assert 0 < refused < len(chosen)


def test_nothing_is_written_to_a_store_with_a_damaged_page(large: Path, tmp_path: Path) -> None:
    """Even if the page is nowhere near: LMDB changes pages beside those that are asked for."""
    data = tmp_path / "store" / "data.mdb"
    data.parent.mkdir()
    data.write_bytes((large / "store" / "data.mdb").read_bytes())
    with Store.open(tmp_path, readonly=True) as store, store._live().read() as txn:
        last = list(txn.keys("places"))[-1]
    raw = bytearray(data.read_bytes())
    at = raw.rindex(last) // PAGE * PAGE
    raw[at + 14] ^= 0xFF
    data.write_bytes(raw)
    with Store.open(tmp_path) as store:
        assert store.document("0") is not None
        for change in (lambda: store.put_meta("a", 1), lambda: store.delete_document("0")):
            with pytest.raises(CorruptStoreError, match="restore a backup"):
                change()
    assert data.read_bytes()[: len(raw)] == raw


def test_a_page_is_known_again_by_its_bytes(
    tmp_path: Path, write: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later snapshot has only the pages checked that are new to it, however few pages may be remembered."""
    with Store.create(tmp_path, map_size=8 << 20) as store:
        for n in range(4):
            write(store, f"{n}", *[(n, m) for m in range(60)])
        live = store._live()
        live._guard = guard.PageGuard(store.directory / "data.mdb", live_tables(), width=32)
        reads = live._guard
        assert len(list(store.chunks())) == 240
        checked = reads.checked
        live._guard = None  # as if another process wrote
        store.put_meta("a", 1)
        live._guard = reads
        assert len(list(store.chunks())) == 240
        assert reads.checked <= checked + 1
        monkeypatch.setattr(guard, "_KNOWN_PAGES", 2)
        assert len(list(store.chunks())) == 240
        assert store.chunk("3#59") is not None


def live_tables() -> dict[str, bool]:
    from ragkv.store.transaction import TABLES

    return dict(TABLES)
