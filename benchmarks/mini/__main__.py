"""`python -m ragkv.benchmarks.mini`: train the bundled language model again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ragkv.benchmarks.mini.recipe import MiniTrainConfig, chosen_config
from ragkv.benchmarks.mini.release import build_mini
from ragkv.cli.console import note, print_json, say
from ragkv.cli.finetune import Output, Scale, Seed, TrainedOn
from ragkv.cli.option import Debug, Json, Quiet
from ragkv.cli.program import Single, log_to_stderr, run
from ragkv.errors import UsageError

__all__ = ["app", "main"]

COMMAND = "python -m ragkv.benchmarks.mini"

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command(cls=Single)
def mini(
    output: Output,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Continue from this model with the stages of all kinds, instead of from random weights.",
            show_default=False,
        ),
    ] = None,
    full_only: Annotated[
        bool,
        typer.Option(
            "--full-only",
            help="Train no row in the block layout; without --start, one and two hops only.",
        ),
    ] = False,
    autocast: Annotated[
        bool,
        typer.Option(
            "--autocast/--no-autocast", help="Multiply in bf16, which is faster on GPUs and on CPUs with bf16 units."
        ),
    ] = True,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="Processes that share the rows of each step; on a CPU, one per core."),
    ] = 1,
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train the bundled mini model again: tokenizer, stages, evaluation on held-out worlds, Hugging Face folder.

    The model is written to OUTPUT/model. A stopped run continues from its last checkpoint.

    Example: `python -m ragkv.benchmarks.mini --output mini-model`
    """
    log_to_stderr(debug=debug)
    if processes > 1 and device != "cpu":
        raise UsageError("--processes shares the cores of a CPU; leave it out with another --device.")
    config = MiniTrainConfig(seed=seed, device=device, autocast=autocast, processes=processes)
    config = chosen_config(config, start=start, full_only=full_only, scale=scale)

    def show(step: Mapping[str, float | int | str]) -> None:
        if int(step["number"]) % 10 == 0:
            note(
                f"{step['stage']} {step['step']}: loss {float(step['loss']):.3f}, "
                f"gold tokens right {float(step['gold_accuracy']):.3f}, {float(step['seconds']):.1f} s a step"
            )

    rows = build_mini(config, output, on_progress=None if quiet or as_json else show)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        say(f"{row['layout']}, {row['passages']} passages, {row['kind']}: {row['accuracy']:.1%} of {row['n']}")


def main() -> None:
    """Entry point of `python -m ragkv.benchmarks.mini`."""
    run(app, COMMAND)


if __name__ == "__main__":
    main()
