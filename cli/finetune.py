"""`ragkv finetune`: training, today of the bundled mini models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import note, print_json
from ragkv.cli.option import Json, Quiet
from ragkv.errors import UsageError

__all__ = ["app"]

app = typer.Typer(help="Train models.", no_args_is_help=True)

Output = Annotated[Path, typer.Option("--output", help="Folder for the model; checkpoints are kept in it too.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and data.")]
Scale = Annotated[float, typer.Option("--scale", help="Multiply the steps, for a quick try or a longer run.")]
TrainedOn = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.callback()
def choose() -> None:
    """Train models."""


@app.command()
def mini(
    output: Output,
    start: Annotated[
        Path | None,
        typer.Option(help="Go on from this model with the last stage, instead of from nothing.", show_default=False),
    ] = None,
    full_only: Annotated[
        bool,
        typer.Option("--full-only", help="One and two hops, full attention only: the model to tune with `block`."),
    ] = False,
    autocast: Annotated[
        bool,
        typer.Option("--autocast/--no-autocast", help="bf16 products: faster on a GPU and on CPUs with bf16 units."),
    ] = True,
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the bundled mini model again: tokenizer, stages, held-out evaluation, Hugging Face layout.

    The model is written to OUTPUT/model. A run that was stopped goes on from its last checkpoint.

    Example: `ragkv finetune mini --output mini-model`
    """
    from ragkv.finetune.mini import FULL_STAGES, MiniTrainConfig
    from ragkv.finetune.release import build_mini

    config = MiniTrainConfig(seed=seed, device=device, autocast=autocast)
    if start is not None and full_only:
        raise UsageError("--start goes on with every kind of question; leave out --full-only.")
    if full_only:
        config = replace(config, layers=4, stages=FULL_STAGES)
    if start is not None:
        if not (start / "config.json").exists():
            raise UsageError(f"{start} holds no config.json; name the folder of a mini model.")
        config = replace(config, start=str(start), stages=config.stages[-1:])
    stages = tuple(replace(stage, steps=max(1, round(stage.steps * scale))) for stage in config.stages)

    def show(step: Mapping[str, float | int | str]) -> None:
        if int(step["number"]) % 10 == 0:
            note(
                f"{step['stage']} {step['step']}: loss {float(step['loss']):.3f}, "
                f"gold tokens right {float(step['gold_accuracy']):.3f}, {float(step['seconds']):.1f} s a step"
            )

    rows = build_mini(replace(config, stages=stages), output, on_progress=None if quiet or as_json else show)
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(f"{row['layout']}, {row['passages']} passages, {row['kind']}: {row['accuracy']:.1%} of {row['n']}")


@app.command()
def embedder(
    output: Output,
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the bundled mini embedder again: tokenizer, three heads, held-out retrieval, bge-m3's file layout.

    The model is written to OUTPUT/model. A run that was stopped goes on from its last checkpoint.

    Example: `ragkv finetune embedder --output mini-embedder`
    """
    from ragkv.finetune.embedder import EmbedderTrainConfig
    from ragkv.finetune.retrieval_export import build_mini_embedder

    config = EmbedderTrainConfig(seed=seed, device=device)
    config = replace(config, steps=max(1, round(config.steps * scale)))
    _print_retrieval(
        build_mini_embedder(config, output, on_progress=None if quiet or as_json else _show("dense")), as_json
    )


@app.command()
def reranker(
    output: Output,
    embedder: Annotated[Path, typer.Option("--embedder", help="The --output of `ragkv finetune embedder`.")],
    seed: Seed = 0,
    scale: Scale = 1.0,
    device: TrainedOn = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the bundled mini reranker again, from the mini embedder; bge-reranker-v2-m3's file layout.

    Example: `ragkv finetune reranker --embedder mini-embedder --output mini-reranker`
    """
    from ragkv.finetune.reranker import RerankerTrainConfig
    from ragkv.finetune.retrieval_export import build_mini_reranker

    for needed in ("checkpoint.pt", "tokenizer", "model"):
        if not (embedder / needed).exists():
            raise UsageError(f"{embedder} holds no {needed}; name a finished --output of `ragkv finetune embedder`.")
    config = RerankerTrainConfig(seed=seed, device=device)
    config = replace(config, steps=max(1, round(config.steps * scale)))
    show = None if quiet or as_json else _show("first")
    _print_retrieval(build_mini_reranker(config, embedder, output, on_progress=show), as_json)


def _show(share: str) -> Callable[[Mapping[str, float | int | str]], None]:
    def show(step: Mapping[str, float | int | str]) -> None:
        if int(step["step"]) % 10 == 1:
            note(
                f"step {step['step']} of {step['steps']}: loss {float(step['loss']):.3f}, best passage right "
                f"{float(step[share]):.3f}, {float(step['seconds']):.0f} s"
            )

    return show


def _print_retrieval(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    for row in rows:
        print(
            f"{row['slice']}, {row['system']}: recall@5 {row['recall_5']:.1%}, nDCG@10 {row['ndcg_10']:.3f} "
            f"of {row['n']}"
        )
