"""The benchmark of the store measures what it claims: every row has a baseline."""

import json
from pathlib import Path

import pytest
from rounding import fits
from typer.testing import CliRunner

from ragkv.benchmarks.speed import storage as bench
from ragkv.cli.bench import bench as command
from ragkv.errors import UsageError


def test_the_store_s_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small measurement: this tests the report, not the speed."""
    for name, value in {"LAYERS": 2, "TOKENS": 64, "CHUNKS": 2, "CHURN_ROUNDS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    result = CliRunner().invoke(command, ["store", "--quick", "--json", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["bench"] == "store"
    assert len(report["rows"]) == 8
    for row in report["rows"]:
        assert set(row) == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
        assert fits(row, digits=2), row
    assert {row["unit"] for row in report["rows"]} == {"ms", "MB"}
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(command, ["store", "--folder", str(tmp_path / "none")])
    assert isinstance(found.exception, UsageError)
    assert "is not a folder" in str(found.exception)
