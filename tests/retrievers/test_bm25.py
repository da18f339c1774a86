from __future__ import annotations

import json
import logging
import math
import random
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import ConfigError, RetrievalError
from ragkv.retrievers import BM25, BM25Config, Hit, Retriever
from ragkv.retrievers.bm25 import tokenise

CHUNKS = [
    ("a#0", "The cat sat on the mat."),
    ("a#1", "A dog and a cat; the dog barked."),
    ("b#0", "Birds sing."),
    ("b#1", ""),
]


def built(chunks: list[tuple[str, str]], config: BM25Config | None = None) -> BM25:
    index = BM25(config)
    index.build(chunks, generation=7)
    return index


def slow_bm25(chunks: list[tuple[str, str]], question: str, k1: float, b: float) -> dict[str, float]:
    """Lucene's: sum over terms of ln(1 + (N - df + .5) / (df + .5)) * tf / (tf + k1 (1 - b + b l / L))."""
    documents = {chunk_id: tokenise(text) for chunk_id, text in chunks}
    mean = sum(map(len, documents.values())) / len(documents)
    scores = {}
    for chunk_id, tokens in documents.items():
        score = 0.0
        for term in tokenise(question):
            df = sum(term in other for other in documents.values())
            if tf := Counter(tokens)[term]:
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                score += idf * tf / (tf + k1 * (1 - b + b * len(tokens) / mean))
        if score:
            scores[chunk_id] = score
    return scores


corpora = st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=12).map(" ".join), max_size=15).map(
    lambda texts: [(f"c{number:02}", text) for number, text in enumerate(texts)]
)
questions = st.lists(st.sampled_from("abcdefghxyz"), max_size=6).map(" ".join)


@settings(deadline=None, max_examples=150)
@given(corpora, questions, st.integers(1, 20), st.floats(0.1, 3), st.floats(0, 1))
def test_scores_equal_the_formula(chunks: list[tuple[str, str]], question: str, k: int, k1: float, b: float) -> None:
    expected = slow_bm25(chunks, question, k1, b) if chunks else {}
    hits = built(chunks, BM25Config(k1=k1, b=b)).search(question, k)
    assert len(hits) == min(k, len(expected))
    for hit in hits:
        assert hit.score == pytest.approx(expected[hit.chunk_id], rel=1e-5)
    best = sorted(expected.values(), reverse=True)[:k]
    assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-5)
    assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.chunk_id))


@settings(deadline=None, max_examples=50)
@given(corpora, questions, st.randoms(use_true_random=False))
def test_order_of_building_does_not_matter(chunks: list[tuple[str, str]], question: str, rng: random.Random) -> None:
    index = built(chunks)
    before = index.search(question, 5)
    index.build(rng.sample(chunks, len(chunks) // 2), generation=8)  # chunks go, then come back in any order
    index.build(rng.sample(chunks, len(chunks)), generation=9)
    assert index.search(question, 5) == before
    assert index.generation == 9


@settings(deadline=None, max_examples=25)
@given(chunks=corpora, question=questions)
def test_loaded_index_equals_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[tuple[str, str]], question: str
) -> None:
    folder = tmp_path_factory.mktemp("bm25") / "index"
    index = built(chunks, BM25Config(k1=1.2, b=0.5, stop_words=("a",)))
    index.save(folder)
    loaded = BM25.load(folder)
    assert loaded.search(question, 10) == index.search(question, 10)
    assert (loaded.generation, loaded.config, len(loaded)) == (7, index.config, len(chunks))


def test_ties_are_broken_by_id_even_at_the_cut() -> None:
    ids = [f"{number:03}" for number in range(100)]
    random.Random(1).shuffle(ids)
    index = built([(chunk_id, "same words") for chunk_id in ids] + [("zzz", "words words words")])
    assert [hit.chunk_id for hit in index.search("words", 3)] == ["zzz", "000", "001"]


def test_what_shares_no_word_is_not_found() -> None:
    index = built(CHUNKS)
    assert [hit.chunk_id for hit in index.search("CAT", 10)] == ["a#0", "a#1"]
    assert index.search("zebra", 10) == index.search("", 10) == index.search("?!", 10) == []
    assert [hit.chunk_id for hit in index.search("zebra birds", 10)] == ["b#0"]


@pytest.mark.parametrize("chunks", [[], [("a", "")], [("a", "..."), ("b", " ")]])
def test_index_without_words(tmp_path: Path, chunks: list[tuple[str, str]]) -> None:
    index = built(chunks)
    index.save(tmp_path)
    assert index.search("word", 3) == BM25.load(tmp_path).search("word", 3) == BM25().search("word", 3) == []
    assert len(BM25.load(tmp_path)) == len(chunks)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BM25().search("x", 0)
    with pytest.raises(RetrievalError, match="already"):
        built([("a", "x"), ("a", "y")])
    for options in ({"k1": -1.0}, {"k1": math.nan}, {"b": 1.5}, {"b": math.nan}):
        with pytest.raises(ConfigError, match="BM25"):
            BM25Config(**options)  # type: ignore[arg-type]


def test_is_a_retriever_and_its_scores_are_sparse() -> None:
    index: Retriever = BM25()
    assert isinstance(index, Retriever)
    assert (index.name, index.score_kind, index.generation) == ("bm25", "sparse", 0)


def test_searching_from_threads_during_a_build() -> None:
    index = built(CHUNKS)
    whole, half = index.search("cat", 5), built(CHUNKS[:1]).search("cat", 5)

    def search(_: int) -> list[Hit]:
        return index.search("cat", 5)

    with ThreadPoolExecutor(4) as pool:
        results = pool.map(search, range(400))
        for number in range(20):
            index.build(CHUNKS[: 1 if number % 2 else 4], generation=number)
        assert all(result in (whole, half) for result in results)


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
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    assert tokenise(text) == tokens


def test_cjk_neighbours_rank_above_scattered_characters() -> None:
    index = built([("scattered", "大きな学校は北の京都"), ("whole", "私は北京大学の学生"), ("none", "こんにちは")])
    assert [hit.chunk_id for hit in index.search("北京大学", 5)] == ["whole", "scattered"]


def test_stop_words_are_dropped_from_both_sides() -> None:
    index = built(CHUNKS, BM25Config(stop_words=("The", "on")))
    assert index.search("the", 5) == []
    assert index.search("on the cat", 5) == index.search("cat", 5) != []


# ---- files


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    built(CHUNKS).save(tmp_path)
    held = BM25.load(tmp_path)
    (tmp_path / "data-left-by-a-crash").mkdir()
    built([("new", "zebra cat")]).save(tmp_path)
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("cat", 5)] == ["new"]
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert held.search("cat", 5) == built(CHUNKS).search("cat", 5)  # its mapped files live on until it goes
    BM25.load(tmp_path).save(tmp_path)  # onto the files that it reads from
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("cat", 5)] == ["new"]


@pytest.mark.parametrize("step", ["mkdir", "write_text", "replace"])
def test_failed_save_keeps_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    built(CHUNKS).save(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    index = built([("new", "zebra")])
    with monkeypatch.context() as patch:
        patch.setattr(Path, step, full)
        with pytest.raises(RetrievalError, match="No space left"):
            index.save(tmp_path)
    assert BM25.load(tmp_path).search("cat", 5) == built(CHUNKS).search("cat", 5)


def test_every_damaged_file_is_noticed(tmp_path: Path) -> None:
    good = tmp_path / "good"
    built(CHUNKS).save(good)
    files = [path.relative_to(good) for path in good.rglob("*") if path.is_file()]
    assert len(files) == 11
    for name in files:
        for damage in ("missing", "flipped", "short"):
            folder = tmp_path / damage
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(good, folder)
            path = folder / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            if damage == "missing":
                path.unlink()
            else:
                path.write_bytes(data if damage == "flipped" else data[:-3])
            with pytest.raises(RetrievalError, match="rebuild it"):
                BM25.load(folder)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "data": "x"}'])
def test_foreign_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(RetrievalError, match="rebuild it"):
        BM25.load(tmp_path)
    with pytest.raises(RetrievalError, match="rebuild it"):
        BM25.load(tmp_path / "nowhere")


def test_load_follows_a_replacement_that_happens_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(CHUNKS).save(tmp_path)
    stale = json.loads((tmp_path / "manifest.json").read_text())
    built([("new", "zebra")]).save(tmp_path)
    import ragkv.retrievers.persistence as module

    read, answers = module._manifest, [stale]
    monkeypatch.setattr(module, "_manifest", lambda *place: answers.pop() if answers else read(*place))
    assert [hit.chunk_id for hit in BM25.load(tmp_path).search("zebra", 1)] == ["new"]


def test_bm25s_stays_quiet(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG):
        built(CHUNKS).search("cat", 2)
    assert not [record for record in caplog.records if record.name.startswith("bm25s")]
    assert capfd.readouterr() == ("", "")


def test_importing_retrievers_is_light() -> None:
    code = "import sys, ragkv.retrievers; print([m for m in ('numpy', 'bm25s', 'torch') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
