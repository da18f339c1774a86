"""`ragkv bench apb` shows its three contenders beside each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ragkv.benchmarks.speed import longdocument
from ragkv.cli.bench import app


def test_rows_are_told_beside_their_baselines(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longdocument, "random_llama", lambda *_: make_model("llama"))
    monkeypatch.setattr(longdocument, "WARM", 16)
    result = CliRunner().invoke(app, ["apb", "--lengths", "96", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    for name in ("apb, 96 tokens vs full", "star, 96 tokens vs full", "apb, 96 tokens vs star"):
        assert {name, f"{name}: operations"} <= rows.keys()
    assert rows["apb, 96 tokens vs full"]["baseline"] == "full"
    assert rows["apb, 96 tokens vs full"]["baseline_value"] == rows["star, 96 tokens vs full"]["baseline_value"]
