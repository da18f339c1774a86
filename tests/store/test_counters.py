"""The store's change history: exactly what differs, as long as it is at most a quarter of all chunks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.store import ChunkVectors, Store
from ragkv.store import counters as module
from ragkv.store.codecs import add_checksum
from ragkv.store.counters import Version, name_of
from ragkv.store.tables import parse_chunk
from ragkv.types import Chunk, Document

DOCUMENT = Document(document_id="a", source="a.md", content_hash="0", metadata={"lang": "en"})


Told = dict[str, tuple[str, float]]
"""A document: text and vector by chunk id."""


def write(store: Store, result: Told, document: Document = DOCUMENT) -> None:
    name, place, chunks = document.document_id, 0, []
    for ordinal, (chunk_id, (text, _)) in enumerate(result.items()):
        span = {"start": place, "end": place + len(text)}
        chunks.append(
            Chunk(chunk_id=chunk_id, document_id=name, ordinal=ordinal, text=text, token_ids=(ordinal,), **span)
        )
        place += len(text)
    store.write_document(
        document,
        "x" * place,
        chunks,
        recipe="r",
        references={chunk.chunk_id: [] for chunk in chunks},
        vectors={c: ChunkVectors(dense=np.array([vector], np.float32)) for c, (_, vector) in result.items()},
    )


versions = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.none()
        | st.dictionaries(
            st.sampled_from("pqrstu"), st.tuples(st.sampled_from(["x", "yy"]), st.floats(0, 1, width=16))
        ),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(versions=versions)
def test_it_names_what_differs_since_any_generation(versions, tmp_path_factory):
    with Store.create(tmp_path_factory.mktemp("history") / "index") as store:
        states: list[tuple[Version, dict[str, Told]]] = [(store.version, {})]
        for name, result in versions:
            now = dict(states[-1][1])
            if result is None:
                store.delete_document(name)
                now.pop(name, None)
            else:
                now[name] = {f"{name}{chunk_id}": value for chunk_id, value in result.items()}
                write(store, now[name], replace(DOCUMENT, document_id=name))
            states.append((store.version, now))
        last = states[-1][1]
        for since, then in states:
            loaded = store.changes(since)
            assert loaded is not None
            assert loaded.version == store.version
            changed: set[str] = set()
            for name in ("a", "b"):
                before, after = then.get(name, {}), last.get(name, {})
                differing = {c for c in before.keys() | after.keys() if before.get(c) != after.get(c)}
                changed |= differing
                assert name_of(name) in loaded.documents or not differing
                there = {chunk.chunk_id for chunk in store.chunks_named(map(name_of, differing))}
                assert there == differing & after.keys()
                named = store.documents_named([name_of(name)])
                assert [sorted(chunk_ids) for _, chunk_ids in named] == ([sorted(after)] if name in last else [])
            wanted = set(map(name_of, changed))
            assert loaded.chunks >= wanted  # chunks that were changed and changed back may be included
            assert then is not states[-2][1] or loaded.chunks == wanted


def test_a_shifted_chunk_is_no_change_and_a_new_title_is_one(store):
    write(store, {"p": ("x", 1.0), "q": ("y", 2.0)})
    first = store.version
    write(store, {"p": ("x", 1.0), "q": ("y", 2.0)}, replace(DOCUMENT, content_hash="1"))
    assert store.version == first
    write(store, {"new": ("zz", 3.0), "p": ("x", 1.0), "q": ("y", 4.0)})
    result = store.changes(first)
    assert result is not None
    assert (result.documents, result.chunks) == ({name_of("a")}, {name_of("new"), name_of("q")})
    second = store.version
    write(store, {"new": ("zz", 3.0), "p": ("x", 1.0), "q": ("y", 4.0)}, replace(DOCUMENT, metadata={"lang": "de"}))
    result = store.changes(second)
    assert result is not None
    assert (result.documents, result.chunks) == ({name_of("a")}, frozenset())


def test_what_is_too_long_ago_is_forgotten(store, monkeypatch):
    monkeypatch.setattr(module, "_LEAST", 10)
    versions = [store.version]
    for number in range(20):
        write(store, {"p": (f"x{number}", 1.0)})
        versions.append(store.version)
    with store._live().read() as txn:
        assert txn.count("changes") == 5  # each change weighs 1 and its chunk 1
    assert [store.changes(since) is not None for since in versions] == [False] * 16 + [True] * 5
    result = store.changes(versions[16])
    assert result is not None
    assert result.chunks == {name_of("p")}
    before = store.version
    write(store, {f"p{number}": ("x", 1.0) for number in range(60)})  # 61 changes; the limit is 60 / 4 = 15
    assert store.changes(before) is None
    before = store.version
    write(store, {f"p{number}": ("x" if number else "y", 1.0) for number in range(60)})
    result = store.changes(before)
    assert result is not None
    assert result.chunks == {name_of("p0")}
    result = store.changes(store.version)
    assert result is not None
    assert not result.chunks
    for odd in (-1, store.generation + 1, 10**400):
        assert store.changes(Version(odd, "")) is None


def test_two_copies_that_went_different_ways_do_not_follow_each_other(store, tmp_path):
    write(store, {"p": ("x", 1.0)})
    store.maintenance.copy(tmp_path / "backup")
    common = store.version
    with Store.open(tmp_path / "backup") as backup:
        assert backup.version == common
        write(store, {"p": ("y", 1.0)})
        write(backup, {"q": ("z", 1.0)})
        write(backup, {"q": ("y", 1.0)})
        assert store.generation == backup.generation - 1
        assert backup.changes(store.version) is None
        assert backup.changes(common) is not None


@pytest.mark.parametrize(
    "row", [b"", b"short", add_checksum(b""), add_checksum(bytes(20)), add_checksum(bytes(21)), bytes(20 + 32 + 8)]
)
def test_a_damaged_row_is_a_gap_that_verify_finds_and_repair_drops(store, row):
    versions = [store.version]
    for number in range(4):
        write(store, {"p": (f"x{number}", 1.0)})
        versions.append(store.version)
    store._live().write(lambda txn: txn.put("changes", (3).to_bytes(8, "big"), row))
    assert [store.changes(since) is not None for since in versions] == [False, False, False, False, True]
    [finding] = store.maintenance.verify().findings
    assert (finding.kind, finding.table, finding.where) == ("damaged", "changes", "change 3")
    store.maintenance.repair(repair_source=None)  # type: ignore[arg-type]
    assert store.maintenance.verify().ok
    write(store, {"p": ("y", 1.0)})
    assert store.changes(versions[4]) is not None


def test_a_document_with_a_damaged_chunk_leaves_a_gap(store):
    write(store, {"p": ("x", 1.0), "q": ("y", 2.0)})

    def damage(txn):  # type: ignore[no-untyped-def]
        key, row = next((key, bytes(row)) for key, row in txn.scan("chunks") if parse_chunk(row).chunk_id == "q")
        txn.put("chunks", key, row[:-1] + bytes([row[-1] ^ 1]))

    store._live().write(damage)
    before = store.version
    assert store.delete_document("a")
    assert store.generation == before.generation + 1
    assert store.changes(before) is None
