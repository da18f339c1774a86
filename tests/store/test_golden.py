"""A store that was written by the first version of each format opens, with everything in it, for ever."""

from __future__ import annotations

import lzma
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from storecheck import problems

from ragkv.store import Store
from ragkv.store.transaction import TABLES

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = runpy.run_path(str(FIXTURES / "make_store.py"))
STORES = sorted(FIXTURES.glob("store-v*"))
Equal = Callable[..., bool]


@pytest.fixture(params=STORES, ids=lambda path: path.name)
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    with lzma.open(request.param / "data.mdb.xz") as packed, (tmp_path / "store" / "data.mdb").open("wb") as data:
        shutil.copyfileobj(packed, data)
    return tmp_path


def check(store: Store, equal: Equal) -> None:
    """All of the documents' content, and KV of every kind."""
    contents = GOLDEN["CONTENTS"]
    stored = list(store.documents())
    assert [one.document.document_id for one in stored] == sorted(contents)
    for one in stored:
        document, text, chunks = contents[one.document.document_id]
        assert (one.document, one.recipe, one.ingested_at) == (document, GOLDEN["RECIPE"], GOLDEN["INGESTED_AT"])
        assert (one.chunks, one.tokens) == (len(chunks), sum(len(chunk.token_ids) for chunk in chunks))
        assert store.document(document.document_id) == one
        assert store.is_current(document.document_id, document.content_hash, GOLDEN["RECIPE"])
        assert store.text(document.document_id) == text
        assert list(store.chunks(document.document_id)) == chunks
        assert store.chunk_many(chunk.chunk_id for chunk in chunks) == {chunk.chunk_id: chunk for chunk in chunks}
    identities = [GOLDEN[name] for name in ("PREFIXED", "PREFIX", "ORPHAN")]
    identities += {GOLDEN["identity"](*chunk.token_ids) for _, _, chunks in contents.values() for chunk in chunks}
    for identity in identities:
        assert store.has_kv(identity)
        assert equal(store.get_kv(identity), GOLDEN["kv_of"](identity))
    for name in ("gone", "gone#0"):
        assert store.document(name) is None
        assert store.chunk(name) is None
    assert store.get_kv(GOLDEN["identity"](8, 8)) is None
    assert set(store.orphans()) == {GOLDEN["ORPHAN"].key()}
    assert {name: store.get_meta(name) for name in GOLDEN["FACTS"]} == GOLDEN["FACTS"]
    stats = store.stats()
    assert (stats.documents, stats.kv_records) == (len(contents), len(identities))
    assert stats.chunks == sum(len(chunks) for _, _, chunks in contents.values())
    assert (stats.orphans, stats.unreadable) == (1, 0)
    vectors = dict(store.vectors("dense"))
    assert store.vector_many("sparse", vectors) == {
        chunk.chunk_id: GOLDEN["vectors_of"](chunk).sparse
        for _, _, chunks in contents.values()
        for chunk in chunks
        if chunk.chunk_id in vectors
    }


def test_the_fixtures_are_there() -> None:
    assert [path.name for path in STORES] == ["store-v1", "store-v2"]


def test_reading(index: Path, equal: Equal) -> None:
    data = (index / "store" / "data.mdb").read_bytes()
    with Store.open(index, readonly=True) as store:
        check(store, equal)
        assert store.generation == GOLDEN["GENERATION"]
        assert len(dict(store.vectors("dense"))) == (0 if store.stats().format_version == 1 else 75)
    assert (index / "store" / "data.mdb").read_bytes() == data


def test_writing(index: Path, equal: Equal, write: Callable[..., object]) -> None:
    for _ in range(2):  # the second time as today's code left it
        with Store.open(index) as store:
            check(store, equal)
            assert problems(store) == []
            write(store, "more", (76,), (77,))
            assert store.delete_document("more")
            assert store._live().check_pages().unaccounted == 0
    with Store.open(index, readonly=True) as store:
        check(store, equal)
        assert store.generation >= GOLDEN["GENERATION"] + 4


def test_it_holds_every_kind_of_page(index: Path) -> None:
    """Otherwise the fixture would say little."""
    with Store.open(index, readonly=True) as store, store._live().read() as txn:
        assert txn.count("references") > len(txn.values("references", GOLDEN["identity"](5, 6).key())) == 70
        stats = {name: txn._txn.stat(store._live()._tables[name]) for name in TABLES if txn.count(name)}
        assert sum(stat["overflow_pages"] for stat in stats.values()) > 3
        assert max(stat["depth"] for stat in stats.values()) == 2
