"""`ragkv finetune`: train a model of the user's for the engine `block`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import echo, note, print_json
from ragkv.cli.options import Device, Json, Quiet, Threads, shared_options
from ragkv.config import PromptConfig, load_config
from ragkv.errors import UsageError
from ragkv.finetune.config import BlockTuneConfig

app = typer.Typer(help="Train models.", no_args_is_help=True)

PromptOf = Annotated[
    Path | None,
    typer.Option(help="Index whose [prompt] is put around the data.", show_default="ragkv's own words"),
]


def _prompt(index: Path | None) -> PromptConfig:
    return PromptConfig() if index is None else load_config(index).prompt


@app.command(no_args_is_help=True)
@shared_options
def block(
    *,
    config: BlockTuneConfig,
    lora_rank: Annotated[int | None, typer.Option(help="Rank of the LoRA adapter.", show_default="16")] = None,
    full_weights: Annotated[
        bool, typer.Option("--full-weights", help="Tune all weights instead of an adapter.")
    ] = False,
    no_positions: Annotated[
        bool,
        typer.Option("--no-positions", help="The paper's ablation: blocks keep the positions they were encoded at."),
    ] = False,
    bos: Annotated[
        str | None,
        typer.Option(
            help="none: no BOS before the prompt, as Block-Attention's authors tune; auto: as the tokenizer does.",
            show_default="as --model or --prompt-of say, else auto",
        ),
    ] = None,
    prompt_of: PromptOf = None,
    device: Device = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tune a model of yours for the engine `block` (Block-Attention), by LoRA or all weights; extra `finetune`.

    OUTPUT is an ordinary Hugging Face folder that `--model` takes; its `ragkv.json` says how it was made. Stopped by
    Ctrl-C it leaves a checkpoint, and the same command continues.

    Example: `ragkv finetune block --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --output tuned`
    """
    if full_weights and lora_rank is not None:
        raise UsageError("Give either --lora-rank or --full-weights.")
    prompt = _prompt(prompt_of)
    config = replace(
        config,
        lora_rank=None if full_weights else lora_rank or 16,
        reencode=not no_positions,
        prompt=prompt if bos is None else replace(prompt, bos=bos),  # type: ignore[arg-type]
        device=device,
    )

    def show(step: Mapping[str, float | int | str]) -> None:
        where = f"step {step['step']} of {step['steps']}: "
        if "loss" in step:
            note(f"{where}loss {float(step['loss']):.3f}, {float(step['seconds']):.0f} s")
        for layout in ("full", "block"):
            if f"eval_{layout}_loss" in step:
                note(f"{where}{layout} loss on --eval-data {float(step[f'eval_{layout}_loss']):.3f}")

    from ragkv.finetune.block import finetune_block

    done = finetune_block(config, on_progress=None if quiet or as_json else show)
    if as_json:
        print_json(done)
        return
    learnt = f"{done['steps_done']} steps, loss {done['loss_first']:.3f} to {done['loss_last']:.3f}"
    echo(f"{learnt}; use it by: ragkv ingest PATH --model {config.output}")
