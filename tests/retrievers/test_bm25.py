import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
from watchedlock import Alone

from ragkv.errors import RetrievalError
from ragkv.retrievers import BM25, bm25
from ragkv.retrievers.bm25 import tokenise

CHUNKS = [
    ("a#0", "The cat sat on the mat."),
    ("a#1", "A dog and a cat; the dog barked."),
    ("b#0", "Birds sing."),
    ("b#1", ""),
]


def built(chunks: list[tuple[str, str]]) -> BM25:
    index = BM25()
    index.update(chunks, (), generation=7, embedder="")
    return index


def test_scores_are_lucenes_formula_also_when_loaded(tmp_path):
    """Sum over terms of ln(1 + (N - df + .5) / (df + .5)) * tf / (tf + k1 (1 - b + b l / L))."""
    index = built([("x", "b b c"), ("y", "b d d d d"), ("z", "a")])
    index.save(tmp_path)
    loaded = BM25.load(tmp_path)
    assert (loaded.generation, len(loaded)) == (7, 3)
    mean, scores = 9 / 3, {hit.chunk_id: hit.score for hit in loaded.search("b d e", 10)}
    b, d = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    x = b * 2 / (2 + 1.5 * (0.25 + 0.75 * 3 / mean))
    y = b * 1 / (1 + 1.5 * (0.25 + 0.75 * 5 / mean)) + d * 4 / (4 + 1.5 * (0.25 + 0.75 * 5 / mean))
    assert scores == {"x": pytest.approx(x, rel=1e-5), "y": pytest.approx(y, rel=1e-5)}
    assert loaded.search("b d e", 10) == index.search("b d e", 10)


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


# ---- bm25 segment

WORDS = "abcdefgh"


def test_a_word_that_a_chunk_has_often_and_letters_of_many_bytes():
    chunks = {"é" * 40: "a " * 70_000, "\udc80": "a " * 300 + "b", "日本": "b 北京大学", "": "b"}
    index = BM25()
    for generation, pair in enumerate(chunks.items()):
        index.update([pair], (), generation=generation, embedder="")
    vocabulary = {word: number for number, word in enumerate({w for t in chunks.values() for w in tokenise(t)})}
    scorer = bm25s.BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
    words = [[vocabulary[word] for word in tokenise(text)] for text in chunks.values()]
    scorer.index((words, vocabulary), create_empty_token=False, show_progress=False)
    for question in ("a", "b a a", "京大"):
        scores = scorer.get_scores_from_ids([vocabulary[word] for word in tokenise(question)])
        expected = {name: float(score) for name, score in zip(chunks, scores, strict=True) if score > 0}
        assert {hit.chunk_id: hit.score for hit in index.search(question, 9)} == expected


def test_what_is_kept_of_words_is_bounded_and_the_last_ones_stay(monkeypatch):
    monkeypatch.setattr("ragkv.retrievers.bm25.CACHED_WEIGHTS", 3 * (64 + 5))
    index = built([(f"c{n}", " ".join(f"word{(n + k) % 20}" for k in range(5))) for n in range(20)])
    expected = [index.search(f"word{n}", 5) for n in range(20)]
    assert len(index._scores._known) == 3
    computed: list[bytes] = []
    honest = index._scores._weights
    monkeypatch.setattr(index._scores, "_weights", lambda key: computed.append(key) or honest(key))
    for n in (19, 17, 18, 19, 17, 0, 17, 19):  # only the least recently used word is evicted
        assert index.search(f"word{n}", 5) == expected[n]
    assert len(computed) == 1
    assert index.search("word18", 5) == expected[18]
    assert len(computed) == 2


def test_one_thread_at_a_time_keeps_words(monkeypatch):
    """Otherwise two threads would count a word twice, and evict others for it."""
    index = built([("a", "red blue"), ("b", "red green")])
    expected = index.search("red blue", 2)
    alone = Alone(lambda: index.search("red", 2))
    scores = index._scores = bm25._Scores(index.segments)
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
        (lambda index: index.update([("d", "red")], [], generation=9, embedder=""), {"a", "b", "d"}),
        (BM25.merge, {"a", "b"}),
    ],
)
def test_one_thread_at_a_time_changes_an_index(second, ids):
    """Otherwise one thread's update would be lost when the other replaces the state."""
    index = built([("a", "red blue")])
    alone = Alone(lambda: second(index))
    index._writing = alone.lock  # type: ignore[assignment]

    def added() -> Iterator[tuple[str, str]]:
        alone.enter()
        yield "b", "red"

    index.update(added(), [], generation=2, embedder="")
    alone.end()
    assert {part.id_table[row] for part in index.segments for row in range(len(part.hidden))} == ids


def test_a_change_tokenises_its_own_words_and_copies_no_large_segment(tmp_path, monkeypatch):
    index = built([(f"c{n}", f"common word{n}") for n in range(2000)])
    index.save(tmp_path)
    index = BM25.load(tmp_path)
    read: list[str] = []
    monkeypatch.setattr("ragkv.retrievers.bm25.tokenise", lambda text: read.append(text) or tokenise(text))
    large = index.segments[0]
    for number in range(40):
        index.update([(f"c{number}", f"other word{number}")], [f"c{number}"], generation=2 + number, embedder="")
        assert index.segments[0].data is large.data
    assert read == [f"other word{number}" for number in range(40)]
    index.save(tmp_path)
    monkeypatch.undo()
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("other word3", 1)] == ["c3"]
