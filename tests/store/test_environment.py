"""Documents, chunks and KV appear and vanish together, and a damaged record is never a tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
import torch

from ragkv.attention.kv import ChunkKV
from ragkv.errors import CorruptStoreError, StoreError
from ragkv.store import KVIdentity, Store, Zstd
from ragkv.store.transaction import TABLES
from ragkv.types import Chunk, Document

Write = Callable[..., list[Chunk]]
MakeIdentity = Callable[..., KVIdentity]
KVOf = Callable[[KVIdentity], ChunkKV]
Equal = Callable[[ChunkKV | None, ChunkKV], bool]


def entries(store: Store) -> dict[str, list[tuple[bytes, bytes]]]:
    """All that the tables hold, less the generation, the history and the version."""
    directory = store.directory
    store.close()
    with lmdb.open(str(directory), max_dbs=len(TABLES), map_size=1 << 30) as env:
        tables = {name: env.open_db(name.encode(), create=False) for name in TABLES}
        with env.begin() as txn:
            found = {name: list(txn.cursor(db=table)) for name, table in tables.items()}
    found["meta"] = [(key, value) for key, value in found["meta"] if key not in (b"format", b"generation")]
    return {name: rows for name, rows in found.items() if rows and name != "changes"}


def test_what_is_written_is_read(
    store: Store,
    write: Write,
    identity: MakeIdentity,
    kv_of: KVOf,
    equal: Equal,
    document: Callable[..., Document],
) -> None:
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


def test_what_is_not_there(store: Store, identity: MakeIdentity) -> None:
    assert store.document("x") is None
    assert store.text("x") is None
    assert store.chunk("x") is None
    assert store.get_kv(identity(1)) is None
    assert not store.has_kv(identity(1))
    assert not store.delete_document("x")
    assert store.get_meta("x") is None
    assert list(store.chunks()) == list(store.documents()) == list(store.chunks("x")) == []


def test_ids_and_texts_of_any_kind(store: Store, document: Callable[..., Document]) -> None:
    names = ["x" * 10_000, "x" * 10_001, "é\0\n", "\udcff", "x" * 511, "x" * 510]
    for name in names:
        store.write_document(document(name), f"{name}\ud800", [], recipe="", references={})
    assert {stored.document.document_id for stored in store.documents()} == set(names)
    assert all(store.text(name) == f"{name}\ud800" for name in names)
    with pytest.raises(StoreError, match="not empty"):
        store.write_document(document(""), "", [], recipe="", references={})


def test_is_current_needs_content_and_recipe(store: Store, write: Write) -> None:
    write(store, "a", (1,), content_hash="11")
    assert store.is_current("a", "11", "recipe")
    assert not store.is_current("a", "12", "recipe")
    assert not store.is_current("a", "11", "another")
    assert not store.is_current("b", "11", "recipe")


def test_replacing_leaves_nothing_of_the_old(tmp_path: Path, write: Write) -> None:
    twice, once = Store.create(tmp_path / "twice"), Store.create(tmp_path / "once")
    write(twice, "a", (1, 2), (3,), (4,))
    for store in (twice, once):
        write(store, "a", (3,), (5,), content_hash="22")
    left, right = entries(twice), entries(once)
    assert left.keys() == right.keys()
    for name in left.keys() - {"documents"}:  # which hold the time of the ingest
        assert left[name] == right[name], name


def test_deleting_leaves_nothing(store: Store, write: Write) -> None:
    write(store, "a", (1, 2), (1, 2), (3,))
    write(store, "b", (1, 2))
    assert store.delete_document("a")
    assert store.delete_document("b")
    assert entries(store) == {}


def test_shared_records_stay_as_long_as_they_are_needed(
    store: Store, write: Write, identity: MakeIdentity, kv_of: KVOf, equal: Equal
) -> None:
    write(store, "a", (1, 2), (3,))
    write(store, "b", (1, 2))
    assert store.stats().kv_records == 2
    store.delete_document("a")
    assert equal(store.get_kv(identity(1, 2)), kv_of(identity(1, 2)))
    assert not store.has_kv(identity(3))
    write(store, "b", (4,))
    assert not store.has_kv(identity(1, 2))


def test_a_failing_encoder_leaves_nothing(
    store: Store,
    document: Callable[..., Document],
    chunk: Callable[..., Chunk],
    identity: MakeIdentity,
    kv_of: KVOf,
) -> None:
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
    assert entries(store) == {}


def test_wrong_documents_are_refused_whole(
    store: Store,
    write: Write,
    document: Callable[..., Document],
    chunk: Callable[..., Chunk],
    identity: MakeIdentity,
    kv_of: KVOf,
) -> None:
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


def test_staged_records_wait_for_their_document(
    store: Store,
    document: Callable[..., Document],
    chunk: Callable[..., Chunk],
    identity: MakeIdentity,
    kv_of: KVOf,
) -> None:
    identities = [identity(n) for n in range(3)]
    assert store.stage_kv((of, kv_of(of)) for of in identities) == 3
    assert all(map(store.has_kv, identities))
    assert store.generation == 0
    assert sorted(store.orphans()) == sorted(of.key() for of in identities)
    store.write_document(document("a"), "t", [chunk("a", 0, (0,))], recipe="", references={"a#0": identities[:1]})
    assert set(store.orphans()) == {of.key() for of in identities[1:]}
    assert store.stats().orphans == 2


def test_kv_made_by_a_query_is_kept_for_its_chunk(
    store: Store, write: Write, identity: MakeIdentity, kv_of: KVOf, equal: Equal
) -> None:
    write(store, "a", (1,))
    prefixed = identity(1, prefix_ids=(8, 9))
    assert not store.put_kv(prefixed, kv_of(prefixed), chunk_id="gone")
    assert not store.has_kv(prefixed)
    assert store.put_kv(prefixed, kv_of(prefixed), chunk_id="a#0")
    assert equal(store.get_kv(prefixed), kv_of(prefixed))
    assert list(store.orphans()) == []
    assert store.generation == 1
    store.delete_document("a")
    assert entries(store) == {}


def test_the_generation_counts_changes_of_documents_and_chunks(store: Store, write: Write) -> None:
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


def test_stats_add_up(store: Store, write: Write, identity: MakeIdentity, kv_of: KVOf) -> None:
    write(store, "a", (1, 2), (3,))
    prefixed = identity(1, 2, prefix_ids=(9,))
    store.put_kv(prefixed, kv_of(prefixed), chunk_id="a#0")
    stats = store.stats()
    sizes = {n: kv_of(identity(*range(n))).nbytes for n in (1, 2)}
    assert (stats.documents, stats.chunks, stats.tokens, stats.kv_records) == (1, 2, 3, 3)
    assert stats.kv_bytes_by_encoding == {"standalone": sizes[1] + sizes[2], "prefixed": sizes[2]}
    assert stats.kv_bytes == stats.kv_bytes_raw == sizes[1] + 2 * sizes[2]
    assert 0 < stats.used_bytes <= stats.file_bytes <= stats.map_bytes
    assert (stats.orphans, stats.unreadable, stats.generation, stats.format_version) == (0, 0, 1, 3)


def test_records_of_two_codecs_live_together(
    tmp_path: Path, make_kv: Callable[..., ChunkKV], identity: MakeIdentity, equal: Equal
) -> None:
    one, two = identity(*range(500)), identity(*range(1, 501))
    kv = make_kv(500, head_dim=32)
    with Store.create(tmp_path) as store:
        store.stage_kv([(one, kv)])
    with Store.open(tmp_path, codec=Zstd()) as store:
        store.stage_kv([(two, kv)])
        assert equal(store.get_kv(one), kv)
        assert equal(store.get_kv(two), kv)
        assert store.stats().kv_bytes < 0.9 * store.stats().kv_bytes_raw


def test_loaded_tensors_outlive_the_store(
    tmp_path: Path, make_kv: Callable[..., ChunkKV], identity: MakeIdentity, equal: Equal
) -> None:
    kv = make_kv(300)
    with Store.create(tmp_path) as store:
        store.stage_kv([(identity(*range(300)), kv)])
        loaded = store.get_kv(identity(*range(300)))
    assert equal(loaded, kv)


def test_iteration_goes_on_while_others_write(store: Store, write: Write) -> None:
    for n in range(600):
        write(store, f"d{n:03}", (n,))
    seen = []
    for stored in store.documents():
        seen.append(stored.document.document_id)
        if len(seen) == 100:
            store.delete_document("d599")
            write(store, "e", (1,))
        if len(seen) % 100 == 0:
            assert store._live()._env.readers() == "(no active readers)\n"
    assert seen == [*(f"d{n:03}" for n in range(599)), "e"]
    assert len(list(store.chunks())) == 600


@pytest.mark.parametrize("table", ["kv", "segments"])
def test_damage_is_a_miss_and_is_healed(
    store: Store,
    write: Write,
    identity: MakeIdentity,
    kv_of: KVOf,
    equal: Equal,
    table: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every byte of every value, flipped, cut or gone, through LMDB itself: the right tensors or none."""
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
        assert store.put_kv(of, kv_of(of), chunk_id="a#0")
        assert equal(store.get_kv(of), kv_of(of))


def test_a_record_under_the_wrong_key_is_a_miss(store: Store, write: Write, identity: MakeIdentity) -> None:
    write(store, "a", (1,), (2,))
    one, two = identity(1).key(), identity(2).key()

    def swap(txn: object) -> None:
        with store._live()._env.begin() as look:
            tables = store._live()._tables
            moved = {key: look.get(key, db=tables["kv"]) for key in (one, two)}
        txn.put("kv", one, moved[two])  # type: ignore[attr-defined]

    store._live().write(swap)
    assert store.get_kv(identity(1)) is None
    assert not store.has_kv(identity(1))
    assert store.has_kv(identity(2))


@pytest.mark.parametrize("table", ["documents", "texts", "chunks"])
def test_a_damaged_row_is_an_error_that_says_so(store: Store, write: Write, table: str) -> None:
    write(store, "a", (1,))
    database = store._live()
    with database.read() as txn:
        ((key, value),) = [(key, bytes(value)) for key, value in txn.scan(table)]
    database.write(lambda txn: txn.put(table, key, value[:3] + b"?" + value[4:]))
    read = {"documents": store.document, "texts": store.text, "chunks": lambda name: store.chunk(f"{name}#0")}
    with pytest.raises(CorruptStoreError, match="damaged"):
        read[table]("a")


def test_no_reader_is_left_behind(store: Store, write: Write, identity: MakeIdentity) -> None:
    write(store, "a", (1,))
    store.get_kv(identity(1))
    store.stats()
    next(store.chunks())
    assert store._live()._env.readers() == "(no active readers)\n"


def test_kv_comes_to_the_cpu_in_its_own_dtype(
    store: Store, make_kv: Callable[..., ChunkKV], identity: MakeIdentity, equal: Equal
) -> None:
    for n, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        kv = make_kv(1, dtype=dtype, encoded_at=n)
        store.stage_kv([(identity(n), kv)])
        assert equal(store.get_kv(identity(n)), kv)


def test_kv_of_the_index_itself_is_no_orphan_and_outlives_documents(
    store: Store, write: Write, identity: MakeIdentity, kv_of: KVOf, equal: Equal
) -> None:
    write(store, "a", (1, 2))
    prefix = identity(7, 8, 9)
    store.keep_kv(prefix, kv_of(prefix))
    assert list(store.orphans()) == []
    store.delete_document("a")
    assert equal(store.get_kv(prefix), kv_of(prefix))
