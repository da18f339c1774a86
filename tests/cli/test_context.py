"""`ragkv query --context`: questions about whole files without an index."""

import json

import pytest

from ragkv import RagKV
from ragkv.cli.ingest import MINI_NOTE

QUESTION = "Who founded Halden Works?"


@pytest.fixture
def about(ragkv, documents, model_folder):
    def run(*arguments: object, model=model_folder):
        return ragkv(
            "query", "--context", documents / "halden.md", "--context", documents / "bolt.txt", "--model", model,
            "--device", "cpu", "--max-new-tokens", 4, *arguments,
        )  # fmt: skip

    return run


def test_the_files_are_the_context_in_the_order_given(about, documents, model_folder, tmp_path, monkeypatch):
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    answer = json.loads(about(QUESTION, "--engine", "full", "--json").out)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    assert [source["document"] for source in answer["sources"]] == ["bolt.txt", "halden.md"]
    with RagKV.create(tmp_path / "index", model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(documents)
        given = {chunk.text: chunk for chunk in rag.store.chunks()}
        texts = [source["text"] for source in answer["sources"]]
        scored = [s for text in texts for s in rag.retrieve("founded", top_k=9) if s.chunk == given[text.strip()]]
        assert len(scored) == 2
        for engine in ("full", "block", "ape", "pced"):
            payload = json.loads(about(QUESTION, "--engine", engine, "--json").out)
            alike = [rag.chunk(text, chunk_id="x") for text in texts]
            chunks = [type(s)(chunk=c, source="", retrieval_score=0, rerank_score=None, score=0.5) for s, c in
                      zip(scored, alike, strict=True)]  # fmt: skip
            assert payload["answer"] == rag.query(QUESTION, engine=engine, chunks=chunks, max_new_tokens=4).text
            assert payload["engine"] == engine


def test_many_questions_about_them(about, questions, tmp_path):
    output = tmp_path / "answers.jsonl"
    done = about("--questions", questions, "--output", output, "--engine", "block")
    assert done.code == 0
    assert "2 answers in" in done.out
    found = [json.loads(line) for line in output.read_text().splitlines()]
    for row in found:
        alone = json.loads(about(row["question"], "--engine", "block", "--json").out)
        assert row["answer"] == alone["answer"]
    assert [row["kv"]["misses"] for row in found] == [2, 0]  # encoded once
    done = json.loads(about("--questions", questions, "--output", output, "--engine", "block", "--json").out)
    assert (done["kept"], done["answered"]) == (2, 0)


def test_what_a_person_reads(about, tmp_path):
    done = about(QUESTION, "--engine", "full")
    assert done.code == 0
    assert "[1] bolt.txt (as given)" in done.err
    assert "full on 2 files" in done.err
    done = about(QUESTION, "--quiet", "--stream")
    assert (done.err, done.code) == ("", 0)
    done = about(QUESTION, model="mini")
    assert MINI_NOTE not in done.err  # --model mini was given


def test_settings_of_the_user_file_hold(about, ragkv, documents, tmp_path, monkeypatch):
    folder = tmp_path / "xdg" / "ragkv"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[ingest]\nmax_file = 10\n")
    done = about(QUESTION)
    assert done.code == 1
    assert "ingest.max_file" in done.err
