"""The bundled mini on the example corpus gives what the README promises."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from nightly import NIGHTLY

from ragkv import RagKV
from ragkv.doctor.questions import contains_answer

EXAMPLES = Path(__file__).parent.parent / "examples"
QUESTIONS = [json.loads(line) for line in (EXAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    with RagKV.create(tmp_path_factory.mktemp("example") / "index", model="mini", device="cpu") as made:
        made.ingest(EXAMPLES / "corpus")
        yield made


def test_the_corpus_has_every_format_and_every_document_is_asked_about_or_read(rag):
    stats = rag.store.stats()
    files = [path for path in (EXAMPLES / "corpus").rglob("*") if path.is_file()]
    assert stats.documents == len(files)
    assert {path.suffix for path in files} == {".md", ".html", ".pdf"}
    assert {question["document"].rpartition(".")[2] for question in QUESTIONS} == {"md", "html", "pdf"}
    pages = [chunk.page for chunk in rag.store.chunks() if chunk.page is not None]
    assert len(set(pages)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "least"),
    [
        pytest.param("full", 0.9, marks=pytest.mark.nightly),
        ("block", 0.9),
        pytest.param("ape", 0.85, marks=pytest.mark.nightly),
        ("pced", 0.9),
    ],
)
def test_answers_hold_a_gold_answer(rag, engine, least):
    """A margin below the README's figures: two or three of the 40 questions; `make test` asks every second one."""
    accuracy = runpy.run_path(str(EXAMPLES / "accuracy.py"))["accuracy"]
    right = [ok for oks in accuracy(rag, QUESTIONS if NIGHTLY else QUESTIONS[::2], engine).values() for ok in oks]
    assert sum(right) / len(right) >= least


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["block", pytest.param("pced", marks=pytest.mark.nightly)])
def test_questions_one_after_another_are_answered_as_alone(rag, engine):
    """mini was not trained on conversations, so earlier turns are used only for the search."""
    talk, wrong = rag.conversation(), []
    for question in QUESTIONS[: 20 if NIGHTLY else 8]:
        text = question["question"]
        answer = rag.query(talk.ask(text, engine=engine, max_new_tokens=48))
        talk.add(text, answer.text)
        wrong += [text] * (not contains_answer(answer.text, question["answers"]))
    assert wrong == []


@pytest.fixture
def small(tmp_path):
    """One document, and a question about it."""
    (tmp_path / "corpus").mkdir()
    shutil.copy(EXAMPLES / "corpus" / "companies" / "linodyne-paper.md", tmp_path / "corpus")
    (tmp_path / "questions.jsonl").write_text(json.dumps(QUESTIONS[0]))
    return ("--folder", tmp_path)


def result(capsys, *arguments: object) -> str:
    main = runpy.run_path(str(EXAMPLES / "accuracy.py"))["main"]
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_accuracy_as_typed(capsys, small):
    """All options of the README's commands, with one question per corpus."""
    asked = ("--engines", "block", "--limit", 1, "--dtype", "float32", "--top-k", 2)
    assert "block  1 hop    1 of   1  100.0%" in result(capsys, *small, *asked)
    found = json.loads(result(capsys, *asked, "--retrieval", "bm25", "--worlds", 1, "--hops", 1, "--json"))
    assert [(row["engine"], row["hops"], row["n"]) for row in found["rows"]] == [("block", 1, 1)]
    assert (found["options"]["retrieval"], found["options"]["dtype"], found["options"]["seed"]) == (
        "bm25",
        "float32",
        2001,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--folder", "/nowhere"), "/nowhere has no questions.jsonl"),
        (("--hops", 7, "--engines", "block"), "no question is left to ask"),
        (("--limit", 1, "--engines", "warp"), "Unknown engine 'warp'"),
        (("--limit", 1, "--dtype", "float3"), "dtype"),
    ],
)
def test_accuracy_refuses_in_a_sentence(capsys, small, arguments, says):
    with pytest.raises(SystemExit):
        result(capsys, *small, *arguments)
    assert says in capsys.readouterr().err


SAYS = {
    "01_ingest_and_query": ("0 documents added, 18 unchanged", "employs 360 people", "4 of 4 chunks from stored KV"),
    "02_streaming": ("started by Gilea Casinberg", "first token after", "... cancelled"),
    "03_engines_compared": ("ape    Yeladquor Pumps employs 924 people. (", "is from companies/yeladquor-pumps.md"),
    "04_async": ("started by Gilea Casinberg", "employs 360 people", "[CancelledError("),
    "05_llama_index_query_engine": ("employs 360 people", "'misses': 0", "1931"),
    "06_llama_index_ingestion": ("9 nodes stored, 9 encoded", "again: 3 documents unchanged", "2 documents left"),
    "07_own_retriever": ("employs 360 people", "'misses': 1", "founded by Gilea Casinberg"),
    "08_transformers_generate": ("prompt tokens are in the cache", "1931"),
    "09_many_questions": ("12 answers from", "question 1: No document matches", "question 2: ", "employs 360 people"),
}


def test_every_numbered_example_is_run_and_short():
    numbered = sorted(EXAMPLES.glob("0*.py"))
    assert [path.stem for path in numbered] == sorted(SAYS)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 60 for path in numbered)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_does_what_it_says(rag, name, capsys, monkeypatch):
    monkeypatch.setenv("RAGKV_INDEX", str(rag.folder))
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    message = capsys.readouterr().out
    assert [words for words in SAYS[name] if words not in message] == []


def test_the_first_question_is_what_the_demo_asks(capsys):
    runpy.run_path(str(EXAMPLES / "first_question.py"))
    assert capsys.readouterr().out.strip() == QUESTIONS[0]["question"]
