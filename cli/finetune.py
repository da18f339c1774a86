"""`ragkv finetune`: training; today the bundled mini model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import note, print_json
from ragkv.cli.option import Json

__all__ = ["app"]

app = typer.Typer(help="Train models.", no_args_is_help=True)


@app.callback()
def choose() -> None:
    """Train models."""


@app.command()
def mini(
    output: Annotated[Path, typer.Option("--output", help="Folder for the model; checkpoints are kept in it too.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    scale: Annotated[float, typer.Option(help="Multiply every stage's steps, for a quick try or a longer run.")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Train the bundled mini model again: tokenizer, three stages, held-out evaluation, Hugging Face layout.

    The model is written to OUTPUT/model. A run that was stopped goes on from its last checkpoint.

    Example: `ragkv finetune mini --output mini-model`
    """
    from ragkv.finetune.mini import MiniTrainConfig
    from ragkv.finetune.release import build_mini

    config = MiniTrainConfig(seed=seed, device=device)
    stages = tuple(replace(stage, steps=max(1, round(stage.steps * scale))) for stage in config.stages)

    def show(step: Mapping[str, float | int | str]) -> None:
        if int(step["number"]) % 10 == 0:
            note(
                f"{step['stage']} {step['step']}: loss {float(step['loss']):.3f}, "
                f"gold tokens right {float(step['gold_accuracy']):.3f}, {float(step['seconds']):.1f} s a step"
            )

    rows = build_mini(replace(config, stages=stages), output, on_progress=None if as_json else show)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['layout']}, {row['passages']} passages, {row['hops']} hops: {row['accuracy']:.1%} of {row['n']}")
