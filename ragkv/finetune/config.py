"""The settings of `ragkv finetune block`, which makes an option of every field with an `Option`; without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ragkv.config import PromptConfig, require_types
from ragkv.errors import ConfigError
from ragkv.util.options import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTuneConfig:
    """The settings of a block fine-tuning. They are written to the tuned model's `ragkv.json`.

    A step has `batch` × `gradient_accumulation` rows. `lora_rank` None tunes all weights. `learning_rate` None means
    the paper's 2e-5 for all weights, and 2e-4 for LoRA. It rises over `warmup` steps (at most a tenth of all) and falls
    linearly to zero. `reencode` False is the paper's ablation "w/o-pos". `prompt` is the prompt around
    `{"prompt", "blocks"}` lines, usually an index's. Its `bos` applies to all lines; "auto" is what the model that is
    tuned declares.
    """

    model: Annotated[str, Option("Model folder or hub id to tune; `mini` is the bundled one.")]
    data: Annotated[Path, Option("JSONL file to learn from (docs/finetune.md).")]
    output: Annotated[Path, Option("Folder for the tuned model; checkpoints are kept in it too.")]
    eval_data: Annotated[
        Path | None, Option("JSONL file whose loss is measured in both layouts, before and after.")
    ] = None
    epochs: Annotated[float, Option("Passes over the data.")] = 1.0
    steps: Annotated[int | None, Option("Steps, instead of --epochs.")] = None
    learning_rate: Annotated[
        float | None, Option("Highest learning rate.", "2e-4 for LoRA, 2e-5 for all weights", flag="--lr")
    ] = None
    warmup: int = 20
    batch: Annotated[int, Option("Rows at once on a device.")] = 1
    gradient_accumulation: Annotated[int, Option("Batches that make one step.")] = 16
    full_share: Annotated[float, Option("Share of rows under full attention, so that `full` stays good; 0 to 1.")] = 0.5
    lora_rank: int | None = 16
    adapter: Annotated[Path | None, Option("LoRA adapter in peft's layout from which to go on; else a new one.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], Option("auto (bfloat16 if the GPU supports it), float32 or bfloat16.")
    ] = "auto"
    gradient_checkpointing: Annotated[bool, Option("Compute activations twice instead of keeping them.")] = False
    sink: Annotated[
        Literal["prefix", "bos", "none"],
        Option("Block before the first document: prefix, bos (its first token) or none."),
    ] = "prefix"
    reencode: bool = True
    over: Annotated[
        Literal["standalone", "prefixed"],
        Option("Chunk KV to tune for: standalone, as in the paper, or prefixed, after the prompt's prefix."),
    ] = "standalone"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    seed: Annotated[int, Option("Seed of weights and data.")] = 0
    checkpoint_every: Annotated[int, Option("Steps between checkpoints, and between measurements of --eval-data.")] = (
        100
    )
    resume: Annotated[bool, Option("Continue from the last checkpoint, or start again.")] = True
    device: str | None = None

    def __post_init__(self) -> None:
        require_types(self)
        if self.over == "prefixed" and (self.sink != "prefix" or not self.reencode):
            raise ConfigError('over = "prefixed" has seen the whole prefix: keep the sink "prefix" and the positions.')
        for name in ("steps", "lora_rank", "batch", "gradient_accumulation", "checkpoint_every"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name} must be at least 1, not {count}.")
        for name in ("epochs", "learning_rate"):
            if (amount := getattr(self, name)) is not None and not 0 < amount < math.inf:
                raise ConfigError(f"{name} must be above 0, not {amount}.")
        if not 0 <= self.full_share <= 1:
            raise ConfigError(f"full_share must be between 0 and 1, not {self.full_share}.")
        if self.sink == "bos" and self.prompt.bos == "none":
            raise ConfigError('The sink "bos" needs a BOS, but the prompt has none; use the sink "prefix" or "none".')
        if self.adapter is not None and self.lora_rank is None:
            raise ConfigError("An adapter is not trained together with all weights: leave out one of the two.")
        if self.warmup < 0:
            raise ConfigError(f"warmup must be at least 0, not {self.warmup}.")

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 2e-5 if self.lora_rank is None else 2e-4
