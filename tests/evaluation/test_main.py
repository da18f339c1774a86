"""`python -m ragkv.benchmarks.evaluation`: retrieval on an index and on benchmarks, answers to tasks, families."""

import json
import os
import re
import signal

import pytest
import words
from benchmarkfolder import CountingEmbedder, beir_folder
from clichild import forkserver
from outcome import typed

from ragkv import RagKV
from ragkv.benchmarks.evaluation import __main__ as program
from ragkv.benchmarks.evaluation import families as surveys
from ragkv.benchmarks.evaluation import retrieval
from ragkv.benchmarks.evaluation.families import ENGINES, FamilyVerdict, Survey, families, select_families
from ragkv.errors import ConfigError
from ragkv.retrievers.bm25 import tokenise
from ragkv.runtime import Runtime


@pytest.fixture
def measure(capsys, monkeypatch):
    return typed(program.main, capsys, monkeypatch)


@pytest.fixture
def index(rag):
    rag.close()
    return rag.folder


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
        {"id": "c", "question": "Who founded Nix Mills?", "answer": "Otto Nix"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_own_questions_are_asked_of_the_index(measure, index, judged):
    ran = measure("retrieval", judged, "--index", index, "--modes", "bm25", "--k", "1,2,3,4,5,6,7,8,9")
    assert ran.code == 0, ran.err
    header, row = ran.out.splitlines()
    assert len(row) > 100  # not truncated without a terminal
    assert header.split() == ["engine", *(f"recall@{k}" for k in range(1, 10)), "mrr@9", "ndcg@9"]
    assert row.split() == ["bm25", *["1.000", "±.00"] * 11]
    assert "judged: 2 questions" in ran.err
    assert "1 question without a relevant passage, not measured: c" in ran.err


def test_an_index_gives_every_mode_that_it_has_vectors_for(
    measure, tmp_path, documents, model_folder, judged, monkeypatch
):
    words.install(monkeypatch)
    settings = {"model": str(model_folder), "device": "cpu", "embedder": "words", "reranker": "words"}
    for name, vectors in {"all": ("dense", "sparse", "colbert"), "some": ("dense",)}.items():
        with RagKV.create(tmp_path / name, vectors=vectors, **settings) as rag:
            rag.ingest(documents)

    def engines(name, *more):
        ran = measure("retrieval", judged, "--index", tmp_path / name, "--json", *more)
        assert ran.code == 0, ran.err
        rows = [row for row in json.loads(ran.out) if row["metric"] == "hit@5"]
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
    ran = measure("retrieval", judged, "--index", tmp_path / "some", "--modes", "sparse,dense,hybrid")
    assert (ran.code, ran.out) == (1, "")
    assert 'has no sparse vectors, which retrieval "sparse" needs; it can serve dense, hybrid' in ran.sentence


def test_a_benchmark_is_measured_in_every_mode_of_the_embedder(measure, tmp_path, embedder):
    folder = beir_folder(tmp_path / "tarn")
    command = ["retrieval", folder, "--embedder", "words", "--json"]
    ran = measure(*command)
    assert ran.code == 0, ran.err
    recall = {row["engine"]: row["value"] for row in json.loads(ran.out) if row["metric"] == "recall@5"}
    assert list(recall) == ["dense", "sparse", "colbert", "hybrid", "bm25"]
    # of four passages, dense search ranks all, and lexical search those that share a word with the question
    assert recall["dense"] == recall["colbert"] == recall["hybrid"] == 1
    assert recall["bm25"] == recall["sparse"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert len(embedder.texts) == 4


def test_the_reranker_is_measured_beside_the_plain_mode(measure, tmp_path, monkeypatch):
    class LongWords:
        """A text is relevant if it shares a word of five letters or more."""

        name = "long words"

        def score(self, question, texts):
            words = {word for word in tokenise(question) if len(word) > 4}
            return [5.0 if words & set(tokenise(text)) else -5.0 for text in texts]

    monkeypatch.setattr(retrieval, "load_reranker", lambda name, **_: LongWords())
    folder = beir_folder(tmp_path / "tarn")

    def engines(*more, k=10):
        ran = measure("retrieval", folder, "--reranker", "words", "--json", "--k", k, *more)
        assert ran.code == 0, ran.err
        return {row["engine"]: row["value"] for row in json.loads(ran.out) if row["metric"] == f"mrr@{k}"}

    # BM25 ranks "Varn is a town" before the flour, because of "is"; the reranker swaps them
    assert engines() == {"bm25": pytest.approx(5 / 6), "bm25+rerank": 1}
    assert engines("--rerank") == {"bm25+rerank": 1}
    assert engines("--no-rerank") == {"bm25": pytest.approx(5 / 6)}
    # at k = 1 the right passage is among the two candidates, but not the first
    assert engines("--rerank", "--candidates", 1, k=1) == {"bm25+rerank": pytest.approx(2 / 3)}
    assert engines("--rerank", "--candidates", 2, k=1) == {"bm25+rerank": 1}


SMALL = "icl(shots=1)"


@pytest.fixture
def ask(measure, model_folder, tmp_path):
    def run(*arguments, engines="full,pced(gamma=1)"):
        own = [] if "--index" in arguments else ["--model", model_folder]
        own += ["--work", tmp_path / "work", "--engines", engines, "--max-new-tokens", 3]
        return measure("answers", *arguments, *own)

    return run


def test_rows_of_a_task(ask, tmp_path):
    output = tmp_path / "out.json"
    ran = ask(SMALL, "--chunks", "1,2", "--limit", 1, "--json", "--output", output, "--seed", 3)
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)
    assert [(row["task"], row["engine"], row["n"]) for row in rows] == [
        (f"{SMALL}/{chunks}", engine, 1) for chunks in (1, 2) for engine in ("full", "pced(gamma=1)")
    ]
    assert [row["baseline"] for row in rows[:2]] == [None, "full"]
    assert all(row["options"] == ({} if row["engine"] == "full" else {"gamma": 1}) for row in rows)
    assert all(row["chunks"] == int(row["task"][-1]) and row["seed"] == 3 for row in rows)
    report = json.loads(output.read_text())
    assert report["rows"] == rows
    assert [(task["metric"], task["examples"]) for task in report["tasks"]] == [("classification", 1)] * 2


def test_a_table_and_its_markdown(ask, tmp_path):
    output = tmp_path / "out.md"
    ran = ask(SMALL, "--chunks", 1, "--limit", 1, "--output", output)
    lines = ran.out.splitlines()
    assert lines[0].split() == ["engine", f"{SMALL}/1"]
    assert [line.split()[0] for line in lines[1:3]] == ["full", "pced(gamma=1)"]
    assert lines[4].startswith("Difference from full")
    assert len(lines) == 7
    text = output.read_text()
    assert f"| engine | {SMALL}/1 |\n| --- | ---: |\n| full | " in text
    assert f"- {SMALL}/1: 1 question, classification" in text
    quiet = ask(SMALL, "--chunks", 1, "--limit", 1, "--quiet")
    assert (quiet.out, quiet.err) == (ran.out, "")


def test_ctrl_c_says_how_far_it_came_and_the_next_run_goes_on(ask, monkeypatch):
    submit, calls = Runtime.submit, []

    def stopping(*arguments, **more):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return submit(*arguments, **more)

    monkeypatch.setattr(Runtime, "submit", stopping)
    stopped = ask(SMALL, "--chunks", 1, "--limit", 2)
    assert (stopped.code, stopped.out) == (130, "")
    assert "interrupted after 2 of 4 answers" in stopped.err
    assert ask(SMALL, "--chunks", 1, "--limit", 2).code == 0
    assert len(calls) == 5


def test_questions_of_an_index(ask, index, judged):
    ran = ask(judged, "--index", index, "--limit", 1, "--json")
    assert ran.code == 0, ran.err
    [full, pced] = json.loads(ran.out)
    assert (full["task"], full["n"], full["retrieval"], full["codec"]) == ("judged", 1, "bm25", "raw")
    assert pced["baseline"] == "full"


def test_the_record_is_of_these_engines():
    table = Survey.recorded().to_json()
    assert Survey.from_json(table) == Survey.recorded()
    assert {row["family"] for row in table["families"]} >= {"llama", "qwen3", "gpt_oss", "mamba2"}
    for row in table["families"]:
        assert set(row["engines"]) == set(ENGINES)
        assert set(row["engines"].values()) <= {"exact", "refused"}
        assert ("refused" in row["engines"].values()) == (row["reason"] is not None)
        assert not re.search(r"Error\b|Exception|Traceback", row["reason"] or ""), row["reason"]


@pytest.mark.slow
def test_families_are_tried_anew_in_a_process_of_their_own(measure, monkeypatch):
    monkeypatch.setattr(surveys.multiprocessing, "get_context", lambda method: forkserver())
    ran = json.loads(measure("families", "opt,opt", "--json").out)
    recorded = {row["family"]: row["engines"] for row in Survey.recorded().to_json()["families"]}
    assert {row["family"]: row["engines"] for row in ran["families"]} == {name: recorded[name] for name in ("opt",)}


def test_what_goes_wrong_with_a_family_is_its_row(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no heads")

    monkeypatch.setattr(surveys, "examine", fails)
    row = surveys.judge("llama").to_json()
    assert set(row["engines"].values()) == {"refused"}
    assert row["reason"] == "Not judged: no heads."
    monkeypatch.setattr(surveys, "parameters", fails)
    assert "no small model of it can be built (no heads)" in surveys.judge("llama").reason


@pytest.mark.slow
def test_a_process_that_hangs_or_ends_is_a_row(monkeypatch):
    monkeypatch.setattr(surveys.multiprocessing, "get_context", lambda method: forkserver())
    worker = surveys._Worker()
    os.kill(worker._process.pid, signal.SIGSTOP)
    assert worker.ask(("llama", 0), 0) == "Not judged: it came to no end within 0 s."
    worker._process.kill()
    worker._process.join()
    assert worker.ask(("llama", 0), 600) == "Not judged: the process that tried it ended (code -9)."
    worker.end()


def test_a_family_that_transformers_does_not_have():
    assert select_families("all") == families()
    assert select_families("llama,qwen2,llama") == ["llama", "qwen2"]
    with pytest.raises(ConfigError, match="no decoder family 'nosuch'"):
        select_families("llama,nosuch")


def test_a_wrong_answer_is_shown_as_such_and_ends_with_1(measure, monkeypatch):
    wrong = FamilyVerdict(family="llama", errors=dict.fromkeys(ENGINES, 0.5))
    monkeypatch.setattr(surveys, "survey", lambda names: iter([wrong]))
    assert wrong.to_json()["engines"]["full"] == "wrong"
    done = measure("families", "llama")
    assert (done.code, "wrong" in done.out) == (1, True)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("answers nothing", 2, "Unknown task 'nothing'"),
        ("answers worlds --engines pced(gama=1)", 2, "gama"),
        ("answers worlds --baseline block --engines full", 2, "--baseline block"),
        ("answers worlds --top-k 2", 2, "--retrieval"),
        ("answers worlds --output x.txt", 2, ".json or .md"),
        ("retrieval {beir} --k 0", 2, "--k '0' is not a list of numbers from 1 up"),
        ("retrieval {beir} --modes dense", 1, 'has no dense vectors, which retrieval "dense" needs; it can serve bm25'),
        ("retrieval {beir} --rerank", 1, "--rerank needs a reranker: give --reranker"),
        ("retrieval {beir} --output nowhere/r.md", 2, "there is no folder nowhere"),
        ("retrieval {judged} --index {index} --embedder mini", 2, "--embedder is only for BEIR's folders"),
        ("retrieval {beir}/gone.jsonl --index {index}", 2, "No such file"),
        ("families llama,nosuch", 2, "no decoder family 'nosuch'"),
    ],
)
def test_wrong_usage_is_one_sentence(measure, tmp_path, index, judged, line, code, message):
    beir = beir_folder(tmp_path / "tarn")
    result = measure(*(word.format(beir=beir, index=index, judged=judged) for word in line.split()))
    assert (result.code, result.out) == (code, "")
    assert message in result.sentence
