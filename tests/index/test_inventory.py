"""The inventory finds what reading all documents finds, and reads no more of them than it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import UsageError
from ragkv.index import inventory as module
from ragkv.index.derived import Derived
from ragkv.index.fieldindex import FieldIndex
from ragkv.index.inspection import select
from ragkv.index.inventory import Inventory
from ragkv.index.selection import where_filter
from ragkv.retrievers.roster import keys_of
from ragkv.store import Store
from ragkv.types import Chunk, Document


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as made:
        yield made


def inventory_of(store: Store, *, readonly: bool = False) -> Inventory:
    """That of a process of its own."""
    folder = store.directory.parent / "derived"
    return Inventory(Derived(store, folder, (lambda _: None) if readonly else lambda write: write()).fields)


def write(store: Store, document: Document, chunks: int = 2) -> None:
    name = document.document_id
    made = [
        Chunk(chunk_id=f"{name}/{n}", document_id=name, ordinal=n, text="x", token_ids=(1,), start=n, end=n + 1)
        for n in range(chunks)
    ]
    store.write_document(document, "x" * chunks, made, recipe="r", references={chunk.chunk_id: [] for chunk in made})


def literally(store: Store, where: list[str]) -> set[bytes] | None:
    """The keys of the chunks of the documents that `ls --where` lists; None if it lists all."""
    chosen = select(store, where=where)
    if len(chosen) == len(list(store.documents())):
        return None
    return set(keys_of(c.chunk_id for one in chosen for c in store.chunks(one.document.document_id)).tolist())


def found(inventory: Inventory, where: list[str]) -> set[bytes] | None:
    among = inventory.among(where)
    return None if among is None else set(among.keys.tolist())


NAMES = ["a.md", "b.md", "notes/a.md", "notes/[x].txt", "é*"]
documents = st.builds(
    Document,
    document_id=st.sampled_from(NAMES),
    source=st.sampled_from([*NAMES, ""]),
    content_hash=st.just("0"),
    media_type=st.sampled_from(["text/plain", "text/markdown"]),
    title=st.none() | st.sampled_from(["A", "B b", "*"]),
    metadata=st.dictionaries(st.sampled_from(["lang", "title", "source"]), st.sampled_from(["en", "de", "*"])),
)
patterns = st.sampled_from(
    [*NAMES, "*", "*.md", "a*", "?.md", "notes/*", "[ab].md", "[!a].md", "en", "A", "", "text/*"]
)
conditions = st.lists(
    st.tuples(
        st.sampled_from(["source", "title", "media_type", "document_id", "lang", "nothing", " lang "]), patterns
    ).map("=".join),
    min_size=1,
    max_size=3,
)
# A step writes a document with some chunks or deletes one, and asks.
steps = st.lists(st.tuples(documents, st.none() | st.integers(0, 4), conditions), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(steps=steps, again=conditions, merged=st.sets(st.integers(0, 7)))
def test_it_finds_what_reading_all_documents_finds(
    steps: list[tuple[Document, int | None, list[str]]],
    again: list[str],
    merged: set[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Three processes ask: one that saves, one that cannot, and one that begins now. `merged`: in which steps the first
    one merges its segments."""
    with Store.create(tmp_path_factory.mktemp("inventory") / "index") as store:
        saving, other = inventory_of(store), inventory_of(store, readonly=True)
        for step, (document, chunks, where) in enumerate(steps):
            if chunks is None:
                store.delete_document(document.document_id)
            else:
                write(store, document, chunks)
            if step in merged:
                FieldIndex.merge(saving._fields())
            for asked in (where, again, where):
                for inventory in (saving, other, inventory_of(store)):
                    if any(map(where_filter(asked), (stored.document for stored in store.documents()))):
                        assert found(inventory, asked) == literally(store, asked)
                        chosen = {stored.document.document_id for stored in select(store, where=asked)}
                        assert sorted(inventory.documents(asked)) == sorted(chosen)
                    else:
                        with pytest.raises(UsageError, match="No document matches --where"):
                            inventory.among(asked)
                        with pytest.raises(UsageError, match="No document matches --where"):
                            inventory.documents(asked)


def test_a_process_reads_no_documents_but_those_that_changed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write(store, Document(document_id=f"d{number}", source=f"d{number}.md", content_hash="0"))
    inventory_of(store).among(["source=d3.md"])
    read: list[int] = []
    named = store.documents_named
    monkeypatch.setattr(store, "documents_named", lambda names: read.append(len(names)) or named(names))
    for name in ("documents", "document", "chunks", "places"):
        monkeypatch.setattr(store, name, lambda *_, name=name: pytest.fail(f"{name} are read"))
    inventory = inventory_of(store)

    def ask(where: str) -> list[int]:
        read.clear()
        inventory.among([where])
        return list(read)

    assert ask("source=d3.md") == ask("source=d?.md") == ask("source=*") == []
    among = inventory.among(["source=d1?.md"])
    write(store, Document(document_id="d3", source="d3.md", content_hash="0", title="new"), 3)
    assert ask("source=d3.md") == [1]
    assert ask("title=new") == ask("source=*") == []
    assert inventory.among(["source=d1?.md"]) is among  # so that searches keep what they made of it
    write(store, Document(document_id="d99", source="d99.md", content_hash="0"), 0)
    store.delete_document("d4")
    assert ask("source=d99.md") == [2]
    with pytest.raises(UsageError, match=r"No document matches --where source=d4\.md"):
        inventory.among(["source=d4.md"])


@pytest.mark.parametrize("length", [0, 1, 200])
def test_files_that_are_damaged_or_stale_are_made_again(store: Store, length: int) -> None:
    for number in range(12):
        write(store, Document(document_id=f"d{number}", source=f"d{number}.md", content_hash="0"))
    inventory_of(store).among(["source=d1.md"])
    for file in sorted((store.directory.parent / "derived" / "fields").glob("data-*/*")):
        whole = file.read_bytes()
        half = len(whole) // 2
        for damage in (whole[:length], whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]):
            current = next((store.directory.parent / "derived" / "fields").glob("data-*"))
            (current / file.name).write_bytes(damage)
            for where in (["source=d1.md"], ["source=d?.md"]):
                assert found(inventory_of(store, readonly=True), where) == literally(store, where)
            (current / file.name).write_bytes(whole)
    manifest = store.directory.parent / "derived" / "fields" / "manifest.json"
    manifest.write_text("{")
    assert found(inventory_of(store), ["source=d?.md"]) == literally(store, ["source=d?.md"])


def test_a_change_that_is_not_known_any_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write(store, Document(document_id=f"d{number}", source=f"d{number}.md", content_hash="0"))
    inventory = inventory_of(store)
    assert found(inventory, ["source=d1.md"]) == literally(store, ["source=d1.md"])
    write(store, replace(Document(document_id="d1", source="d1.md", content_hash="0"), title="x"), 3)
    monkeypatch.setattr(store, "changes", lambda since: None)
    assert found(inventory, ["source=d1.md"]) == literally(store, ["source=d1.md"])


def test_conditions_that_are_none_are_refused_and_not_kept(store: Store) -> None:
    inventory = inventory_of(store)
    for where in (["nix"], ["=x"], [" =x"]):
        with pytest.raises(UsageError, match="takes FIELD=PATTERN"):
            inventory.among(where)
    write(store, Document(document_id="a", source="a", content_hash="0"))
    write(store, Document(document_id="b", source="b", content_hash="0"))
    for number in range(100):
        with pytest.raises(UsageError, match="No document matches"):
            inventory.among([f"source=no{number}"])
    assert len(inventory._found) == module._KEPT
    assert found(inventory, ["source=a"]) == literally(store, ["source=a"])
