"""`ragkv bench store`: every figure beside its baseline, in the form that all benchmarks share."""

import json
import sys

import pytest
from rounding import fits

from ragkv.benchmarks.speed import storage
from ragkv.cli.main import main


@pytest.fixture
def small(monkeypatch):
    """The same measurement on little: this is about the report, not about the speed."""
    for name, value in {"LAYERS": 2, "TOKENS": 64, "CHUNKS": 2, "CHURN_ROUNDS": 1}.items():
        monkeypatch.setattr(storage, name, value)


def run(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ragkv", "bench", "store", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_rows(small, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--quick", "--json", "--folder", tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "store"
    rows = report["rows"]
    assert len(rows) == 10
    for row in rows:
        assert set(row) == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
        assert fits(row, digits=2), row
    assert {row["unit"] for row in rows} == {"ms", "MB"}
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_folder_is_one_sentence(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--folder", tmp_path / "none") == 2
    assert "is not a folder" in capsys.readouterr().err
