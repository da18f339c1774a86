"""Figures over fine-tuning steps equal those of the file that the training (examples/block_steps.py) wrote."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from ragkv.benchmarks.papers.run import TABLES, RunOptions, run_table
from ragkv.benchmarks.papers.table import Cell
from ragkv.errors import UsageError

TABLE = TABLES["block-4"]
SCRIPT = Path(__file__).parents[3] / "examples" / "block_steps.py"


def point(variant: str, step: int, engine: str, *scores: float) -> dict[str, Any]:
    by_question = {f"0-{at}": score for at, score in enumerate(scores)}
    return {
        "variant": variant,
        "step": step,
        "engine": engine,
        "kind": "one hop",
        "accuracy": sum(scores) / len(scores),
        "n": len(scores),
        "scores": by_question,
    }


@pytest.fixture
def payload() -> dict[str, Any]:
    return {
        "commit": "abc",
        "fingerprint": "f" * 12,
        "settings": {
            "model": "vanilla",
            "seed": 3,
            "steps": 200,
            "batch": 8,
            "samples": 1600,
            "learning_rate": 5e-4,
            "full_share": 0.5,
            "chunks": 2,
            "tasks": {"one hop": 'passages(kind="one hop")'},
        },
        "points": [
            point("block", 200, "full", 1, 1),
            point("block", 0, "full", 1, 1),
            point("block", 0, "block", 0, 0),
            point("block", 200, "block", 1, 1),
            point("no-positions", 200, "full", 0, 0),
            point("no-positions", 200, "block", 1, 0),
        ],
    }


def write(folder: Path, payload: object) -> str:
    (folder / "steps.json").write_text(json.dumps(payload), encoding="utf-8")
    return str(folder)


def test_figures_and_order_of_the_file(tmp_path, payload):
    result = run_table(TABLE, RunOptions(models={"": write(tmp_path, payload)}))
    assert [column.label for column in result.table.columns] == ["one hop, step 0", "one hop, step 200"]
    values = {cell: figure.value for cell, figure in result.cells.items()}
    assert values == {
        Cell("tuned, full", "one hop, step 0"): 1.0,
        Cell("tuned, full", "one hop, step 200"): 1.0,
        Cell("tuned, block", "one hop, step 0"): 0.0,
        Cell("tuned, block", "one hop, step 200"): 1.0,
        Cell("tuned without positions", "one hop, step 200"): 0.5,
    }
    assert [verdict.word for verdict in result.verdicts] == ["not shown"] * 3  # two questions are too few
    assert result.origin.models[""].name == "vanilla"
    assert len(result.tasks["one hop, step 0"].examples) == 2
    assert any("Trained at commit abc from `vanilla`: 200 steps of 8 rows" in line for line in result.table.remarks)


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

    result = run_table(TABLE, RunOptions(models={"": str(output)}))
    assert [line.label for line in result.lines] == ["tuned without positions"]
    assert {cell.column for cell in result.cells} == {
        f"{kind}, step {step}" for kind in ("one hop", "two hops") for step in (0, 1)
    }
    block = [point for point in payload["points"] if (point["engine"], point["kind"]) == ("block", "one hop")]
    assert result.cells[Cell("tuned without positions", "one hop, step 1")].value == block[1]["accuracy"]
