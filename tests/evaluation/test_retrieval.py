"""Retrieval is measured on an index and on a benchmark's corpus, whose vectors are stored for the next run."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from benchmarkfolder import CountingEmbedder
from hypothesis import given
from hypothesis import strategies as st
from package import in_child

from ragkv.benchmarks.evaluation.retrieval import Batches, MemoEmbedder, MemoReranker, Wording, judged_questions
from ragkv.doctor.metrics import Passage, RetrievalQuestion, RetrievalTask, measure
from ragkv.errors import ConfigError, RetrievalError

TASK = RetrievalTask(
    name="mine",
    judgements=[
        RetrievalQuestion(question_id="1", question="one", relevant={"a": 1}),
        RetrievalQuestion(question_id="2", question="two", relevant={"b": 1, "c": 1}),
    ],
)


def test_every_search_is_measured_on_every_question_at_every_k():
    rankings = {"one": ["x", "a", "b"], "two": ["b", "x", "c"]}
    asked: list[tuple[str, int]] = []

    def search(question: str, k: int) -> list[str]:
        asked.append((question, k))
        return rankings[question][:k]

    figures = measure(TASK, {"good": search, "nothing": lambda question, k: []}, [1, 2], seed=4)
    found = {(figure.engine, figure.metric): figure for figure in figures}
    assert asked == [("one", 2), ("two", 2)]
    assert len(figures) == len(found) == 2 * 4 * 2
    values = {metric: figure.value for (engine, metric), figure in found.items() if engine == "good"}
    assert values["recall@1"] == pytest.approx((0 + 1 / 2) / 2)
    assert values["recall@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert values["hit@1"] == pytest.approx(1 / 2)
    assert values["mrr@2"] == pytest.approx((1 / 2 + 1) / 2)
    # ndcg@2: "one" 1/log2(3); "two" 1 / (1 + 1/log2(3))
    assert values["ndcg@2"] == pytest.approx((0.6309297535714575 + 1 / 1.6309297535714575) / 2)
    assert all(figure.value == 0 for (engine, _), figure in found.items() if engine == "nothing")
    row = found["good", "recall@1"].to_json()
    assert list(row) == ["task", "engine", "metric", "value", "n", "ci95", "seed"]
    assert (row["task"], row["n"], row["seed"], row["ci95"]) == ("mine", 2, 4, (0.0, 0.5))


def test_a_question_s_own_passage_is_taken_out_and_what_follows_moves_up():
    task = RetrievalTask(
        name="t", judgements=[RetrievalQuestion(question_id="q", question="q", relevant={"a": 1, "b": 1}, excluded="q")]
    )

    def search(question: str, k: int) -> list[str]:
        return ["q", "a", "b"][:k]

    found = {figure.metric: figure.value for figure in measure(task, {"s": search}, [2], seed=0)}
    assert found == {"recall@2": 1, "hit@2": 1, "mrr@2": 1, "ndcg@2": 1}


def test_progress_is_told():
    result: list[tuple[int, int, str]] = []
    measure(TASK, {"s": lambda question, k: []}, [1], seed=0, on_progress=lambda *step: result.append(step))
    assert result == [(0, 2, "s"), (1, 2, "s"), (2, 2, "")]


def test_a_question_is_embedded_once_for_all_modes():
    inner = CountingEmbedder()
    embedder = MemoEmbedder(inner)
    first = embedder.embed_query("one")
    assert embedder.embed_query("one") is first
    embedder.embed_query("two")
    embedder.embed_query("one")
    assert inner.asked == ["one", "two", "one"]
    assert (embedder.name, embedder.modes, embedder.fingerprint) == (inner.name, inner.modes, inner.fingerprint)
    assert len(embedder.embed_documents(["a", "b"]).dense) == 2


def test_a_text_is_judged_once_per_question():
    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.judged: list[tuple[str, str]] = []

        def score(self, question: str, texts: Sequence[str]) -> list[float]:
            self.judged += [(question, text) for text in texts]
            return [float(len(question) * 10 + len(text)) for text in texts]

    inner = Counting()
    reranker = MemoReranker(inner)
    assert reranker.score("q", ["a", "bb"]) == [11, 12]
    assert reranker.score("q", ["bb", "ccc", "bb", "a"]) == [12, 13, 12, 11]
    assert reranker.score("qq", ["a"]) == [21]
    assert reranker.score("qq", []) == []
    assert inner.judged == [("q", "a"), ("q", "bb"), ("q", "ccc"), ("qq", "a")]


KINDS = ("dense", "sparse", "colbert")
PASSAGES = [Passage(passage_id=f"p{i}", text=f"passage {i} of {i % 3} é") for i in range(10)]
PASSAGES[4] = Passage(passage_id="empty", text="")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_kind_comes_back_in_the_corpus_s_order(tmp_path):
    embedder = CountingEmbedder()
    batches = Batches(tmp_path, embedder, PASSAGES, KINDS, batch=4)
    steps = []
    assert batches.embed(lambda done, total: steps.append((done, total))) == 10
    assert steps == [(4, 10), (8, 10), (10, 10)]
    expected = embedder.embed_documents([passage.text for passage in PASSAGES])
    ids = [passage.passage_id for passage in PASSAGES]
    for kind in ("dense", "sparse"):
        assert [name for name, _ in getattr(batches, kind)()] == ids
    np.testing.assert_array_equal(np.stack([vector for _, vector in batches.dense()]), expected.dense)
    assert [weights for _, weights in batches.sparse()] == list(expected.sparse)
    late = batches.colbert(ids[::-1])
    assert list(late) == ids[::-1]
    for name, rows in zip(ids, expected.colbert, strict=True):
        found = late[name]
        assert found.shape == rows.shape
        np.testing.assert_allclose(found, rows, atol=5e-4)


def test_a_second_run_embeds_nothing_and_another_kind_only_itself(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"], batch=4).embed()
    before = _files(tmp_path)
    again = CountingEmbedder()
    assert Batches(tmp_path, again, PASSAGES, ["dense"], batch=4).embed() == 0
    assert again.texts == []
    assert Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed() == 10
    assert {name: data for name, data in _files(tmp_path).items() if ".dense" in name} == before


def test_only_batches_with_a_changed_passage_are_embedded_again(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed()
    changed = [*PASSAGES[:9], Passage(passage_id="p9", text="something else")]
    embedder = CountingEmbedder()
    batches = Batches(tmp_path, embedder, changed, KINDS, batch=4)
    assert batches.embed() == 2
    assert embedder.texts == [passage.text for passage in changed[8:]]
    assert dict(batches.sparse())["p9"] == {"something": 1.0, "else": 1.0}


def test_another_embedder_reads_nothing_of_the_first(tmp_path):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"]).embed()
    other = CountingEmbedder()
    other.fingerprint = "f" * 64
    assert Batches(tmp_path, other, PASSAGES, ["dense"]).embed() == 10


@pytest.mark.parametrize("kind", [*KINDS, "ends"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_file_is_made_again(tmp_path, kind, damage):
    Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed()
    before = _files(tmp_path)
    [victim, *_] = sorted(tmp_path.rglob(f"*.{kind}.*"))
    data = victim.read_bytes()
    victim.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"not an array"}[damage])
    assert Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4).embed() in (2, 4)
    assert _files(tmp_path).keys() == before.keys()
    batches = Batches(tmp_path, CountingEmbedder(), PASSAGES, KINDS, batch=4)
    assert batches.embed() == 0
    assert len(list(batches.dense())) == len(list(batches.sparse())) == 10
    assert len(batches.colbert([passage.passage_id for passage in PASSAGES])) == 10


@pytest.mark.parametrize("writes", [0, 1, 7])
def test_a_killed_run_goes_on_where_it_was(tmp_path, writes):
    """Killed between writing a file and its rename: complete files count, the partial one does not."""
    passages = [Passage(passage_id=f"p{i}", text=f"passage {i}") for i in range(40)]

    def run() -> None:
        left, replace = iter(range(writes)), Path.replace

        def counted(self: Path, target: Path) -> Path:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(self, target)

        Path.replace = counted
        Batches(tmp_path / "work", CountingEmbedder(), passages, ["dense", "sparse"], batch=4).embed()

    assert in_child(run) == -signal.SIGKILL
    embedder = CountingEmbedder()
    batches = Batches(tmp_path / "work", embedder, passages, ["dense", "sparse"], batch=4)
    assert batches.embed() == 40 - 4 * (writes // 2)
    fresh = Batches(tmp_path / "fresh", CountingEmbedder(), passages, ["dense", "sparse"], batch=4)
    fresh.embed()
    for one, other in zip(batches.dense(), fresh.dense(), strict=True):
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])
    assert list(batches.sparse()) == list(fresh.sparse())


def test_an_unwritable_folder_and_a_missing_kind_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RetrievalError, match="give another --work"):
        Batches(tmp_path / "file", CountingEmbedder(), PASSAGES, ["dense"]).embed()
    embedder = CountingEmbedder()
    embedder.embed_documents = lambda texts: type(embedder)().embed_query("one")
    with pytest.raises(RetrievalError, match="gave 1 dense vectors for 10 passages"):
        Batches(tmp_path, embedder, PASSAGES, ["dense"]).embed()


def test_a_full_disk_leaves_no_torn_file(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragkv.util.files.os.fsync", full)
    with pytest.raises(RetrievalError, match="No space left"):
        Batches(tmp_path, CountingEmbedder(), PASSAGES, ["dense"]).embed()
    assert _files(tmp_path) == {}


@pytest.fixture
def judged(rag, tmp_path):
    """The task of these lines, with relevant chunks given as their sources."""

    def read(*lines: dict):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        task = judged_questions(path, rag.store)
        texts = {chunk.chunk_id: chunk.text for chunk in rag.store.chunks()}
        return task, {j.question_id: sorted(texts[chunk] for chunk in j.relevant) for j in task.judgements}

    return read


def _texts(rag, name: str, holding: str = "") -> list[str]:
    [document] = [d.document.document_id for d in rag.store.documents() if d.document.source == name]
    return sorted(chunk.text for chunk in rag.store.chunks(document) if holding in chunk.text)


def test_named_documents_give_all_their_chunks(rag, judged):
    task, found = judged(
        {"question": "a", "sources": ["halden.md", "bolt.txt"]},
        {"question": "b", "document": "bolt.txt"},
        {"id": "mine", "question": "c", "source": "documents/corvo.txt"},
    )
    assert found == {
        "1": sorted(_texts(rag, "halden.md") + _texts(rag, "bolt.txt")),
        "2": _texts(rag, "bolt.txt"),
        "mine": _texts(rag, "corvo.txt"),
    }
    assert (task.name, task.passages, list(task.unjudged), list(task.notes)) == ("mine", None, [], [])


def test_an_answer_or_evidence_is_looked_for_in_every_chunk(rag, judged):
    _, found = judged(
        {"question": "a", "answer": "ida  BRANDT"},
        {"question": "b", "answers": ["Tarn", "nowhere"]},
        {"question": "c", "answer": "42", "evidence": "valves for\nships"},
    )
    assert found["1"] == _texts(rag, "corvo.txt", "Ida Brandt")
    assert found["2"] == sorted(_texts(rag, "halden.md", "Tarn") + _texts(rag, "corvo.txt", "Tarn"))
    assert found["3"] == _texts(rag, "bolt.txt", "valves")
    assert all(found.values())


def test_empty_evidence_marks_a_question_that_nothing_answers(rag, judged):
    task, found = judged(
        {"question": "a", "answer": "Tarn", "evidence": [], "sources": []},
        {"question": "b", "answer": "Tarn", "evidence": None},
    )
    assert (list(task.unjudged), list(found)) == (["1"], ["2"])


def test_a_named_document_with_an_answer_gives_the_chunks_of_it_that_hold_it(rag, judged):
    task, found = judged(
        {"question": "a", "document": "corvo.txt", "answer": "Tarn"},
        {"question": "b", "document": "bolt.txt", "answer": "yes"},
    )
    assert found["1"] == _texts(rag, "corvo.txt", "Tarn")
    assert found["2"] == _texts(rag, "bolt.txt")
    assert list(task.notes) == ["1 questions judged by document alone: no chunk of it holds the answer"]


def test_questions_without_a_relevant_chunk_are_counted_not_dropped(rag, judged):
    task, found = judged(
        {"question": "a", "answer": "Mira Oskel"},
        {"question": "b", "answer": "not in any chunk"},
        {"question": "c", "document": "gone.txt", "answer": "Tarn"},
        {"question": "d"},
    )
    assert list(found) == ["1"]
    assert list(task.unjudged) == ["2", "3", "4"]


def test_an_index_without_any_relevant_chunk_is_refused(judged):
    with pytest.raises(RetrievalError, match="No chunk of the index is relevant to any question"):
        judged({"question": "a", "answer": "nowhere to be found"})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"question": "a", "sources": [""]}, '"sources" is a text or a list of texts'),
        ({"question": "a", "sources": [1]}, '"sources" is a text or a list of texts'),
        ({"question": "a", "evidence": " "}, '"evidence" is a text or a list of texts'),
        ({"question": "a", "source": "b", "document": "c"}, 'give "source" or "document", not both'),
        ({"question": " "}, 'with a "question"'),
        ({"id": None, "question": "a"}, '"id" must be an id'),
    ],
)
def test_a_bad_line_is_one_sentence(judged, line, says):
    with pytest.raises(ConfigError, match=says) as error:
        judged({"question": "fine", "answer": "Tarn"}, line)
    assert "mine.jsonl, line 2" in str(error.value)


def test_a_name_that_several_documents_end_with_is_refused(rag, documents, judged):
    (documents / "more").mkdir()
    (documents / "more" / "bolt.txt").write_text("Another Bolt makes nuts in Tarn.")
    rag.ingest(documents)
    _, found = judged({"question": "a", "document": "more/bolt.txt"})
    assert found["1"] == ["Another Bolt makes nuts in Tarn."]
    _, found = judged({"question": "a", "document": "bolt.txt"})  # an exact source comes before a suffix
    assert found["1"] == _texts(rag, "bolt.txt")
    (documents / "less").mkdir()
    (documents / "less" / "bolt.txt").write_text("A third Bolt.")
    (documents / "bolt.txt").unlink()
    rag.ingest(documents, prune=True)
    with pytest.raises(ConfigError, match=r"2 documents 'bolt\.txt'; give more of the path"):
        judged({"question": "a", "document": "bolt.txt"})


TEXT = (
    "Oskel\u2019s well-known mill (\u201cHalden Works, Ltd.\u201d) made 1,250 valves of 3.5 mm in the U.S. from "
    "1907\u20131910, in C#."
)


@pytest.mark.parametrize(
    "answer",
    [
        "Halden Works Ltd",
        "halden works, ltd",
        "Oskel's well known mill",
        "oskels wellknown",
        "1250 valves",
        "1,250",
        "US",
        "U.S.",
        "1907-1910",
        "1907 1910",
        "3.5 mm",
        "C#",
        "works ltd made",
    ],
)
def test_punctuation_makes_no_difference(answer):
    assert Wording.of(TEXT).holds(Wording.of(answer))


@pytest.mark.parametrize("answer", ["35 mm", "12.50", "C++", "!!", "Halden Mill", "19071910 C", "F#"])
def test_but_numbers_and_signs_do(answer):
    assert not Wording.of(TEXT).holds(Wording.of(answer))


@given(st.text(max_size=40), st.text(max_size=10), st.text(max_size=10))
def test_a_text_holds_its_pieces(text, before, after):
    assert Wording.of(f"{before} {text} {after}").holds(Wording.of(text))
