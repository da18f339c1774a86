"""Read accuracies over fine-tuning steps from the file that examples/block_steps.py writes while it trains."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.benchmarks.papers.definition import Cell, Column, Known, Table
from ragkv.benchmarks.papers.origin import Model
from ragkv.errors import ConfigError

__all__ = ["STEPS_FILE", "read_steps"]

STEPS_FILE = "steps.json"
_LINES = {
    ("block", "full"): "tuned, full",
    ("block", "block"): "tuned, block",
    ("no-positions", "block"): "tuned without positions",
}
"""The table's label for each (variant, engine)."""


def read_steps(table: Table, folder: str) -> Known:
    """The table with the steps in `folder`/steps.json. Raises ConfigError if the file is missing or damaged."""
    path = Path(folder).expanduser() / STEPS_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no {path}; run python examples/block_steps.py, which trains and writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); run python examples/block_steps.py, which writes it anew."
        ) from error
    try:
        return _known(table, told)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not what examples/block_steps.py writes ({error!r}); delete it and run that."
        ) from error


def _known(table: Table, told: Mapping[str, Any]) -> Known:
    settings = told["settings"]
    columns: dict[str, Column] = {}
    scores: dict[Cell, dict[str, list[tuple[str, float]]]] = {}
    points = sorted(told["points"], key=lambda point: (point["kind"], point["step"]))
    for point in points:
        line = _LINES.get((point["variant"], point["engine"]))
        if line is None:
            continue
        kind, step = str(point["kind"]), int(point["step"])
        label = f"{kind}, step {step}"
        columns[label] = Column(
            label=label, task=str(settings["tasks"][kind]), chunks=int(settings["chunks"]), limit=int(point["n"])
        )
        found = [(str(name), float(score)) for name, score in point["scores"].items()]
        scores[Cell(line, label)] = {label: found}
    return Known(
        table=replace(
            table,
            lines=tuple(line for line in table.lines if any(cell.line == line.label for cell in scores)),
            columns=tuple(columns.values()),
            orders=tuple(order for order in table.orders if {order.left, order.right} <= scores.keys()),
            remarks=(*table.remarks, _trained(told)),
        ),
        scores=scores,
        models={"": Model(name=str(settings["model"]), dtype="float32", fingerprint=str(told["fingerprint"]))},
        seed=int(settings["seed"]),
    )


def _trained(told: Mapping[str, Any]) -> str:
    settings = told["settings"]
    return (
        f"Trained at commit {told['commit']} from `{settings['model']}`: {settings['steps']} steps of "
        f"{settings['batch']} rows, learning rate {settings['learning_rate']:g} falling to 0, {settings['samples']} "
        f"lines of training worlds, full layout for {100 * settings['full_share']:.0f} % of rows, seed "
        f"{settings['seed']}; all weights learn, in float32."
    )
