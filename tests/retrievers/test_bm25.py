import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from watchedlock import Alone

from ragkv.errors import RetrievalError
from ragkv.retrievers import BM25, bm25
from ragkv.retrievers.arrays import IdTable, Postings, term_hashes
from ragkv.retrievers.bm25 import tokenise

CHUNKS = [
    ("a#0", "The cat sat on the mat."),
    ("a#1", "A dog and a cat; the dog barked."),
    ("b#0", "Birds sing."),
    ("b#1", ""),
]


def built(chunks: list[tuple[str, str]]) -> BM25:
    index = BM25()
    index.build(chunks, generation=7)
    return index


def test_scores_are_lucenes_formula_also_when_loaded(tmp_path):
    """Sum over terms of ln(1 + (N - df + .5) / (df + .5)) * tf / (tf + k1 (1 - b + b l / L))."""
    index = built([("x", "b b c"), ("y", "b d d d d"), ("z", "a")])
    index.save(tmp_path)
    loaded = BM25.load(tmp_path)
    assert (loaded.generation, len(loaded)) == (7, 3)
    mean, found = 9 / 3, {hit.chunk_id: hit.score for hit in loaded.search("b d e", 10)}
    b, d = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    x = b * 2 / (2 + 1.5 * (0.25 + 0.75 * 3 / mean))
    y = b * 1 / (1 + 1.5 * (0.25 + 0.75 * 5 / mean)) + d * 4 / (4 + 1.5 * (0.25 + 0.75 * 5 / mean))
    assert found == {"x": pytest.approx(x, rel=1e-5), "y": pytest.approx(y, rel=1e-5)}
    assert loaded.search("b d e", 10) == index.search("b d e", 10)


def test_what_is_found():
    index = built(CHUNKS)
    assert [hit.chunk_id for hit in index.search("CAT", 10)] == ["a#0", "a#1"]
    assert index.search("zebra", 10) == index.search("", 10) == index.search("?!", 10) == []
    assert [hit.chunk_id for hit in index.search("zebra birds", 10)] == ["b#0"]
    ids = [f"{number:03}" for number in range(100)]
    random.Random(1).shuffle(ids)
    index = built([(chunk_id, "same words") for chunk_id in ids] + [("zzz", "words words words")])
    assert [hit.chunk_id for hit in index.search("words", 3)] == ["zzz", "000", "001"]


@pytest.mark.parametrize("chunks", [[], [("a", "")], [("a", "..."), ("b", " ")]])
def test_index_without_words(tmp_path, chunks):
    index = built(chunks)
    index.save(tmp_path)
    assert index.search("word", 3) == BM25.load(tmp_path).search("word", 3) == BM25().search("word", 3) == []
    assert len(BM25.load(tmp_path)) == len(chunks)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="at least 1"):
        BM25().search("x", 0)
    with pytest.raises(RetrievalError, match="already"):
        built([("a", "x"), ("a", "y")])


# ---- tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Don't STOP, naïve foo_bar v2.1", ["don", "t", "stop", "naïve", "foo", "bar", "v2", "1"]),
        ("Straße ﬁne Ｆｕｌｌ", ["strasse", "fine", "full"]),
        ("cafe\u0301", ["café"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("北京大学", ["北", "京", "大", "学", "北京", "京大", "大学"]),
        ("GPU用の", ["gpu", "用", "の", "用の"]),
        ("한국", ["한", "국", "한국"]),
        ("Привет, мир", ["привет", "мир"]),
        ("… 👩 --", []),
        ("Donau\u00addampf zero\u200bwidth می\u200cخواهم", ["donaudampf", "zero", "width", "میخواهم"]),
        ("İzmir IŞIK ışık i\u0307\u0301", ["izmir", "işik", "işik", "í"]),
    ],
)
def test_tokens(text, tokens):
    assert tokenise(text) == tokens


# ---- files


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    built(CHUNKS).save(tmp_path)
    held = BM25.load(tmp_path)
    (tmp_path / "data-left-by-a-crash").mkdir()
    built([("new", "zebra cat")]).save(tmp_path)
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("cat", 5)] == ["new"]
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert held.search("cat", 5) == built(CHUNKS).search("cat", 5)  # its mapped files exist until it is freed
    BM25.load(tmp_path).save(tmp_path)  # replaces the files that it reads from
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("cat", 5)] == ["new"]


def test_words_of_another_unicode_version_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("unicodedata.unidata_version", "1.1.5")
        built(CHUNKS).save(tmp_path)
    with pytest.raises(RetrievalError, match="rebuild it"):
        BM25.load(tmp_path)


@pytest.mark.parametrize("what", ["a word that occurs zero times", "a length more than there are chunks"])
def test_numbers_that_cannot_be_are_refused(tmp_path, monkeypatch, what):
    """The checksums are right, and so is the sum of the chunks' lengths."""
    write = BM25._write

    def wrong(self: BM25, data: Any, folder: Path, name: str) -> None:
        numbers = data.postings.numbers.copy()
        numbers[:2] = 0, numbers[:2].sum()
        zero = replace(data, postings=replace(data.postings, numbers=numbers))
        more = replace(data, lengths=np.append(data.lengths, np.uint32(0)))
        write(self, zero if what.startswith("a word") else more, folder, name)

    monkeypatch.setattr(BM25, "_write", wrong)
    built(CHUNKS).save(tmp_path)
    with pytest.raises(RetrievalError, match="rebuild it"):
        BM25.load(tmp_path)


def test_load_follows_a_replacement_that_happens_meanwhile(tmp_path, monkeypatch):
    built(CHUNKS).save(tmp_path)
    stale = json.loads((tmp_path / "manifest.json").read_text())
    built([("new", "zebra")]).save(tmp_path)
    import ragkv.retrievers.segments as module

    read, answers = module._manifest, [stale]
    monkeypatch.setattr(module, "_manifest", lambda *place: answers.pop() if answers else read(*place))
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("zebra", 1)] == ["new"]


# ---- bm25 segment

WORDS = "abcdefgh"
IDS = [f"chunk-{number}" for number in range(30)]
texts = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)


# A step writes (adds or replaces) some chunks and deletes others; `merge` as in the commands that write.
steps = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(IDS), texts, max_size=12), st.sets(st.sampled_from(IDS)), st.booleans()),
    min_size=1,
    max_size=8,
)


def oracle(chunks: dict[str, str], question: str) -> dict[str, float]:
    """bm25s' scores of the chunks that share a word with the question."""
    vocabulary = {word: number for number, word in enumerate(sorted({w for t in chunks.values() for w in tokenise(t)}))}
    known = [vocabulary[word] for word in tokenise(question) if word in vocabulary]
    if not known:
        return {}
    scorer = bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
    documents = [[vocabulary[word] for word in tokenise(text)] for text in chunks.values()]
    scorer.index((documents, vocabulary), create_empty_token=False, show_progress=False)
    scores = scorer.get_scores_from_ids(known)
    return {name: float(score) for name, score in zip(chunks, scores, strict=True) if score > 0}


@settings(max_examples=200 if NIGHTLY else 60)
@given(
    steps=steps,
    question=st.lists(st.sampled_from(f"{WORDS}xy"), max_size=6).map(" ".join),
    some=st.sets(st.sampled_from(IDS)),
)
def test_any_sequence_of_changes_gives_the_numbers_of_a_fresh_build_and_of_bm25s(steps, question, some):
    index, chunks = BM25(), dict[str, str]()
    for number, (written, gone, merge) in enumerate(steps):
        index.update(written.items(), gone | written.keys(), generation=number, embedder="", merge=merge)
        chunks = {name: text for name, text in chunks.items() if name not in gone} | written
        fresh = BM25()
        fresh.build(chunks.items(), number)
        for k, among in ((1, None), (40, None), (40, some)):
            hits = index.search(question, k, among=among)
            assert hits == fresh.search(question, k, among=among)
        with pytest.MonkeyPatch.context() as few:  # score only some chunks' rows
            few.setattr("ragkv.retrievers.bm25._FEW", 1)
            assert index.search(question, 40, among=some) == hits
            assert index.search(question, 1, among=some) == hits[:1]
        expected = oracle(chunks, question)
        assert {hit.chunk_id: hit.score for hit in index.search(question, 40)} == expected
        assert {hit.chunk_id for hit in hits} == expected.keys() & some
        assert (index.chunk_ids(), len(index), index.generation) == (chunks.keys(), len(chunks), number)


def test_a_word_that_a_chunk_has_often_and_letters_of_many_bytes():
    chunks = {"é" * 40: "a " * 70_000, "\udc80": "a " * 300 + "b", "日本": "b 北京大学", "": "b"}
    index = BM25()
    for generation, pair in enumerate(chunks.items()):
        index.update([pair], (), generation=generation, embedder="")
    for question in ("a", "b a a", "京大"):
        found = {hit.chunk_id: hit.score for hit in index.search(question, 9)}
        assert found == oracle(chunks, question)


def test_what_is_kept_of_words_is_bounded_and_the_last_ones_stay(monkeypatch):
    monkeypatch.setattr("ragkv.retrievers.bm25._KEPT", 3 * (64 + 5))
    index = BM25()
    index.build(((f"c{n}", " ".join(f"word{(n + k) % 20}" for k in range(5))) for n in range(20)), 1)
    expected = [index.search(f"word{n}", 5) for n in range(20)]
    assert len(index._scores._known) == 3
    made: list[bytes] = []
    honest = index._scores._weights
    monkeypatch.setattr(index._scores, "_weights", lambda key: made.append(key) or honest(key))
    for n in (19, 17, 18, 19, 17, 0, 17, 19):  # only the least recently used word is evicted
        assert index.search(f"word{n}", 5) == expected[n]
    assert len(made) == 1
    assert index.search("word18", 5) == expected[18]
    assert len(made) == 2


def test_one_thread_at_a_time_keeps_words(monkeypatch):
    """Otherwise two threads would count a word twice, and evict others for it."""
    index = BM25()
    index.build([("a", "red blue"), ("b", "red green")], 1)
    expected = index.search("red blue", 2)
    alone = Alone(lambda: index.search("red", 2))
    scores = index._scores = bm25._Scores(index._state.segments)
    weights = scores._weights

    def found(key: bytes) -> Any:
        alone.enter()
        return weights(key)

    monkeypatch.setattr(scores, "_weights", found)
    monkeypatch.setattr(scores, "_lock", alone.lock)
    assert index.search("red blue", 2) == expected
    alone.end()
    assert scores._size == sum(map(bm25._size, scores._known.values()))


@pytest.mark.parametrize(
    ("second", "ids"),
    [
        (lambda index: index.build([("c", "green")], 9), {"c"}),
        (lambda index: index.update([("d", "red")], [], generation=9, embedder=""), {"a", "b", "d"}),
        (BM25.merge, {"a", "b"}),
    ],
)
def test_one_thread_at_a_time_changes_an_index(second, ids):
    """Otherwise one thread's update would be lost when the other replaces the state."""
    index = BM25()
    index.build([("a", "red blue")], 1)
    alone = Alone(lambda: second(index))
    index._writing = alone.lock  # type: ignore[assignment]

    def added() -> Iterator[tuple[str, str]]:
        alone.enter()
        yield "b", "red"

    index.update(added(), [], generation=2, embedder="")
    alone.end()
    assert index.chunk_ids() == ids


def test_a_change_tokenises_its_own_words_and_copies_no_large_segment(tmp_path, monkeypatch):
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


def test_a_question_merges_only_what_is_small():
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


def test_an_index_that_was_saved_again_is_opened_without_reading_what_is_known(tmp_path, monkeypatch):
    index = BM25()
    index.build(((f"c{n}", f"common word{n}") for n in range(200)), 1)
    index.save(tmp_path)
    held = BM25.load(tmp_path)
    other = BM25.load(tmp_path)
    other.update([("new", "common new")], ["c7"], generation=2, embedder="")
    other.save(tmp_path)
    read: list[str] = []
    import ragkv.retrievers.segments as module

    digest = module._digest
    monkeypatch.setattr(module, "_digest", lambda path: read.append(path.name) or digest(path))
    followed = BM25.load(tmp_path, like=held)
    large = held._state.segments[0]
    assert followed._state.segments[0].data is large.data
    assert not [name for name in read if name.startswith(large.name)]
    assert followed.search("common new word7", 300) == other.search("common new word7", 300)
    # a changed file is read again, and found damaged
    path = next(tmp_path.glob(f"data-*/{large.name}.rows.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(Exception, match="does not match its checksum"):
        BM25.load(tmp_path, like=followed)


@settings(max_examples=100)
@given(
    st.lists(
        st.lists(st.tuples(st.dictionaries(st.sampled_from(WORDS), st.integers(1, 300)), st.booleans()), max_size=7),
        min_size=1,
        max_size=4,
    )
)
def test_merged_postings_are_those_of_the_rows_that_are_kept(parts):
    def collected(rows: list[dict[str, int]]) -> Postings:
        words = list(WORDS[::-1])
        columns = [(words.index(word), at, number) for at, row in enumerate(rows) for word, number in row.items()]
        at, row, number = (np.array([column[i] for column in columns], dtype=np.int32) for i in range(3))
        return Postings.collect(words, at, row, number.astype(np.uint16))

    def content(postings: Postings) -> list[list[tuple[int, int]]]:
        found = postings.find(term_hashes(WORDS))
        return [list(zip(postings.rows[at].tolist(), postings.numbers[at].tolist(), strict=True)) for at in found]

    given = [(collected([row for row, _ in part]), np.array([kept for _, kept in part], dtype=bool)) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragkv.retrievers.arrays._BLOCK", 3)
        merged = Postings.merged(given)
    assert content(merged) == content(collected([row for part in parts for row, kept in part if kept]))
    assert (np.diff(merged.starts) > 0).all()


def test_the_rows_of_ids():
    id_table = IdTable.of(IDS)
    assert [id_table[row] for row in range(len(id_table))] == IDS
    joined = IdTable.joined([(id_table, np.arange(30) % 2 == 0), (IdTable.of(["x", "", "é"]), np.ones(3, dtype=bool))])
    assert [joined[row] for row in range(len(joined))] == [*IDS[::2], "x", "", "é"]
    assert id_table.repeated() is None
    assert IdTable.of([*IDS, IDS[4]]).repeated() == IDS[4]
