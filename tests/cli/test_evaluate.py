"""`ragkv eval retrieval` on an index and on benchmarks, `ragkv eval answers` and `ragkv eval tasks`."""

import json

import pytest
import words
from benchmarkfolder import CountingEmbedder, beir_folder, loft_folder

from ragkv import RagKV
from ragkv.evaluation import retrieval
from ragkv.retrievers.bm25 import tokenise
from ragkv.runtime import Runtime


@pytest.fixture
def embedder(monkeypatch) -> CountingEmbedder:
    """The embedder `--embedder words`; `--reranker words` counts the question's words in a text."""
    made = CountingEmbedder()
    words.install(monkeypatch, embedder=lambda **_: made)
    return made


@pytest.fixture
def judged(tmp_path):
    path = tmp_path / "judged.jsonl"
    lines = [
        {"id": "a", "question": "Who founded Halden Works?", "answer": "Mira Oskel", "document": "halden.md"},
        {"id": "b", "question": "What does Bolt Ltd make?", "answer": "valves"},
        {"id": "c", "question": "Who founded Corvo Mills?", "answer": "Ida Brandt"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_own_questions_are_asked_of_the_index(ragkv, index, judged):
    found = ragkv("eval", "retrieval", judged, "--index", index, "--modes", "bm25", "--k", "1,2,3,4,5,6,7,8,9")
    assert found.code == 0, found.err
    header, row = found.out.splitlines()
    assert len(row) > 100  # not truncated without a terminal
    assert header.split() == ["engine", *(f"recall@{k}" for k in range(1, 10)), "mrr@9", "ndcg@9"]
    assert row.split() == ["bm25", *["1.000", "±.00"] * 11]
    assert "judged: 2 questions" in found.err
    assert "1 question without a relevant passage, not measured: c" in found.err


def test_json_is_one_list_of_rows(ragkv, index, judged):
    found = ragkv("eval", "retrieval", judged, "--index", index, "--modes", "bm25", "--json", "--quiet", "--seed", 3)
    rows = json.loads(found.out)
    assert (found.code, found.err) == (0, "")
    assert {row["metric"] for row in rows} == {
        f"{name}@{k}" for name in ("recall", "hit", "mrr", "ndcg") for k in (1, 5, 10)
    }
    assert rows[0] == {
        "task": "judged",
        "engine": "bm25",
        "metric": "recall@1",
        "value": 1.0,
        "n": 2,
        "ci95": [1.0, 1.0],
        "seed": 3,
    }


def test_an_index_gives_every_mode_that_it_has_vectors_for(
    ragkv, tmp_path, documents, model_folder, judged, monkeypatch
):
    words.install(monkeypatch)
    settings = {"model": str(model_folder), "device": "cpu", "embedder": "words", "reranker": "words"}
    for name, vectors in {"all": ("dense", "sparse", "colbert"), "some": ("dense",)}.items():
        with RagKV.create(tmp_path / name, vectors=vectors, **settings) as rag:
            rag.ingest(documents)

    def engines(name, *more):
        found = ragkv("eval", "retrieval", judged, "--index", tmp_path / name, "--json", *more)
        assert found.code == 0, found.err
        rows = [row for row in json.loads(found.out) if row["metric"] == "hit@5"]
        assert all(row["value"] == 1 for row in rows)  # two documents of one chunk
        return [row["engine"] for row in rows]

    modes = ["dense", "sparse", "colbert", "hybrid", "bm25"]
    assert engines("all") == [engine for mode in modes for engine in (mode, f"{mode}+rerank")]
    assert engines("all", "--no-rerank") == modes
    assert engines("some", "--rerank", "--candidates", 1) == [
        "dense+rerank",
        "hybrid+rerank",
        "bm25+rerank",
    ]
    found = ragkv("eval", "retrieval", judged, "--index", tmp_path / "some", "--modes", "sparse,dense,hybrid")
    assert (found.code, found.out) == (1, "")
    assert 'has no sparse vectors, which retrieval "sparse" needs; it can serve dense, hybrid' in found.sentence


@pytest.mark.parametrize("make", [beir_folder, loft_folder])
def test_a_benchmark_is_measured_in_every_mode_of_the_embedder(ragkv, tmp_path, embedder, make):
    folder, work = make(tmp_path / "tarn"), tmp_path / "work"
    command = ["eval", "retrieval", folder, "--embedder", "words", "--work", work, "--json"]
    found = ragkv(*command)
    assert found.code == 0, found.err
    recall = {row["engine"]: row["value"] for row in json.loads(found.out) if row["metric"] == "recall@5"}
    assert list(recall) == ["dense", "sparse", "colbert", "hybrid", "bm25"]
    # of four passages, dense search ranks all, and lexical search those that share a word with the question
    assert recall["dense"] == recall["colbert"] == recall["hybrid"] == 1
    assert recall["bm25"] == recall["sparse"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert len(embedder.texts) == 4
    assert ragkv(*command).out == found.out
    assert len(embedder.texts) == 4  # all vectors were in the work folder


def test_without_an_embedder_there_is_bm25_and_a_word_about_it(ragkv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ragkv("eval", "retrieval", beir_folder(tmp_path / "tarn"))
    assert [line.split()[0] for line in found.out.splitlines()] == ["engine", "bm25"]
    assert "Without --embedder only BM25 is measured" in found.err
    assert "beir/tarn: 3 questions, 4 passages" in found.err
    assert not (tmp_path / "ragkv-eval").exists()


def test_the_reranker_is_measured_beside_the_plain_mode(ragkv, tmp_path, monkeypatch):
    class LongWords:
        """A text is relevant if it shares a word of five letters or more."""

        name = "long words"

        def score(self, question, texts):
            words = {word for word in tokenise(question) if len(word) > 4}
            return [5.0 if words & set(tokenise(text)) else -5.0 for text in texts]

    monkeypatch.setattr(retrieval, "load_reranker", lambda name, **_: LongWords())
    folder = beir_folder(tmp_path / "tarn")

    def engines(*more, k=10):
        found = ragkv("eval", "retrieval", folder, "--reranker", "words", "--json", "--k", k, *more)
        assert found.code == 0, found.err
        return {row["engine"]: row["value"] for row in json.loads(found.out) if row["metric"] == f"mrr@{k}"}

    # BM25 ranks "Varn is a town" before the flour, because of "is"; the reranker swaps them
    assert engines() == {"bm25": pytest.approx(5 / 6), "bm25+rerank": 1}
    assert engines("--rerank") == {"bm25+rerank": 1}
    assert engines("--no-rerank") == {"bm25": pytest.approx(5 / 6)}
    # at k = 1 the right passage is among the two candidates, but not the first
    assert engines("--rerank", "--candidates", 1, k=1) == {"bm25+rerank": pytest.approx(2 / 3)}
    assert engines("--rerank", "--candidates", 2, k=1) == {"bm25+rerank": 1}


def test_figures_are_written_as_markdown_and_json(ragkv, tmp_path):
    folder = beir_folder(tmp_path / "tarn")
    with (folder / "queries.jsonl").open("a") as file:
        file.write('{"_id": "q4", "text": "Who?"}\n')
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.write("q4\td1\t0\n")
    found = ragkv("eval", "retrieval", folder, "--output", tmp_path / "r.md", "--k", 5, "--quiet")
    lines = (tmp_path / "r.md").read_text().splitlines()
    assert lines[:4] == ["# beir/tarn", "", "| engine | recall@5 | mrr@5 | ndcg@5 |", "| --- | ---: | ---: | ---: |"]
    assert lines[4].startswith("| bm25 | 0.833 ±.")
    assert "- 1 question without a relevant passage, not measured: q4" in lines
    printed = ragkv("eval", "retrieval", folder, "--output", tmp_path / "r.json", "--json", "--quiet")
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["rows"] == json.loads(printed.out)
    assert (kept["questions"], kept["unjudged"], kept["passages"], kept["notes"]) == (3, ["q4"], 4, [])
    assert found.err == printed.err == ""


def test_the_vectors_of_the_corpus_are_those_that_the_modes_need(ragkv, tmp_path, monkeypatch):
    asked = {}

    def load(name, **settings):
        asked.update(settings)
        return CountingEmbedder()

    monkeypatch.setattr(retrieval, "load_embedder", load)
    monkeypatch.setattr(retrieval, "embedder_modes", lambda _: frozenset({"dense"}))
    work = tmp_path / "work"
    command = ["eval", "retrieval", beir_folder(tmp_path / "tarn"), "--embedder", "words", "--work", work]
    assert ragkv(*command, "--modes", "dense,bm25", "--max-tokens", 64, "--device", "cpu").code == 0
    assert asked == {"modes": {"dense"}, "max_tokens": 64, "device": "cpu"}
    assert {path.name.split(".", 1)[1] for path in work.rglob("*.np*")} == {"dense.npy"}
    asked.clear()
    assert ragkv(*command, "--modes", "bm25").code == 0
    assert asked == {}  # a lexical search does not load the embedder


SMALL = "secret-code(words=5)"


@pytest.fixture
def ask(ragkv, model_folder, tmp_path):
    def run(*arguments, engines="full,pced(gamma=1)"):
        own = ["--model", model_folder, "--work", tmp_path / "work", "--engines", engines, "--max-new-tokens", 3]
        return ragkv("eval", "answers", *arguments, *own)

    return run


def test_rows_of_a_task(ask, tmp_path):
    output = tmp_path / "out.json"
    found = ask(SMALL, "--chunks", "1,2", "--limit", 2, "--json", "--output", output, "--seed", 3)
    assert found.code == 0, found.err
    rows = json.loads(found.out)
    assert [(row["task"], row["engine"], row["n"]) for row in rows] == [
        (f"{SMALL}/{chunks}", engine, 2) for chunks in (1, 2) for engine in ("full", "pced(gamma=1)")
    ]
    assert [row["baseline"] for row in rows[:2]] == [None, "full"]
    assert all(row["options"] == ({} if row["engine"] == "full" else {"gamma": 1}) for row in rows)
    assert all(row["chunks"] == int(row["task"][-1]) and row["seed"] == 3 for row in rows)
    report = json.loads(output.read_text())
    assert report["rows"] == rows
    assert [(task["metric"], task["examples"]) for task in report["tasks"]] == [("subspan_em", 2)] * 2


def test_a_table_and_its_markdown(ask, tmp_path):
    output = tmp_path / "out.md"
    found = ask(SMALL, "--chunks", 1, "--limit", 2, "--output", output)
    lines = found.out.splitlines()
    assert lines[0].split() == ["engine", f"{SMALL}/1"]
    assert [line.split()[0] for line in lines[1:3]] == ["full", "pced(gamma=1)"]
    assert lines[4].startswith("Difference from full")
    assert len(lines) == 7
    text = output.read_text()
    assert f"| engine | {SMALL}/1 |\n| --- | ---: |\n| full | " in text
    assert f"- {SMALL}/1: 2 questions, subspan_em" in text
    quiet = ask(SMALL, "--chunks", 1, "--limit", 2, "--quiet")
    assert (quiet.out, quiet.err) == (found.out, "")


def test_ctrl_c_says_how_far_it_came_and_the_next_run_goes_on(ask, monkeypatch):
    decode, calls = Runtime.decode, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(Runtime, "decode", stopping)
    stopped = ask(SMALL, "--chunks", 1, "--limit", 2)
    assert (stopped.code, stopped.out) == (130, "")
    assert "interrupted after 2 of 4 answers" in stopped.err
    assert ask(SMALL, "--chunks", 1, "--limit", 2).code == 0
    assert len(calls) == 5


def test_questions_of_an_index(ask, index, questions):
    found = ask(questions, "--index", index, "--json")
    assert found.code == 0, found.err
    [full, pced] = json.loads(found.out)
    assert (full["task"], full["n"], full["retrieval"], full["codec"]) == ("questions", 1, "bm25", "raw")
    assert pced["baseline"] == "full"


def test_a_file_of_ones_own_chunks(ask, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"question": "Who?", "chunks": ["Mira.", "Ann."], "answers": ["Mira"]}) + "\n")
    [row] = json.loads(ask(path, "--json", engines="block").out)
    assert (row["task"], row["n"], row["chunks"], row["baseline"]) == ("mine", 1, 2, None)


def test_tasks_are_listed(ragkv):
    listed = json.loads(ragkv("eval", "tasks", "--json").out)
    assert {"worlds", "vt"} <= {task["task"] for task in listed}
    assert all(task["about"] and "seed" in task["options"] for task in listed)
    assert "secret-code" in ragkv("eval", "tasks").out
