"""Documents, chunks and KV appear and disappear together, and a damaged record never becomes a tensor."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from expected import Expected, observe, operation, perform
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from storecheck import problems
from storekit import chunk, document, equal, identity, kv_of, put_kv, write

from ragkv.attention.kv import ChunkKV
from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import KVIdentity, Raw, Store, Zstd


def test_what_is_written_is_read(store):
    chunks = write(store, "b", (1, 2), (3,), (1, 2))
    other = write(store, "a", ())
    stored = store.document("b")
    assert stored is not None
    assert (stored.document, stored.recipe, stored.chunks, stored.tokens) == (document("b"), "recipe", 3, 5)
    assert [entry.document.document_id for entry in store.documents()] == ["a", "b"]
    assert store.text("b") == "the text of b"
    assert list(store.chunks("b")) == chunks
    assert sorted(store.chunks(), key=lambda c: c.chunk_id) == other + chunks
    assert store.chunk("b#1") == chunks[1]
    assert store.chunk_many(["b#2", "gone", "b#0"]) == {"b#2": chunks[2], "b#0": chunks[0]}
    for ids in ((1, 2), (3,), ()):
        assert equal(store.get_kv(identity(*ids)), kv_of(identity(*ids)))


def test_what_is_not_there_and_ids_of_any_kind(store):
    assert store.document("x") is None
    assert store.text("x") is None
    assert store.chunk("x") is None
    assert store.get_kv(identity(1)) is None
    assert not store.has_kv(identity(1))
    assert not store.delete_document("x")
    assert store.document("") is None
    assert not store.delete_document("")
    assert store.delete_documents(["x", ""]) == 0
    assert list(store.document_stats([""])) == []
    assert store.get_meta("x") is None
    assert list(store.chunks()) == list(store.documents()) == list(store.chunks("x")) == []
    names = ["x" * 10_000, "x" * 10_001, "é\0\n", "\udcff", "x" * 511, "x" * 510]
    for name in names:
        store.write_document(document(name), f"{name}\ud800", [], recipe="", references={})
    assert {stored.document.document_id for stored in store.documents()} == set(names)
    assert all(store.text(name) == f"{name}\ud800" for name in names)
    with pytest.raises(StoreError, match="not empty"):
        store.write_document(document(""), "", [], recipe="", references={})


def test_is_current_needs_content_and_recipe(store):
    write(store, "a", (1,), content_hash="11")
    assert store.is_current("a", "11", "recipe")
    assert not store.is_current("a", "12", "recipe")
    assert not store.is_current("a", "11", "another")
    assert not store.is_current("b", "11", "recipe")


def test_a_failing_encoder_leaves_nothing(store):
    def records() -> Iterator[tuple[KVIdentity, ChunkKV]]:
        yield identity(1), kv_of(identity(1))
        raise RuntimeError("the model failed")

    with pytest.raises(RuntimeError, match="the model failed"):
        store.write_document(
            document("a"),
            "text",
            [chunk("a", 0, (1,))],
            recipe="",
            records=records(),
            references={"a#0": [identity(1)]},
        )
    assert store.generation == 0
    assert problems(store) == list(store.maintenance.orphans()) == list(store.documents()) == []


def test_wrong_documents_are_refused_whole(store):
    write(store, "a", (1,))
    here, there = chunk("b", 0, (2,)), chunk("a", 0, (2,))
    record = (identity(2), kv_of(identity(2)))
    cases = [
        ([here], [], {"b#0": [identity(2)]}, "neither stored nor given"),
        ([here], [], {"b#1": [identity(1)]}, "does not have"),
        ([here], [record], {"b#0": [identity(1)]}, "none of its chunks"),
        ([there], [], {}, "not all its own"),
        ([here, here], [], {}, "each with its own id"),
        ([replace(here, chunk_id="a#0")], [], {}, "another document"),
    ]
    for chunks, records, references, complaint in cases:
        with pytest.raises(StoreError, match=complaint):
            store.write_document(document("b"), "t", chunks, recipe="", records=records, references=references)
    with pytest.raises(ValueError, match="2 tokens"):
        store.stage_kv([(identity(1), kv_of(identity(1, 2)))])
    assert store.generation == 1
    assert [stored.document.document_id for stored in store.documents()] == ["a"]
    assert store.stats().kv_records == 1


def test_kv_made_by_a_query_is_kept_for_its_chunk(store):
    write(store, "a", (1,))
    prefixed = identity(1, prefix_ids=(8, 9))
    assert not put_kv(store, prefixed, kv_of(prefixed), "gone")
    assert not store.has_kv(prefixed)
    assert put_kv(store, prefixed, kv_of(prefixed), "a#0")
    assert equal(store.get_kv(prefixed), kv_of(prefixed))
    assert list(store.maintenance.orphans()) == []
    assert store.generation == 1


def test_the_generation_counts_changes_of_documents_and_chunks(store):
    store.stage_kv([(identity(2), kv_of(identity(2)))])
    assert store.generation == 0
    write(store, "a", (1,))
    write(store, "a", (1,), content_hash="11")
    assert store.generation == 1
    write(store, "a", (1,), (2,))
    write(store, "a")
    assert store.generation == 3
    store.delete_document("a")
    store.put_meta("model", {"fingerprint": "ab"})
    assert store.generation == 4
    assert store.get_meta("model") == {"fingerprint": "ab"}


def test_stats_add_up(store):
    write(store, "a", (1, 2), (3,))
    prefixed = identity(1, 2, prefix_ids=(9,))
    put_kv(store, prefixed, kv_of(prefixed), "a#0")
    stats = store.stats()
    sizes = {n: kv_of(identity(*range(n))).nbytes for n in (1, 2)}
    assert (stats.documents, stats.chunks, stats.tokens, stats.kv_records) == (1, 2, 3, 3)
    assert stats.kv_bytes_by_encoding == {"standalone": sizes[1] + sizes[2], "prefixed": sizes[2]}
    assert stats.kv_bytes == stats.kv_bytes_raw == sizes[1] + 2 * sizes[2]
    assert 0 < stats.used_bytes <= stats.file_bytes <= stats.map_bytes
    assert (stats.orphans, stats.unreadable, stats.generation, stats.format_version) == (0, 0, 1, 4)


def test_iteration_goes_on_while_others_write(store, monkeypatch):
    monkeypatch.setattr("ragkv.store.environment._WALK_BYTES", 4000)  # about twenty rows
    for n in range(100):
        write(store, f"d{n:03}", (n,))
    seen = []
    for stored in store.documents():
        seen.append(stored.document.document_id)
        if len(seen) == 20:
            store.delete_document("d099")
            write(store, "e", (1,))
        if len(seen) % 10 == 0:
            assert store._live()._map.env.readers() == "(no active readers)\n"
    assert seen == [*(f"d{n:03}" for n in range(99)), "e"]
    assert len(list(store.chunks())) == 100


@pytest.mark.parametrize("table", ["kv", "segments"])
def test_damage_is_a_miss_and_is_healed(store, table, caplog):
    """Every byte of every value, flipped, cut or removed through LMDB itself: the right tensors or none."""
    chunks = write(store, "a", (1, 2))
    of = identity(*chunks[0].token_ids)
    database = store._live()

    def put(key: bytes, value: bytes | None) -> None:
        database.write(lambda txn: txn.delete(table, key) if value is None else txn.put(table, key, value))

    with database.read() as txn:
        rows = [(key, bytes(value)) for key, value in txn.scan(table)]
    caplog.set_level(logging.WARNING)
    for key, value in rows:
        damaged: list[bytes | None] = [None, b"", value[:-1], value + b"\0", bytes(len(value))]
        damaged += [
            value[:at] + bytes([value[at] ^ 1 << at % 8]) + value[at + 1 :]
            for at in range(0, len(value), max(1, len(value) // 50))
        ]
        for wrong in damaged:
            put(key, wrong)
            caplog.clear()
            assert store.get_kv(of) is None
            assert wrong is None or "counts as missing" in caplog.text
        assert put_kv(store, of, kv_of(of), "a#0")
        assert equal(store.get_kv(of), kv_of(of))


def test_a_record_under_the_wrong_key_is_a_miss(store):
    write(store, "a", (1,), (2,))
    first, two = identity(1).key(), identity(2).key()

    def swap(txn: object) -> None:
        with store._live()._map.env.begin() as look:
            tables = store._live()._map.tables
            moved = {key: look.get(key, db=tables["kv"]) for key in (first, two)}
        txn.put("kv", first, moved[two])  # type: ignore[attr-defined]

    store._live().write(swap)
    assert store.get_kv(identity(1)) is None
    assert not store.has_kv(identity(1))
    assert store.has_kv(identity(2))


@pytest.mark.parametrize("table", ["documents", "texts", "chunks"])
def test_a_damaged_row_is_an_error_that_says_so(store, table):
    write(store, "a", (1,))
    database = store._live()
    with database.read() as txn:
        ((key, value),) = [(key, bytes(value)) for key, value in txn.scan(table)]
    database.write(lambda txn: txn.put(table, key, value[:3] + b"?" + value[4:]))
    read = {"documents": store.document, "texts": store.text, "chunks": lambda name: store.chunk(f"{name}#0")}
    with pytest.raises(CorruptStoreError, match="damaged"):
        read[table]("a")


def test_kv_of_the_index_itself_is_no_orphan_and_outlives_documents(store):
    write(store, "a", (1, 2))
    prefix = identity(7, 8, 9)
    store.keep_kv(prefix, kv_of(prefix))
    assert list(store.maintenance.orphans()) == []
    store.delete_document("a")
    assert equal(store.get_kv(prefix), kv_of(prefix))


# ---- state


@settings(max_examples=100 if NIGHTLY else 20)
@given(numbers=st.lists(st.integers(0, 1 << 20), min_size=6, max_size=10))
def test_any_operations_leave_what_dicts_would_hold(numbers, tmp_path_factory):
    """Also when the store is reopened in between, with another codec, and while its map grows."""
    path, state = tmp_path_factory.mktemp("operations"), Expected()
    store = Store.create(path, map_size=256 << 10)
    try:
        for number in numbers:
            if number % 4 == 0:
                store.close()
                store = Store.open(path, codec=Zstd() if number % 8 else Raw())
            todo = operation(number)
            state, answer = state.after(todo)
            assert perform(store, todo) == answer
            assert observe(store) == state.view()
            assert problems(store) == []
            needed = state.index.union(*state.needs.values())
            verification, stats = store.maintenance.verify(), store.stats()
            assert verification.findings == ()
            assert set(store.maintenance.orphans()) == {of.key() for of in state.records.keys() - needed}
            assert verification.orphans.records == stats.orphans == len(state.records.keys() - needed)
            assert (stats.kv_records, stats.chunks) == (len(state.records), len(state.needs))
    finally:
        store.close()
