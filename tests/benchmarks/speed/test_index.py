"""The benchmarks of whole indexes, and of dense and sparse indexes alone."""

import json
import os

import freshwork
import pytest
from outcome import typed
from rounding import fits
from steady import stopwatches
from typer.testing import CliRunner

from ragkv.benchmarks.speed import index, report
from ragkv.benchmarks.speed.report import Corpus
from ragkv.cli.main import app, main
from ragkv.errors import RagkvError, UsageError
from ragkv.pipeline import RagKV


def here(work, *arguments, on_progress):
    return work(*arguments, on_progress)


@pytest.fixture
def ragkv(capsys, monkeypatch):
    return typed(main, capsys, monkeypatch)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        stopwatches(patch, index)
        return folder, index.measure_index("10,20", rounds=1, folder=folder, run=here)


def test_every_figure_has_a_row_beside_that_of_the_first_size(measured):
    _, growth = measured
    rows = growth.report.to_json()["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(fits(row, digits=3) for row in rows if row["unit"] not in ("chunks/s", "MB"))
    names = {row["name"].removeprefix("20 chunks: ") for row in rows if row["name"].startswith("20 ")}
    assert names == {row["name"].removeprefix("10 chunks: ") for row in rows if row["name"].startswith("10 ")}
    for mode in index.MODES:
        for question in ("first question", "warm question", "question after a change", "question after a delete"):
            assert f"{mode}: {question}, processor" in names
            assert f"{mode}: {question}, clock" in names
    for name in ("open", "change one document", "delete one document", "stats", "verify --quick", "gc --dry-run"):
        assert f"{name}, processor" in names
    assert {"ingest, peak memory", "disk per chunk"} <= names
    assert {row["baseline"] for row in rows} == {"10 chunks"}


def test_afterwards_the_index_holds_the_generated_documents(measured):
    folder, growth = measured
    corpus = Corpus(20)
    with RagKV.open(index.index_folder(folder, 20), readonly=True) as rag:
        kept = {one.document.document_id: one.document.content_hash for one in rag.store.documents()}
        assert kept == {corpus.document_id(n): f"{n}-0" for n in range(3)}
        assert sum(1 for _ in rag.store.chunks()) == 20
    again = index.measure_index("20", "open", folder=folder, run=here)
    made = growth.figures[20][:6]
    assert again.figures[20][: len(made)] == made


def test_another_version_of_a_document_shares_no_chunk_with_it():
    corpus = Corpus(12)
    first, other, short = corpus.document(0), corpus.document(0, version=1), corpus.document(1)
    assert not {one.chunk_id for one in first.chunks} & {one.chunk_id for one in other.chunks}
    assert (len(first.chunks), len(short.chunks)) == (8, 4)
    assert corpus.document(0) == first
    assert first.text != other.text


def test_an_unknown_part_is_one_sentence(ragkv):
    found = ragkv("bench", "index", "--only", "opne")
    assert (found.code, "--only knows" in found.sentence) == (2, True)


@pytest.mark.parametrize("more", [["--json"], []])
def test_the_command(ragkv, monkeypatch, measured, more):
    """With existing indexes."""
    folder, _ = measured
    defaults = index.measure_index.__defaults__
    monkeypatch.setattr(index.measure_index, "__defaults__", (*defaults[:-1], here))
    found = ragkv("bench", "index", "--sizes", "10,20", "--only", "open", "--folder", folder, *more)
    assert found.code == 0, found.err
    if more:
        assert json.loads(found.out)["bench"] == "index"
    else:
        assert "growth" in found.out
        assert "open, again (ms)" in found.out


def test_work_in_a_fresh_process():
    seen = []
    process, number = report.run_fresh(freshwork.result, 3, on_progress=lambda *at: seen.append(at))
    assert (process != os.getpid(), number, seen) == (True, 3, [(1, 2)])
    with pytest.raises(UsageError, match="wrong"):
        report.run_fresh(freshwork.failing)
    with pytest.raises(RagkvError, match=r"broken failed:\n(.|\n)*of ours"):
        report.run_fresh(freshwork.broken)
    with pytest.raises(RagkvError, match="killed ended by signal 9"):
        report.run_fresh(freshwork.killed)


@pytest.fixture
def small(monkeypatch):
    for name, value in (("DIMENSION", 24), ("VOCABULARY", 500), ("CHUNK_TOKENS", 20)):
        monkeypatch.setattr(index, name, value)


@pytest.mark.usefixtures("small")
def test_every_figure_has_its_baseline(monkeypatch, tmp_path):
    for module in (index, report):
        stopwatches(monkeypatch, module)
    words = ["bench", "retrieval", "--chunks", "200", "--questions", "2", "--folder", str(tmp_path), "--json"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["bench"] == "retrieval"
    assert {"faiss-cpu", "bm25s"} <= found["versions"].keys()
    rows = {row["name"]: row for row in found["rows"]}
    for kind, baseline in (("dense", "FAISS"), ("sparse", "bm25s")):
        for what in ("query p50", "build", "open"):
            row = rows[f"{kind}, 200 chunks: {what}"]
            assert row["baseline"].startswith(baseline)
            assert fits(row, digits=4)
    same = rows["dense, 200 chunks: same hits"]
    assert (same["value"], same["ratio"]) == (100, 1)
    assert "dense, 200 chunks: replace 20" in rows
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_a_missing_folder_is_one_sentence(tmp_path):
    run = CliRunner().invoke(app, ["bench", "retrieval", "--folder", str(tmp_path / "nowhere")])
    assert isinstance(run.exception, UsageError)
    assert "is not a folder; make it" in str(run.exception)


@pytest.mark.parametrize(
    ("value", "other", "shown"),
    [(0.000012345, 1234.5678, (0.0000123, 1234.568)), (0.123456, 0.0123456, (0.123, 0.0123)), (0.0, 7.0, (0.0, 7.0))],
)
def test_a_small_figure_is_not_rounded_to_nothing(value, other, shown):
    row = report.BenchRow.of("x", value, "s", "y", other, 0.00123456)
    assert ((row.value, row.baseline_value), row.ratio) == (shown, 0.00123)
