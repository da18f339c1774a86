"""The inventory gives the same documents as reading all of them, and reads no more than necessary."""

import secrets
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

from ragkv.config import QdrantConfig
from ragkv.errors import UsageError
from ragkv.index import filters
from ragkv.index.filters import (
    MAX_CONDITIONS,
    MAX_PATTERN_CHARACTERS,
    DocumentFilter,
    FieldIndex,
    Pattern,
    all_values,
    match,
    meeting,
    wanted_values,
)
from ragkv.index.search import Derived, select
from ragkv.retrievers import qdrant
from ragkv.retrievers.arrays import IdSet, keys_of
from ragkv.retrievers.qdrant import term
from ragkv.store import Store, StoredDocument
from ragkv.types import Chunk, Document


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "index") as made:
        yield made


def inventory_of(store: Store, *, readonly: bool = False) -> DocumentFilter:
    """The inventory as opened by another process."""
    folder = store.directory.parent / "derived"
    derived = Derived(store, folder, (lambda _: None) if readonly else lambda write: write())
    return DocumentFilter(partial(derived.index, "fields"))


def write(store: Store, document: Document, chunks: int = 2) -> None:
    name = document.document_id
    made = [
        Chunk(chunk_id=f"{name}/{n}", document_id=name, ordinal=n, text="x", token_ids=(1,), start=n, end=n + 1)
        for n in range(chunks)
    ]
    store.write_document(document, "x" * chunks, made, recipe="r", references={chunk.chunk_id: [] for chunk in made})


def literally(store: Store, where: list[str]) -> set[bytes] | None:
    """The keys of the chunks of the documents that `ls --where` lists; None for all documents."""
    chosen = select(store, where=where)
    if len(chosen) == len(list(store.documents())):
        return None
    return set(keys_of(c.chunk_id for one in chosen for c in store.chunks(one.document.document_id)).tolist())


def found(inventory: DocumentFilter, where: list[str]) -> set[bytes] | None:
    among = inventory.among(where)
    return None if among is None else set(among.keys.tolist())


NAMES = ["a.md", "b.md", "notes/a.md", "notes/[x].txt", "notes/x.txt", "é*", "e\u0301*"]
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
    [*NAMES, "[x].txt", "*", "*.md", "a*", "?.md", "notes/*", "[ab].md", "[!a].md", "en", "A", "", "text/*"]
)
conditions = st.lists(
    st.tuples(
        st.sampled_from(["source", "title", "media_type", "document_id", "lang", "nothing", " lang "]), patterns
    ).map("=".join),
    min_size=1,
    max_size=3,
)


# A step writes a document with some chunks, or deletes one, and compares.
steps = st.lists(st.tuples(documents, st.none() | st.integers(0, 4), conditions), min_size=1, max_size=8)


@settings(max_examples=60 if NIGHTLY else 14)
@given(steps=steps, again=conditions, merged=st.sets(st.integers(0, 7)))
def test_it_finds_what_reading_all_documents_finds(steps, again, merged, tmp_path_factory):
    """Three processes: one that saves, one that cannot save, and one that starts now. `merged`: the steps in which the
    first merges its segments.
    """
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
                    if meeting(list(store.documents()), asked):
                        assert found(inventory, asked) == literally(store, asked)
                        chosen = {stored.document.document_id for stored in select(store, where=asked)}
                        assert sorted(inventory.documents(asked)) == sorted(chosen)
                    else:
                        with pytest.raises(UsageError, match="No document matches --where"):
                            inventory.among(asked)
                        with pytest.raises(UsageError, match="No document matches --where"):
                            inventory.documents(asked)


@settings(max_examples=200 if NIGHTLY else 30)
@given(made=st.lists(documents, min_size=1, max_size=6), asked=conditions, most=st.sampled_from([1, 2, 20_000]))
def test_qdrant_filters_as_we_do(made, asked, most, tmp_path_factory):
    """The filter sent to Qdrant accepts the same documents as `meeting`, also if it has to be split (`most`)."""
    made = list({one.document_id: one for one in made}.values())
    with Store.create(tmp_path_factory.mktemp("qdrant") / "index") as store, pytest.MonkeyPatch.context() as patched:
        patched.setattr(qdrant, "MAX_TERMS", most)
        for document in made:
            write(store, document, 1)
        collection = qdrant.QdrantCollection(QdrantConfig(url="memory://", collection=secrets.token_hex(8)), "index")
        collection.make("", ["dense"], 1)
        points = (
            qdrant.Point(chunk_id=f"{one.document_id}/0", terms=[term(*pair) for pair in pairs_of(one)], vectors={})
            for one in made
        )
        assert collection.send(points, "") == len(made)
        expected = {f"{stored.document.document_id}/0" for stored in meeting(list(store.documents()), asked)}
        try:
            among = inventory_of(store).among(asked)
        except UsageError:
            assert not expected
            return
        let = {
            point.payload["chunk"]
            for chosen in collection.filters(among)
            for point in collection._call("scroll", scroll_filter=chosen, limit=100)[0]
        }
        assert let == expected
        by_id = {
            point.payload["chunk"]
            for chosen in collection.filters(None if among is None else IdSet(among.keys))
            for point in collection._call("scroll", scroll_filter=chosen, limit=100)[0]
        }
        assert by_id == let


def pairs_of(document: Document) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, values in all_values(document).items() for value in values)


def test_a_process_reads_no_documents_but_those_that_changed(store, monkeypatch):
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
    assert inventory.among(["source=d1?.md"]) is among  # the same object, so that searches keep their cached data
    write(store, Document(document_id="d99", source="d99.md", content_hash="0"), 0)
    store.delete_document("d4")
    assert ask("source=d99.md") == [2]
    with pytest.raises(UsageError, match=r"No document matches --where source=d4\.md"):
        inventory.among(["source=d4.md"])


def test_conditions_that_are_none_are_refused_and_not_kept(store):
    inventory = inventory_of(store)
    for where in (["nix"], ["=x"], [" =x"]):
        with pytest.raises(UsageError, match="takes FIELD=PATTERN"):
            inventory.among(where)
    write(store, Document(document_id="a", source="a", content_hash="0"))
    write(store, Document(document_id="b", source="b", content_hash="0"))
    for number in range(100):
        with pytest.raises(UsageError, match="No document matches"):
            inventory.among([f"source=no{number}"])
    assert len(inventory._cache) == filters.CACHED_CONDITIONS
    assert found(inventory, ["source=a"]) == literally(store, ["source=a"])


# ---- selection

glob_texts = st.text("abcd*?[]!-\\^é\n\udc80", max_size=12)


@given(text=glob_texts, star=st.integers(0, 12), one=st.integers(0, 12))
def test_a_pattern_made_of_a_text_matches_it(text, star, one):
    quoted = ["[[]" if char == "[" else f"[{char}]" if char in "*?" else char for char in text]
    quoted[one : one + 1] = "?" if one < len(quoted) else []
    quoted[star : star + 3] = "*"
    assert Pattern("".join(quoted)).matches(text)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("[a-" * 341, "a"),
        ("[!" * 512, "a"),
        ("*" + "a" * 1000 + "b*", "a" * 1_000_000),
        ("*" + "[a]" * 300 + "b*", "a" * 1_000_000),
        ("*" + "?a" * 500 + "b", "a" * 1_000_000),
        ("a*" * 500 + "b", "a" * 1_000_000),
    ],
)
def test_no_pattern_takes_quadratic_time(pattern, text):
    """Nothing is timed, because a matcher that takes quadratic time would never finish."""
    assert not Pattern(pattern).matches(text)


def test_patterns_and_conditions_have_limits():
    longest = "[a-" * (MAX_PATTERN_CHARACTERS // 3)
    assert wanted_values([f"source={longest}"] * 2) == {"source": [longest]}
    with pytest.raises(UsageError, match="at most 1024 characters") as failure:
        wanted_values(["source=" + "[a-" * 30_000])
    assert len(str(failure.value)) < 200
    with pytest.raises(UsageError, match="at most 1024 characters"):
        wanted_values(["x" * 2000 + "=a"])
    with pytest.raises(UsageError, match=f"at most {MAX_CONDITIONS} conditions"):
        wanted_values([f"source=*{number}" for number in range(MAX_CONDITIONS + 1)])
    with pytest.raises(UsageError, match="FIELD=PATTERN") as failure:
        wanted_values(["x" * 30_000])
    assert len(str(failure.value)) < 400
    document = Document(document_id="a.md", source="a.md", content_hash="0")
    stored = StoredDocument(document=document, recipe="r", chunks=0, tokens=0, ingested_at=0)
    with pytest.raises(UsageError, match="at most 1024 characters"):
        match([stored], ["[a-" * 30_000])


def test_one_slow_condition_holds_up_no_other(store, monkeypatch):
    asked, end = threading.Event(), threading.Event()
    matches = Pattern.matches

    def slow(self: Pattern, text: str) -> bool:
        if text == "slow.md":
            asked.set()
            assert end.wait(600)
        return matches(self, text)

    for name in ("slow.md", "quick.md"):
        write(store, Document(document_id=name, source=name, content_hash="0"), 0)
    inventory = inventory_of(store)
    inventory.documents(["source=quick.md"])  # builds the index
    monkeypatch.setattr(filters.Pattern, "matches", slow)
    found: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(inventory.documents(["source=*.md"]))),
        threading.Thread(target=inventory.among, args=(["source=s*.md"],)),
    ]
    for thread in threads:
        thread.start()
    try:
        assert asked.wait(600)
        assert inventory.documents(["source=q*.md"]) == ["quick.md"]
        assert inventory.among(["source=quick.md"]) is not None
    finally:
        end.set()
        for thread in threads:
            thread.join(600)
    assert sorted(found[0]) == ["quick.md", "slow.md"]
