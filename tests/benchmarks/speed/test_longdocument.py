"""`ragkv bench apb` shows its three contenders beside each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ragkv.benchmarks.speed import longdocument
from ragkv.cli.bench import app
from ragkv.errors import UsageError
from ragkv.model.apb import Lengths
from ragkv.model.apb.layout import TABLE


def test_rows_are_told_beside_their_baselines(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longdocument, "random_llama", lambda *_: make_model("llama"))
    monkeypatch.setattr(longdocument, "WARM", 16)
    result = CliRunner().invoke(app, ["apb", "--lengths", "96", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    several = ("apb on 2 ranks, 96 tokens vs full", "apb on 2 ranks, 96 tokens vs apb")
    for name in ("apb, 96 tokens vs full", "star, 96 tokens vs full", "apb, 96 tokens vs star", *several):
        assert {name, f"{name}: operations"} <= rows.keys()
    assert rows["apb, 96 tokens vs full"]["baseline"] == "full"
    assert rows["apb, 96 tokens vs full"]["baseline_value"] == rows["star, 96 tokens vs full"]["baseline_value"]
    # the slower of two ranks has 4 of 8 blocks, and what is passed on grows from block to block
    share = rows["apb on 2 ranks, 96 tokens vs apb: operations"]
    assert 1.5 < share["ratio"] < 2


def test_lengths_of_blocks_are_those_given(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longdocument, "random_llama", lambda *_: make_model("llama"))
    monkeypatch.setattr(longdocument, "WARM", 16)
    cuts: list[Any] = []
    within = longdocument._in_blocks
    monkeypatch.setattr(longdocument, "_in_blocks", lambda *given: cuts.append(given[2]) or within(*given))
    arguments = ["apb", "--lengths", "96", "--block-tokens", "32,8,4", "--ranks", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "ranks" not in result.stdout
    assert cuts[-1] == Lengths(block=32, anchor=8, passing=4)
    wrong = CliRunner().invoke(app, ["apb", "--block-tokens", "32,8"])
    assert isinstance(wrong.exception, UsageError)


def test_short_blocks_save_more_operations_than_the_papers(make_model: Any) -> None:
    assert longdocument.block_lengths(4096) == Lengths(block=512, anchor=128, passing=32)
    short = longdocument.block_lengths(32768)
    assert short == Lengths(block=2048, anchor=512, passing=128)
    model, ids = make_model("llama"), (5,) * 32768
    assert longdocument._in_blocks(model, ids, short)[1] < longdocument._in_blocks(model, ids, TABLE[32768])[1]
