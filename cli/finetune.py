"""`ragkv finetune`: train a model of the user's, or a packet, for the engine `block`; retaining heads for `apb`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import echo, note, print_json, size
from ragkv.cli.console import steps as progress_of
from ragkv.cli.options import Device, Json, Quiet
from ragkv.errors import UsageError

app = typer.Typer(help="Train models.", no_args_is_help=True)

Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and data.")]


@app.callback()
def choose() -> None:
    """Train models."""


@app.command(no_args_is_help=True)
def block(
    model: Annotated[str, typer.Option(help="Model folder or hub id to tune; `mini` is the bundled one.")],
    data: Annotated[Path, typer.Option(help="JSONL file to learn from (docs/finetune.md).")],
    output: Annotated[Path, typer.Option(help="Folder for the tuned model; checkpoints are kept in it too.")],
    eval_data: Annotated[
        Path | None,
        typer.Option(help="JSONL file whose loss is measured in both layouts, before and after."),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Times that the data is gone through.")] = 1.0,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of --epochs.", show_default=False)] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Highest learning rate.", show_default="2e-4 for LoRA, 2e-5 for all weights"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows at once on a device.")] = 1,
    gradient_accumulation: Annotated[int, typer.Option(help="Batches that make one step.")] = 16,
    full_share: Annotated[
        float,
        typer.Option(help="Share of rows under full attention, so that `full` stays good; 0 to 1."),
    ] = 0.5,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the LoRA adapter.", show_default="16")] = None,
    full_weights: Annotated[
        bool, typer.Option("--full-weights", help="Tune all weights instead of an adapter.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (bfloat16 where the GPU has it), float32 or bfloat16.")] = "auto",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice instead of keeping them.")
    ] = False,
    sink: Annotated[
        str, typer.Option(help="Block before the first document: prefix, bos (its first token) or none.")
    ] = "prefix",
    no_positions: Annotated[
        bool,
        typer.Option("--no-positions", help="The paper's ablation: blocks keep the positions they were encoded at."),
    ] = False,
    over: Annotated[
        str,
        typer.Option(help="Chunk KV to tune for: standalone, as in the paper, or prefixed, after the prompt's prefix."),
    ] = "standalone",
    bos: Annotated[
        str | None,
        typer.Option(
            help="none: no BOS before the prompt, as Block-Attention's authors tune; auto: as the tokenizer has it.",
            show_default="as --model or --prompt-of say, else auto",
        ),
    ] = None,
    prompt_of: Annotated[
        Path | None,
        typer.Option(help="Index whose [prompt] is put around the data.", show_default="ragkv's own words"),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(help="Steps between checkpoints, and between measurements of --eval-data."),
    ] = 100,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue from OUTPUT's last checkpoint, or start again.")
    ] = True,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune a model of yours for the engine `block` (Block-Attention), by LoRA or all weights; extra `finetune`.

    OUTPUT is an ordinary Hugging Face folder that `--model` takes; its `ragkv.json` says how it was made. Stopped by
    Ctrl-C it leaves a checkpoint, and the same command continues.

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
        over=over,  # type: ignore[arg-type]
        prompt=prompt if bos is None else replace(prompt, bos=bos),  # type: ignore[arg-type]
        checkpoint_every=checkpoint_every,
        seed=seed,
        resume=resume,
        device=device,
    )

    def show(step: Mapping[str, float | int | str]) -> None:
        where = f"step {step['step']} of {step['steps']}: "
        if "loss" in step:
            note(f"{where}loss {float(step['loss']):.3f}, {float(step['seconds']):.0f} s")
        for layout in ("full", "block"):
            if f"eval_{layout}_loss" in step:
                note(f"{where}{layout} loss on --eval-data {float(step[f'eval_{layout}_loss']):.3f}")

    done = finetune_block(config, on_progress=None if quiet or as_json else show)
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps_done']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    echo(f"{learnt}; use it by: ragkv ingest PATH --model {output}")


@app.command(no_args_is_help=True)
def data(
    output: Annotated[Path, typer.Option(help="JSONL file to write.")],
    samples: Annotated[int, typer.Option(help="Lines to write.")] = 200,
    fewest: Annotated[int, typer.Option(help="Fewest passages of a line.")] = 4,
    most: Annotated[int, typer.Option(help="Most passages of a line.")] = 8,
    split: Annotated[
        str, typer.Option(help="train or heldout: worlds that share no name with each other's.")
    ] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the worlds.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a file for `ragkv finetune block --data` from generated worlds: questions, passages, answers.

    For a try before there is data of your own, and as its example: each line is {"prompt", "blocks", "response"}.

    Example: `ragkv finetune data --output train.jsonl`
    """
    from ragkv.finetune.data import write_world_examples

    written = write_world_examples(output, samples=samples, passage_range=(fewest, most), split=split, seed=seed)
    if as_json:
        print_json(written)
    elif not quiet:
        note(f"{written['lines']} lines in {output}, {written['two_hops']} of them ask over two passages.")


@app.command("retaining-heads", no_args_is_help=True)
def retaining_heads(
    model: Annotated[str, typer.Option(help="Model folder or hub id; it is not changed.")],
    data: Annotated[Path, typer.Option(help="JSONL file to learn from (docs/finetune.md).")],
    output: Annotated[Path | None, typer.Option(help="File for the heads.", show_default="beside the model")] = None,
    steps: Annotated[int, typer.Option(help="Steps, of one line each.")] = 3000,
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = 300,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 5e-4,
    clip: Annotated[float, typer.Option(help="Longest gradient.")] = 0.5,
    smooth: Annotated[float, typer.Option(help="Weight of the loss of neighbouring scores.")] = 0.0025,
    inner: Annotated[int, typer.Option(help="Width of the heads' hidden layer.")] = 1024,
    pool: Annotated[int, typer.Option(help="A token gets the highest score of so many neighbours, an odd number.")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Longer lines are left out.")] = 10240,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
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
    from ragkv.finetune.retaining_heads import RetainingConfig, train_retaining_heads

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
            config,
            on_progress=lambda step: show(int(step["step"]), int(step["steps"]), f"loss {step['loss']:.3f}"),
        )
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    echo(f"{learnt}; the heads are in {done['output']} ({size(done['bytes'])}).")


@app.command(no_args_is_help=True)
def packet(
    model: Annotated[str, typer.Option(help="Model folder or hub id; it is not changed.")],
    output: Annotated[Path, typer.Option(help="File for the packet.")],
    data: Annotated[
        Path | None,
        typer.Option(help="JSONL file of questions to learn from (docs/finetune.md).", show_default="generated ones"),
    ] = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(help="JSONL file of questions to measure with.", show_default="one of eight is held out"),
    ] = None,
    questions: Annotated[int, typer.Option(help="Questions to generate, without --data.")] = 384,
    header: Annotated[int, typer.Option(help="Vectors before each chunk.")] = 8,
    trailer: Annotated[int, typer.Option(help="Vectors after each chunk.")] = 8,
    sink: Annotated[
        str, typer.Option(help="Block before the first document: prefix, bos, none, or auto, as the model has it.")
    ] = "auto",
    over: Annotated[
        str, typer.Option(help="What chunks see while they are encoded: standalone, as in the paper, or prefixed.")
    ] = "standalone",
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer of the model.")] = 64,
    epochs: Annotated[float, typer.Option(help="Times that the questions are gone through.")] = 30.0,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of --epochs.", show_default=False)] = None,
    lr: Annotated[float, typer.Option(help="Learning rate at the first step; it falls to zero.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Rows at once on a device.")] = 8,
    gradient_accumulation: Annotated[int, typer.Option(help="Batches that make one step.")] = 8,
    prompt_of: Annotated[
        Path | None,
        typer.Option(help="Index whose [prompt] is put around the questions.", show_default="ragkv's own words"),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 10,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint, or begin again.")
    ] = True,
    device: Device = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train vectors around every chunk, with which `block` comes nearer to `full` (KV Packet); the model is frozen.

    They are one small file, which `packet = "FILE"` under [tuning.block] in ragkv.toml names. Stopped by Ctrl-C it
    leaves a checkpoint, and the same command continues.

    Example: `ragkv finetune packet --model ./my-model --output packet.safetensors`
    """
    from ragkv.config import PromptConfig, load_config
    from ragkv.finetune.packet import PacketConfig, train_packet

    config = PacketConfig(
        model=model,
        output=output,
        data=data,
        eval_data=eval_data,
        questions=questions,
        header=header,
        trailer=trailer,
        sink=sink,  # type: ignore[arg-type]
        over=over,  # type: ignore[arg-type]
        answer_tokens=answer_tokens,
        epochs=epochs,
        steps=steps,
        lr=lr,
        batch=batch,
        gradient_accumulation=gradient_accumulation,
        prompt=PromptConfig() if prompt_of is None else load_config(prompt_of).prompt,
        checkpoint_every=checkpoint_every,
        seed=seed,
        resume=resume,
        device=device,
    )
    with progress_of("training", silent=quiet or as_json) as show:
        done = train_packet(
            config,
            on_progress=lambda step: show(int(step["step"]), int(step["steps"]), f"loss {step['loss']:.3f}"),
        )
    if as_json:
        print_json(done)
        return
    echo(
        f"{done['steps']} steps; on {done['heldout']} held-out questions, KL to full attention {done['kl_block']:.3f} "
        f"without and {done['kl_packet']:.3f} with the packet, and the same token as full in "
        f"{done['agreement_block']:.1%} and {done['agreement_packet']:.1%}; it is in {done['output']} "
        f"({size(done['bytes'])})."
    )
