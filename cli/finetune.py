"""`ragkv finetune`: block fine-tuning of the user's own model, and the training of the bundled mini models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ragkv.cli.console import note, print_json, say, size
from ragkv.cli.option import Device, Json, Quiet
from ragkv.cli.progress import steps as progress_of
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


@app.command(no_args_is_help=True)
def block(
    model: Annotated[str, typer.Option("--model", help="Model folder or hub id to tune; `mini` is the bundled one.")],
    data: Annotated[Path, typer.Option("--data", help="JSONL file to learn from (docs/finetune.md).")],
    output: Annotated[
        Path, typer.Option("--output", help="Folder for the tuned model; checkpoints are kept in it too.")
    ],
    eval_data: Annotated[
        Path | None,
        typer.Option("--eval-data", help="JSONL file whose loss is measured in both layouts, before and after."),
    ] = None,
    epochs: Annotated[float, typer.Option("--epochs", help="Times that the data is gone through.")] = 1.0,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps, instead of --epochs.", show_default=False)
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option("--lr", help="Highest learning rate.", show_default="2e-4 for LoRA, 2e-5 for all weights"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Rows at once on a device.")] = 1,
    gradient_accumulation: Annotated[
        int, typer.Option("--gradient-accumulation", help="Batches that make one step.")
    ] = 16,
    full_share: Annotated[
        float,
        typer.Option("--full-share", help="Share of rows under full attention, so that `full` stays good; 0 to 1."),
    ] = 0.5,
    lora_rank: Annotated[
        int | None, typer.Option("--lora-rank", help="Rank of the LoRA adapter.", show_default="16")
    ] = None,
    full_weights: Annotated[
        bool, typer.Option("--full-weights", help="Tune all weights instead of an adapter.")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto (bfloat16 where the GPU has it), float32 or bfloat16.")
    ] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice instead of keeping them.")
    ] = False,
    sink: Annotated[
        str, typer.Option("--sink", help="Block before the first document: prefix, bos (its first token) or none.")
    ] = "prefix",
    no_positions: Annotated[
        bool,
        typer.Option("--no-positions", help="The paper's ablation: blocks keep the positions they were encoded at."),
    ] = False,
    bos: Annotated[
        str | None,
        typer.Option(
            "--bos",
            help="none: no BOS before the prompt, as Block-Attention's authors tune; auto: as the tokenizer has it.",
            show_default="as --model or --prompt-of say, else auto",
        ),
    ] = None,
    prompt_of: Annotated[
        Path | None,
        typer.Option(
            "--prompt-of", help="Index whose [prompt] is put around the data.", show_default="ragkv's own words"
        ),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option("--checkpoint-every", help="Steps between checkpoints, and between measurements of --eval-data."),
    ] = 100,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from OUTPUT's last checkpoint, or begin again.")
    ] = True,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune a model of yours for the engine `block` (Block-Attention), by LoRA or all weights; needs `ragkv[finetune]`.

    OUTPUT is an ordinary Hugging Face folder that `--model` takes; its `ragkv.json` says how it was made. Stopped by
    Ctrl-C it leaves a checkpoint, and the same command goes on.

    Example: `ragkv finetune block --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --output tuned`
    """
    from ragkv.config import PromptConfig, load_config
    from ragkv.finetune.block import BlockTuneConfig, finetune_block

    if full_weights and lora_rank is not None:
        raise UsageError("Give either --lora-rank or --full-weights.")
    prompt = PromptConfig() if prompt_of is None else load_config(prompt_of).prompt
    config = BlockTuneConfig(
        model=model,
        data=data,
        output=output,
        eval_data=eval_data,
        epochs=epochs,
        steps=steps,
        learning_rate=lr,
        batch=batch,
        gradient_accumulation=gradient_accumulation,
        full_share=full_share,
        lora_rank=None if full_weights else lora_rank or 16,
        dtype=dtype,  # type: ignore[arg-type]
        gradient_checkpointing=gradient_checkpointing,
        sink=sink,  # type: ignore[arg-type]
        reencode=not no_positions,
        prompt=prompt if bos is None else replace(prompt, bos=bos),  # type: ignore[arg-type]
        checkpoint_every=checkpoint_every,
        seed=seed,
        resume=resume,
        device=device,
    )

    def show(step: Mapping[str, float | int | str]) -> None:
        told = f"step {step['step']} of {step['steps']}: "
        if "loss" in step:
            note(f"{told}loss {float(step['loss']):.3f}, {float(step['seconds']):.0f} s")
        for layout in ("full", "block"):
            if f"eval_{layout}_loss" in step:
                note(f"{told}{layout} loss on --eval-data {float(step[f'eval_{layout}_loss']):.3f}")

    done = finetune_block(config, on_progress=None if quiet or as_json else show)
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps_done']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    say(f"{learnt}; use it by: ragkv ingest PATH --model {output}")


@app.command(no_args_is_help=True)
def data(
    output: Annotated[Path, typer.Option("--output", help="JSONL file to write.")],
    samples: Annotated[int, typer.Option("--samples", help="Lines to write.")] = 200,
    fewest: Annotated[int, typer.Option("--fewest", help="Fewest passages of a line.")] = 4,
    most: Annotated[int, typer.Option("--most", help="Most passages of a line.")] = 8,
    split: Annotated[
        str, typer.Option("--split", help="train or heldout: worlds that share no name with each other's.")
    ] = "train",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the worlds.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a file for `ragkv finetune block --data` from generated worlds: questions, passages, answers.

    For a try before there is data of your own, and as its example: each line is {"prompt", "blocks", "response"}.

    Example: `ragkv finetune data --output train.jsonl`
    """
    from ragkv.finetune.block.worldexample import write_world_examples

    written = write_world_examples(output, samples=samples, passage_range=(fewest, most), split=split, seed=seed)
    if as_json:
        print_json(written)
    elif not quiet:
        note(f"{written['lines']} lines in {output}, {written['two_hops']} of them ask over two passages.")


@app.command("retaining-heads", no_args_is_help=True)
def retaining_heads(
    model: Annotated[str, typer.Option("--model", help="Model folder or hub id; it is not changed.")],
    data: Annotated[Path, typer.Option("--data", help="JSONL file to learn from (docs/finetune.md).")],
    output: Annotated[
        Path | None, typer.Option("--output", help="File for the heads.", show_default="beside the model")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps, of one line each.")] = 3000,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps in which the learning rate rises.")] = 300,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 5e-4,
    clip: Annotated[float, typer.Option("--clip", help="Longest gradient.")] = 0.5,
    smooth: Annotated[float, typer.Option("--smooth", help="Weight of the loss of neighbouring scores.")] = 0.0025,
    inner: Annotated[int, typer.Option("--inner", help="Width of the heads' hidden layer.")] = 1024,
    pool: Annotated[
        int, typer.Option("--pool", help="A token gets the highest score of so many neighbours, an odd number.")
    ] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longer lines are left out.")] = 10240,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", help="Steps between checkpoints.")] = 100,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint, or begin again.")
    ] = True,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train retaining heads (Locret), by which the engine `apb` chooses what blocks pass on; the model is frozen.

    They are one small file beside the model, which `apb` then uses. A run that was stopped goes on.

    Example: `ragkv finetune retaining-heads --model ./my-model --data train.jsonl`
    """
    from ragkv.finetune.retaining import RetainingConfig, train_retaining_heads

    config = RetainingConfig(
        model=model,
        data=data,
        output=output,
        steps=steps,
        warmup=warmup,
        lr=lr,
        clip=clip,
        smooth=smooth,
        inner=inner,
        pool=pool,
        max_tokens=max_tokens,
        checkpoint_every=checkpoint_every,
        seed=seed,
        resume=resume,
        device=device,
    )
    with progress_of("training", silent=quiet or as_json) as show:
        done = train_retaining_heads(
            config, on_progress=lambda told: show(int(told["step"]), int(told["steps"]), f"loss {told['loss']:.3f}")
        )
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    say(f"{learnt}; the heads are in {done['output']} ({size(done['bytes'])}).")


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
        say(
            f"{row['slice']}, {row['system']}: recall@5 {row['recall_5']:.1%}, nDCG@10 {row['ndcg_10']:.3f} "
            f"of {row['n']}"
        )
