"""The retrieval benchmark measures what it says: both sides find the same, and every row stands beside a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.benchmarks.speed import retrieval as bench
from ragkv.benchmarks.speed.retrieval import measure
from ragkv.cli.main import app
from ragkv.errors import UsageError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIMENSION", 24), ("VOCABULARY", 500), ("CHUNK_TOKENS", 20)):
        monkeypatch.setattr(bench, name, value)


def test_every_figure_has_its_baseline(tmp_path: Path) -> None:
    said: list[str] = []
    report = measure(chunks=400, questions=5, folder=tmp_path, on_step=said.append)
    rows = {row.name: row for row in report.rows}
    for kind, baseline in (("dense", "FAISS"), ("sparse", "bm25s")):
        for what in ("query p50", "build", "open"):
            row = rows[f"{kind}, 400 chunks: {what}"]
            assert row.baseline.startswith(baseline)
            assert row.value > 0
            assert row.baseline_value > 0
    same = rows["dense, 400 chunks: same hits"]
    assert (same.value, same.ratio) == (100, 1)
    assert "dense, 400 chunks: replace 20" in rows
    assert list(tmp_path.iterdir()) == []
    assert said[0].startswith("dense: 400 vectors")


def test_the_command_prints_json() -> None:
    run = CliRunner().invoke(app, ["bench", "retrieval", "--chunks", "200", "--questions", "2", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert report["bench"] == "retrieval"
    assert {"faiss-cpu", "bm25s"} <= report["versions"].keys()
    assert all(row["baseline"] for row in report["rows"])


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["bench", "retrieval", "--folder", str(tmp_path / "nowhere")])
    assert isinstance(run.exception, UsageError)
    assert "is not a folder; make it" in str(run.exception)
