"""A repair finds all damage by name, and restores it from intact data or drops its document, and nothing else."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from storekit import put_kv

from ragkv.errors import StoreError
from ragkv.store import Store
from ragkv.store.maintenance.repair import find_damage, repair_document
from ragkv.store.tables import (
    INDEX_OWNER,
    Transaction,
    digest,
    document_key,
    pack_chunk,
    pack_document,
    parse_chunk,
    parse_document,
)

Change = Callable[[Transaction, Any], object]


def flip(txn: Transaction, table: str, key: bytes, at: int = 0) -> None:
    """Flip one bit of a value, as a bad disk does."""
    value = bytearray(bytes(txn.get(table, key)))
    value[at] ^= 4
    txn.put(table, key, bytes(value))


def move(txn: Transaction, table: str, old: bytes, new: bytes) -> None:
    value = bytes(txn.get(table, old))
    txn.delete(table, old)
    txn.put(table, new, value)


def first_key(library: Any, name: str, ordinal: int, encoding: int = 0) -> bytes:
    return library.identities(chunk(library, name, ordinal))[encoding].key()


def chunk(library: Any, name: str, ordinal: int) -> Any:
    return list(library.store.chunks(name))[ordinal]


def name_of(library: Any, name: str, ordinal: int) -> bytes:
    return digest(chunk(library, name, ordinal).chunk_id)


def case(name: str, kind: str, table: str, damage: Callable[[Any], Change]) -> Any:
    return pytest.param(kind, table, damage, id=name)


def rows_of(table: str, *keys: Callable[[Any], bytes]) -> Callable[[Any], Change]:
    """Flip a bit in each of these rows."""

    def damage(library: Any) -> Change:
        found = [key(library) for key in keys]
        return lambda txn, _: [flip(txn, table, key) for key in found]

    return damage


def place(name: str, ordinal: int) -> Callable[[Any], bytes]:
    return lambda library: library.place(name, ordinal)


def drop(table: str, key: Callable[[Any], bytes], value: Callable[[Any], bytes] = lambda _: b"") -> Any:
    def damage(library: Any) -> Change:
        row, only = key(library), value(library)
        return lambda txn, _: txn.delete(table, row, only)

    return damage


def add(table: str, key: Callable[[Any], bytes], value: Callable[[Any], bytes]) -> Any:
    def damage(library: Any) -> Change:
        row, content = key(library), value(library)
        return lambda txn, _: txn.put(table, row, content)

    return damage


def both(*damages: Callable[[Any], Change]) -> Callable[[Any], Change]:
    def damage(library: Any) -> Change:
        changes = [one(library) for one in damages]
        return lambda txn, _: [change(txn, library) for change in changes]

    return damage


def wrong_count(library: Any) -> Change:
    def change(txn: Transaction, _: Any) -> None:
        stored = parse_document(txn.get("documents", b"a"))
        txn.put("documents", b"a", pack_document(dataclasses.replace(stored, tokens=stored.tokens + 1)))

    return change


def swapped(library: Any) -> Change:
    def change(txn: Transaction, _: Any) -> None:
        txn.put("chunks", library.place("a", 1), bytes(txn.get("chunks", library.place("b", 1))))

    return change


def extra_row(library: Any) -> Change:
    return lambda txn, _: txn.put("chunks", library.place("a", 9), bytes(txn.get("chunks", library.place("a", 0))))


def key(name: str, ordinal: int, encoding: int = 0) -> Callable[[Any], bytes]:
    return lambda library: first_key(library, name, ordinal, encoding)


def owner(name: str, ordinal: int) -> Callable[[Any], bytes]:
    return lambda library: name_of(library, name, ordinal)


def segment(name: str, ordinal: int, index: int) -> Callable[[Any], bytes]:
    return lambda library: first_key(library, name, ordinal) + index.to_bytes(4, "big")


def vector(kind: bytes, name: str, ordinal: int, part: int = 0) -> Callable[[Any], bytes]:
    return lambda library: kind + library.place(name, ordinal) + part.to_bytes(4, "big")


def elsewhere(_: Any) -> bytes:
    return digest("elsewhere")


RESTORED = [
    case("document under another key", "mismatch", "documents", lambda _: lambda txn, _: move(
        txn, "documents", b"a", b"z")),
    case("document counts wrongly", "mismatch", "documents", wrong_count),
    case("text of nothing", "stray", "texts", add("texts", elsewhere, lambda _: b"x")),
    case("one chunk too many", "mismatch", "documents", extra_row),
    case("chunk of nothing", "stray", "chunks", add("chunks", lambda _: elsewhere(_) + bytes(4), lambda _: b"x")),
    case("place missing", "missing", "places", drop("places", owner("a", 2))),
    case("place leads elsewhere", "mismatch", "places", add("places", owner("a", 2), place("b", 0))),
    case("place of nothing", "stray", "places", add("places", elsewhere, place("a", 2))),
    case("manifest damaged", "damaged", "kv", rows_of("kv", key("a", 1))),
    case("manifest missing", "missing", "kv", drop("kv", key("a", 1, 1))),
    case("manifest of another", "damaged", "kv", lambda lib: lambda txn, _: txn.put(
        "kv", first_key(lib, "a", 1), bytes(txn.get("kv", first_key(lib, "a", 2))))),
    case("shared record damaged", "damaged", "kv", rows_of("kv", key("a", 0))),
    case("segment damaged", "damaged", "kv", rows_of("segments", segment("a", 1, 1))),
    case("segment missing", "damaged", "kv", drop("segments", segment("a", 1, 1))),
    case("record and its references lost", "missing", "kv", both(
        drop("kv", key("a", 1)), drop("references", key("a", 1)))),
    case("reference missing", "mismatch", "needs", drop("references", key("a", 0), owner("b", 0))),
    case("reference to nothing", "mismatch", "references", add("references", key("a", 0), elsewhere)),
    case("reference of the index missing", "mismatch", "needs", drop(
        "references", lambda library: library.prefix.key(), lambda _: INDEX_OWNER)),
    case("need missing", "mismatch", "references", drop("needs", owner("a", 0), key("a", 0))),
    case("need of nothing", "mismatch", "needs", add("needs", elsewhere, key("a", 0))),
    case("need of other tokens", "mismatch", "needs", both(
        add("needs", owner("a", 0), key("a", 1)), add("references", key("a", 1), owner("a", 0)))),
    case("dense vector damaged", "damaged", "vectors", rows_of("vectors", vector(b"d", "a", 1))),
    case("sparse vector damaged", "damaged", "vectors", rows_of("vectors", vector(b"s", "a", 1))),
    case("part of a vector missing", "damaged", "vectors", lambda lib: lambda txn, _: move(
        txn, "vectors", vector(b"c", "a", 1)(lib), vector(b"c", "a", 1, 1)(lib))),
    case("vector of nothing", "stray", "vectors", add("vectors", vector(b"d", "z", 0), lambda _: b"x")),
    case("vector under a strange key", "stray", "vectors", add("vectors", lambda _: b"x123", lambda _: b"x")),
    case("everything at once", "damaged", "kv", both(
        rows_of("kv", key("a", 1), key("b", 1)), drop("references", key("a", 2)), drop("needs", owner("a", 3)),
        rows_of("segments", segment("c", 0, 0)), add("vectors", vector(b"d", "z", 0), lambda _: b"x"))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "table", "damage"), RESTORED)
def test_damage_is_named_and_every_row_comes_back(library, kind, table, damage):
    before = library.rows()
    change = damage(library)
    library.edit(lambda txn: change(txn, library))
    damaged = library.rows()
    result = library.store.maintenance.verify()
    assert (kind, table) in {(finding.kind, finding.table) for finding in result.findings}
    quick = library.store.maintenance.verify(quick=True)
    assert set(quick.findings) <= set(result.findings)
    would = library.store.maintenance.repair(library, dry_run=True)
    assert would.problems == result.findings
    assert not would.dropped
    assert library.rows() == damaged
    report = library.store.maintenance.repair(library)
    assert report.ok
    assert report.problems == result.findings
    assert library.rows() == before
    assert library.store.maintenance.verify().ok


LOST = [
    case("row", "damaged", "documents", rows_of("documents", lambda _: b"a")),
    case("text damaged", "damaged", "texts", rows_of("texts", lambda _: digest("a"))),
    case("text missing", "missing", "texts", drop("texts", lambda _: digest("a"))),
    case("first chunk damaged", "damaged", "chunks", rows_of("chunks", place("a", 0))),
    case("all chunks damaged", "damaged", "chunks", rows_of("chunks", *(place("a", n) for n in range(4)))),
    case("chunk missing", "missing", "chunks", drop("chunks", place("a", 1))),
    case("chunk of another document", "damaged", "chunks", swapped),
    case("chunk that nothing names", "damaged", "chunks", both(
        rows_of("chunks", place("a", 1)), drop("places", owner("a", 1)), drop("needs", owner("a", 1)))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "table", "damage"), LOST)
def test_what_cannot_be_whole_goes_alone_and_its_kv_waits(library, kind, table, damage):
    other = {name: list(library.store.chunks(name)) for name in ("b", "c")}
    before = library.rows()
    kv = [library.store.get_kv(of) for n in range(4) for of in library.identities(chunk(library, "a", n))]
    change = damage(library)
    library.edit(lambda txn: change(txn, library))
    assert (kind, table) in {(finding.kind, finding.table) for finding in library.store.maintenance.verify().findings}
    report = library.store.maintenance.repair(library)
    assert list(report.dropped) == ["a"]
    assert not report.ok
    assert not report.left
    assert library.store.maintenance.verify().ok
    assert {name: list(library.store.chunks(name)) for name in ("b", "c")} == other
    assert library.store.document("a") is None
    assert library.store.text("a") is None
    assert len(list(library.store.maintenance.orphans())) == 6  # of eight; b needs two
    assert library.encoded == []
    library.write("a", "one two three\nfour five\nsix seven eight\nnine")
    again = library.rows()
    again["documents"], before["documents"] = [], []  # they contain the time of the ingest
    assert again == before
    assert len(kv) == 8


def test_without_an_embedder_a_damaged_vector_costs_the_document(library):
    library.embedder = False
    library.edit(lambda txn: flip(txn, "vectors", vector(b"d", "b", 1)(library)))
    report = library.store.maintenance.repair(library)
    assert list(report.dropped) == ["b"]
    assert "no embedder" in report.dropped["b"]
    assert library.store.maintenance.verify().ok


def test_bad_kv_that_cannot_be_made_again_is_dropped(library):
    """Of another model or prompt (no longer used), of the index itself, or without an owner."""
    stale = library.identities(chunk(library, "a", 0))[0]
    stale = dataclasses.replace(stale, model="another")
    put_kv(library.store, stale, library.encode([stale])[0], chunk(library, "a", 0).chunk_id)
    staged = dataclasses.replace(stale, model="a third")
    library.store.stage_kv([(staged, library.encode([staged])[0])])
    library.encoded.clear()
    keys = [stale.key(), staged.key(), library.prefix.key()]
    library.edit(lambda txn: [flip(txn, "kv", key) for key in keys])
    report = library.store.maintenance.repair(library)
    assert report.ok
    assert (report.dropped_records, report.encoded, library.encoded) == (3, 0, [])
    assert not any(map(library.store.has_kv, (stale, staged, library.prefix)))


def test_kv_may_be_left_to_the_questions(library):
    of = library.identities(chunk(library, "a", 1))[0]
    library.edit(lambda txn: flip(txn, "segments", segment("a", 1, 0)(library)))
    report = library.store.maintenance.repair(library, encode=False)
    assert report.ok
    assert (report.dropped_records, library.encoded) == (1, [])
    assert not library.store.has_kv(of)
    assert library.store.maintenance.verify().ok


def test_facts_that_are_no_json_are_forgotten(library):
    before = library.store.generation
    library.edit(lambda txn: [txn.put("meta", b"fact/prompt", b"{"), txn.put("meta", b"generation", b"1")])
    assert {(f.kind, f.table) for f in library.store.maintenance.verify().findings} == {("damaged", "meta")}
    report = library.store.maintenance.repair(library)
    assert sorted(report.facts) == ["generation", "prompt"]
    assert library.store.get_meta("prompt") is None
    assert library.store.generation > before


def test_a_repair_that_was_stopped_goes_on(library, monkeypatch):
    before = library.rows()
    monkeypatch.setattr("ragkv.store.maintenance.repair._BATCH_TOKENS", 1)
    bad = [first_key(library, name, n, encoding) for name, n in (("a", 1), ("a", 2), ("b", 1)) for encoding in (0, 1)]
    library.edit(lambda txn: [flip(txn, "kv", key) for key in bad])
    encode = library.encode

    def stop_at_the_third(identities: Any) -> Any:
        if len(library.encoded) == 2:
            raise KeyboardInterrupt
        return encode(identities)

    monkeypatch.setattr(library, "encode", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        library.store.maintenance.repair(library)
    assert len(library.store.maintenance.verify().findings) == 4
    monkeypatch.setattr(library, "encode", encode)
    assert library.store.maintenance.repair(library).encoded == 4
    assert sorted(identity.key() for identity in library.encoded) == sorted(bad)  # and nothing else
    assert library.rows() == before


def test_a_document_that_changes_meanwhile_is_looked_at_again(library):
    """The repair of the damaged version must not be applied to the new version."""
    library.edit(lambda txn: flip(txn, "vectors", vector(b"d", "a", 1)(library)))
    embed, seen = library.embed, []

    def embed_late(chunks: Any) -> Any:
        if not seen:
            seen.append(library.write("a", "quite\nanother"))
        return embed(chunks)

    library.embed = embed_late
    assert library.store.maintenance.repair(library).ok
    assert list(library.store.chunks("a")) == seen[0]
    assert library.store.maintenance.verify().ok


def test_a_document_that_goes_while_its_kv_is_made_leaves_nothing(library):
    library.edit(lambda txn: flip(txn, "segments", first_key(library, "c", 0) + bytes(4)))
    encode = library.encode

    def encode_late(identities: Any) -> Any:
        library.store.delete_document("c")
        return encode(identities)

    library.encode = encode_late
    report = library.store.maintenance.repair(library)
    assert (report.ok, report.rows) == (True, 0)
    assert list(library.store.maintenance.orphans()) == []


def test_a_documents_row_elsewhere_never_takes_the_place_of_its_own(library):
    before = library.store.document("a")

    def copy(txn: Transaction) -> None:
        stored = parse_document(txn.get("documents", b"a"))
        txn.put("documents", b"other", pack_document(dataclasses.replace(stored, recipe="another")))

    library.edit(copy)
    assert library.store.maintenance.repair(library).ok
    assert library.store.document("a") == before
    assert library.store.maintenance.verify().ok


def test_a_plan_is_for_the_generation_in_which_it_was_made(library):
    """Another document may have taken over a chunk's id in the meantime."""
    name = name_of(library, "a", 2)
    library.edit(lambda txn: txn.delete("places", name))
    with library.store._live().read() as txn:
        damaged = find_damage(txn, b"a")
    library.write("z", "something else")
    assert not library.store._live().write(lambda txn: repair_document(damaged, {}, txn))
    assert library.store.maintenance.repair(library).mended == ["a"]


def test_a_document_with_a_chunk_id_of_another_goes(library):
    theirs, remaining = chunk(library, "c", 0), list(library.store.chunks("c"))

    def take(txn: Transaction) -> None:
        mine = parse_chunk(txn.get("chunks", library.place("a", 0)))
        txn.put("chunks", library.place("a", 0), pack_chunk(dataclasses.replace(mine, chunk_id=theirs.chunk_id)))

    library.edit(take)
    report = library.store.maintenance.repair(library)
    assert report.dropped == {"a": "its chunk ids are another document's"}
    assert list(library.store.chunks("c")) == remaining
    assert library.store.chunk(theirs.chunk_id) == theirs
    assert library.store.maintenance.verify().ok


def test_damaged_documents_can_be_deleted_and_replaced(library):
    library.edit(lambda txn: [flip(txn, "chunks", library.place(name, 1)) for name in ("a", "b")])
    library.write("a", "one two three\nfour five\nsix seven eight\nnine")
    assert library.store.delete_document("b")
    assert library.store.maintenance.verify().ok
    assert list(library.store.maintenance.orphans()) == []


def test_a_store_that_is_read_only_is_not_repaired(library):
    path = library.store.directory.parent
    with Store.open(path, readonly=True) as reader:
        assert reader.maintenance.verify().ok
        for change in (
            lambda: reader.maintenance.repair(library),
            lambda: reader.maintenance.collect(in_use=lambda _: True),
        ):
            with pytest.raises(StoreError, match="read-only"):
                change()


def test_long_ids_are_found_by_their_rows(library):
    name = "n" * 2000
    library.write(name, "one\ntwo")
    before = library.rows()
    place = name_of(library, name, 1)
    library.edit(lambda txn: txn.delete("places", place))
    assert library.store.maintenance.repair(library).mended == [name]
    assert library.rows() == before
    library.edit(lambda txn: flip(txn, "documents", document_key(name)))
    report = library.store.maintenance.repair(library)
    assert len(report.dropped) == 1
    assert library.store.maintenance.verify().ok
    assert not any(name in stored.document.document_id for stored in library.store.documents())
