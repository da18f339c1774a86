"""Which chunks of an index answer the questions of a file."""

from __future__ import annotations

import json

import pytest

from ragkv.errors import ConfigError, RetrievalError
from ragkv.evaluation.relevance import judged_questions


@pytest.fixture
def judged(rag, tmp_path):
    """The task of some lines, with relevant chunks as the sources that they come from."""

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
    _, found = judged({"question": "a", "document": "bolt.txt"})  # the source of one, the end of another: its own name
    assert found["1"] == _texts(rag, "bolt.txt")
    (documents / "less").mkdir()
    (documents / "less" / "bolt.txt").write_text("A third Bolt.")
    (documents / "bolt.txt").unlink()
    rag.ingest(documents, prune=True)
    with pytest.raises(ConfigError, match=r"2 documents 'bolt\.txt'; give more of the path"):
        judged({"question": "a", "document": "bolt.txt"})
