"""Retrieval is measured on an index and on a benchmark's corpus, outside any index."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from benchmarkfolder import CountingEmbedder
from hypothesis import given
from hypothesis import strategies as st

from ragkv.benchmarks.evaluation.retrieval import MemoEmbedder, MemoReranker, measure
from ragkv.doctor.retrieval import RetrievalQuestion, RetrievalTask, Wording, judged_questions
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
    figure_of = {(figure.engine, figure.metric): figure for figure in figures}
    assert asked == [("one", 2), ("two", 2)]
    assert len(figures) == len(figure_of) == 2 * 4 * 2
    values = {metric: figure.value for (engine, metric), figure in figure_of.items() if engine == "good"}
    assert values["recall@1"] == pytest.approx((0 + 1 / 2) / 2)
    assert values["recall@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert values["hit@1"] == pytest.approx(1 / 2)
    assert values["mrr@2"] == pytest.approx((1 / 2 + 1) / 2)
    # ndcg@2: "one" 1/log2(3); "two" 1 / (1 + 1/log2(3))
    assert values["ndcg@2"] == pytest.approx((0.6309297535714575 + 1 / 1.6309297535714575) / 2)
    assert all(figure.value == 0 for (engine, _), figure in figure_of.items() if engine == "nothing")
    row = asdict(figure_of["good", "recall@1"])
    assert list(row) == ["task", "engine", "metric", "value", "n", "ci95", "seed"]
    assert (row["task"], row["n"], row["seed"], row["ci95"]) == ("mine", 2, 4, (0.0, 0.5))


def test_a_question_s_own_passage_is_taken_out_and_what_follows_moves_up():
    task = RetrievalTask(
        name="t", judgements=[RetrievalQuestion(question_id="q", question="q", relevant={"a": 1, "b": 1}, excluded="q")]
    )

    def search(question: str, k: int) -> list[str]:
        return ["q", "a", "b"][:k]

    figure_of = {figure.metric: figure.value for figure in measure(task, {"s": search}, [2], seed=0)}
    assert figure_of == {"recall@2": 1, "hit@2": 1, "mrr@2": 1, "ndcg@2": 1}


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
    task, relevant = judged(
        {"question": "a", "sources": ["halden.md", "bolt.txt"]},
        {"question": "b", "document": "bolt.txt"},
        {"id": "mine", "question": "c", "source": "documents/corvo.txt"},
    )
    assert relevant == {
        "1": sorted(_texts(rag, "halden.md") + _texts(rag, "bolt.txt")),
        "2": _texts(rag, "bolt.txt"),
        "mine": _texts(rag, "corvo.txt"),
    }
    assert (task.name, task.passages, list(task.unjudged), list(task.notes)) == ("mine", None, [], [])


def test_an_answer_or_evidence_is_looked_for_in_every_chunk(rag, judged):
    _, relevant = judged(
        {"question": "a", "answer": "ida  BRANDT"},
        {"question": "b", "answers": ["Tarn", "nowhere"]},
        {"question": "c", "answer": "42", "evidence": "valves for\nships"},
    )
    assert relevant["1"] == _texts(rag, "corvo.txt", "Ida Brandt")
    assert relevant["2"] == sorted(_texts(rag, "halden.md", "Tarn") + _texts(rag, "corvo.txt", "Tarn"))
    assert relevant["3"] == _texts(rag, "bolt.txt", "valves")
    assert all(relevant.values())


def test_empty_evidence_marks_a_question_that_nothing_answers(rag, judged):
    task, relevant = judged(
        {"question": "a", "answer": "Tarn", "evidence": [], "sources": []},
        {"question": "b", "answer": "Tarn", "evidence": None},
    )
    assert (list(task.unjudged), list(relevant)) == (["1"], ["2"])


def test_a_named_document_with_an_answer_gives_the_chunks_of_it_that_hold_it(rag, judged):
    task, relevant = judged(
        {"question": "a", "document": "corvo.txt", "answer": "Tarn"},
        {"question": "b", "document": "bolt.txt", "answer": "yes"},
    )
    assert relevant["1"] == _texts(rag, "corvo.txt", "Tarn")
    assert relevant["2"] == _texts(rag, "bolt.txt")
    assert list(task.notes) == ["1 questions judged by document alone: no chunk of it holds the answer"]


def test_questions_without_a_relevant_chunk_are_counted_not_dropped(rag, judged):
    task, relevant = judged(
        {"question": "a", "answer": "Mira Oskel"},
        {"question": "b", "answer": "not in any chunk"},
        {"question": "c", "document": "gone.txt", "answer": "Tarn"},
        {"question": "d"},
    )
    assert list(relevant) == ["1"]
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
    _, relevant = judged({"question": "a", "document": "more/bolt.txt"})
    assert relevant["1"] == ["Another Bolt makes nuts in Tarn."]
    _, relevant = judged({"question": "a", "document": "bolt.txt"})  # an exact source comes before a suffix
    assert relevant["1"] == _texts(rag, "bolt.txt")
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
