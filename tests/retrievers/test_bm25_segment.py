"""BM25 in segments: after any sequence of changes, the very numbers of a fresh build and of bm25s itself."""

from __future__ import annotations

from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.retrievers import BM25, BM25Config
from ragkv.retrievers.bm25 import tokenise
from ragkv.retrievers.postings import Postings, word_keys
from ragkv.retrievers.roster import Roster

WORDS = "abcdefgh"
IDS = [f"chunk-{number}" for number in range(30)]
texts = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
# A step writes some chunks, replaced if they are there, and deletes others; `merge` as the commands that write do it.
steps = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(IDS), texts, max_size=12), st.sets(st.sampled_from(IDS)), st.booleans()),
    min_size=1,
    max_size=8,
)


def oracle(chunks: dict[str, str], question: str, config: BM25Config) -> dict[str, float]:
    """bm25s' own scores of the chunks that share a word with the question."""
    vocabulary = {word: number for number, word in enumerate(sorted({w for t in chunks.values() for w in tokenise(t)}))}
    known = [vocabulary[word] for word in tokenise(question) if word in vocabulary]
    if not known:
        return {}
    scorer = bm25s.BM25(k1=config.k1, b=config.b, method="lucene", backend="numpy")
    documents = [[vocabulary[word] for word in tokenise(text)] for text in chunks.values()]
    scorer.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    scores = scorer.get_scores_from_ids(known)
    return {name: float(score) for name, score in zip(chunks, scores, strict=True) if score > 0}


@settings(deadline=None, max_examples=120)
@given(
    steps=steps,
    question=st.lists(st.sampled_from(f"{WORDS}xy"), max_size=6).map(" ".join),
    some=st.sets(st.sampled_from(IDS)),
    config=st.builds(BM25Config, k1=st.floats(0, 3), b=st.floats(0, 1)),
)
def test_any_sequence_of_changes_gives_the_numbers_of_a_fresh_build_and_of_bm25s(
    steps: list[tuple[dict[str, str], set[str], bool]], question: str, some: set[str], config: BM25Config
) -> None:
    index, chunks = BM25(config), dict[str, str]()
    for number, (written, gone, merge) in enumerate(steps):
        index.update(written.items(), gone | written.keys(), generation=number, embedder="", merge=merge)
        chunks = {name: text for name, text in chunks.items() if name not in gone} | written
        fresh = BM25(config)
        fresh.build(chunks.items(), number)
        for k, among in ((1, None), (40, None), (40, some)):
            hits = index.search(question, k, among=among)
            assert hits == fresh.search(question, k, among=among)
        with pytest.MonkeyPatch.context() as few:  # only the rows of some chunks are scored
            few.setattr("ragkv.retrievers.bm25._FEW", 1)
            assert index.search(question, 40, among=some) == hits
            assert index.search(question, 1, among=some) == hits[:1]
        expected = oracle(chunks, question, config)
        assert {hit.chunk_id: hit.score for hit in index.search(question, 40)} == expected
        assert {hit.chunk_id for hit in hits} == expected.keys() & some
        assert (index.chunk_ids(), len(index), index.generation) == (chunks.keys(), len(chunks), number)


def test_a_word_that_a_chunk_has_often_and_letters_of_many_bytes() -> None:
    chunks = {"é" * 40: "a " * 70_000, "\udc80": "a " * 300 + "b", "日本": "b 北京大学", "": "b"}
    index = BM25()
    for generation, pair in enumerate(chunks.items()):
        index.update([pair], (), generation=generation, embedder="")
    for question in ("a", "b a a", "京大"):
        found = {hit.chunk_id: hit.score for hit in index.search(question, 9)}
        assert found == oracle(chunks, question, index.config)


def test_a_change_tokenises_its_own_words_and_copies_no_large_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = BM25()
    index.build(((f"c{n}", f"common word{n}") for n in range(2000)), 1)
    index.save(tmp_path)
    index = BM25.load(tmp_path)
    read: list[str] = []
    monkeypatch.setattr("ragkv.retrievers.bm25.tokenise", lambda text: read.append(text) or tokenise(text))
    large = index._state.segments[0]
    for number in range(40):
        index.update([(f"c{number}", f"other word{number}")], [f"c{number}"], generation=2 + number, embedder="")
        assert index._state.segments[0].data is large.data
    assert read == [f"other word{number}" for number in range(40)]
    index.save(tmp_path)
    monkeypatch.undo()
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("other word3", 1)] == ["c3"]


def test_a_question_merges_only_what_is_small() -> None:
    index = BM25()
    for size, start in ((5000, 0), (1500, 10_000)):
        run = ((f"c{start + n}", "word") for n in range(size))
        index.update(run, (), generation=1, embedder="", merge=False)
    for number in range(30):
        index.update([(f"new{number}", "word")], (), generation=2, embedder="", merge=False)
    sizes = [segment.living for segment in index._state.segments]
    assert sizes[:2] == [5000, 1500]
    assert len(sizes) < 6
    index.update([], [], generation=3, embedder="")
    assert index._state.segments[0].living == 6500


def test_an_index_that_was_saved_again_is_opened_without_reading_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = BM25()
    index.build(((f"c{n}", f"common word{n}") for n in range(200)), 1)
    index.save(tmp_path)
    held = BM25.load(tmp_path)
    other = BM25.load(tmp_path)
    other.update([("new", "common new")], ["c7"], generation=2, embedder="")
    other.save(tmp_path)
    read: list[str] = []
    import ragkv.retrievers.persistence as module

    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda path: read.append(path.name) or digest(path))
    followed = BM25.load(tmp_path, like=held)
    large = held._state.segments[0]
    assert followed._state.segments[0].data is large.data
    assert not [name for name in read if name.startswith(large.name)]
    assert followed.search("common new word7", 300) == other.search("common new word7", 300)
    # what changed on the disk is read again, and found damaged
    path = next(tmp_path.glob(f"data-*/{large.name}.rows.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(Exception, match="does not match its checksum"):
        BM25.load(tmp_path, like=followed)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.lists(st.tuples(st.dictionaries(st.sampled_from(WORDS), st.integers(1, 300)), st.booleans()), max_size=7),
        min_size=1,
        max_size=4,
    )
)
def test_merged_postings_are_those_of_the_rows_that_are_kept(parts: list[list[tuple[dict[str, int], bool]]]) -> None:
    def collected(rows: list[dict[str, int]]) -> Postings:
        words = list(WORDS[::-1])
        columns = [(words.index(word), at, number) for at, row in enumerate(rows) for word, number in row.items()]
        at, row, number = (np.array([column[i] for column in columns], dtype=np.int32) for i in range(3))
        return Postings.collect(words, at, row, number.astype(np.uint16))

    def content(postings: Postings) -> list[list[tuple[int, int]]]:
        found = postings.find(word_keys(WORDS))
        return [list(zip(postings.rows[at].tolist(), postings.numbers[at].tolist(), strict=True)) for at in found]

    given = [(collected([row for row, _ in part]), np.array([kept for _, kept in part], dtype=bool)) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragkv.retrievers.postings._BLOCK", 3)
        merged = Postings.merged(given)
    assert content(merged) == content(collected([row for part in parts for row, kept in part if kept]))
    assert (np.diff(merged.starts) > 0).all()


def test_the_rows_of_ids() -> None:
    roster = Roster.of(IDS)
    assert [roster[row] for row in range(len(roster))] == IDS
    joined = Roster.joined([(roster, np.arange(30) % 2 == 0), (Roster.of(["x", "", "é"]), np.ones(3, dtype=bool))])
    assert [joined[row] for row in range(len(joined))] == [*IDS[::2], "x", "", "é"]
    assert roster.repeated() is None
    assert Roster.of([*IDS, IDS[4]]).repeated() == IDS[4]
