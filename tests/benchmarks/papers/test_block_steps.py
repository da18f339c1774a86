"""examples/block_steps.py end to end, on the shipped mini and a handful of lines: tables read what it leaves."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from ragkv.benchmarks.papers.run import TABLES, RunOptions, run_table
from ragkv.benchmarks.papers.table import Cell
from ragkv.errors import UsageError

SCRIPT = Path(__file__).parents[3] / "examples" / "block_steps.py"


@pytest.mark.nightly
def test_a_short_training_is_measured_written_and_not_done_again(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    output, record = tmp_path / "ablation", tmp_path / "ablation" / "steps.json"

    def run(*more: str) -> str:
        folders = ["--output", str(output), "--work", str(tmp_path / "work"), "--variants", "no-positions"]
        few = ["--steps", "1", "--samples", "8", "--questions", "1"]
        monkeypatch.setattr(sys, "argv", ["block_steps.py", "--model", "mini", *folders, *few, *more])
        main()
        return capsys.readouterr().err

    run()
    payload = json.loads(record.read_text(encoding="utf-8"))
    assert {(point["step"], point["engine"], point["kind"]) for point in payload["points"]} == {
        (step, engine, kind) for step in (0, 1) for engine in ("full", "block") for kind in ("one hop", "two hops")
    }
    tuned = json.loads((output / "no-positions" / "ragkv.json").read_text(encoding="utf-8"))
    assert (tuned["block_tuned"], tuned["positions"]) == (True, "kept")
    assert not (output / "no-positions" / "checkpoints").exists()

    before = record.read_bytes()
    assert "no-positions: done before" in run()
    assert record.read_bytes() == before
    with pytest.raises(UsageError, match=r"made with other settings \(learning_rate\)"):
        run("--learning-rate", "0.1")

    result = run_table(TABLES["block-4"], RunOptions(models={"": str(output)}))
    assert [line.label for line in result.lines] == ["tuned without positions"]
    assert {cell.column for cell in result.cells} == {
        f"{kind}, step {step}" for kind in ("one hop", "two hops") for step in (0, 1)
    }
    block = [point for point in payload["points"] if (point["engine"], point["kind"]) == ("block", "one hop")]
    assert result.cells[Cell("tuned without positions", "one hop, step 1")].value == block[1]["accuracy"]
