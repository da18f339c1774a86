"""Make the bundled mini model: train its tokenizer and weights, evaluate it on held-out worlds, export it."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragkv.benchmarks.mini.accuracy import AccuracyRow, measure
from ragkv.benchmarks.mini.recipe import MiniTrainConfig
from ragkv.benchmarks.mini.tokenizer import train_tokenizer
from ragkv.benchmarks.mini.training import train_mini
from ragkv.finetune.export import METADATA, replace_folder
from ragkv.finetune.trainingloop import Progress
from ragkv.finetune.trainingtext import english_texts, world_texts

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build_mini", "export_mini"]

logger = logging.getLogger(__name__)


def build_mini(
    config: MiniTrainConfig, output: Path, *, contexts: int = 25, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train in the folder `output` and write `output/model`. Returns the accuracies on `contexts` held-out worlds.

    Each row has layout, passages, kind, accuracy and n. The tokenizer and a checkpoint are kept in `output`, so that a
    killed run continues.
    """
    from transformers import AutoTokenizer

    folder = output / "tokenizer"
    if not (folder / "tokenizer.json").exists() and config.start is not None:
        AutoTokenizer.from_pretrained(config.start, trust_remote_code=False).save_pretrained(folder)
    elif not (folder / "tokenizer.json").exists():
        logger.info("training the tokenizer")
        train_tokenizer(itertools.chain(world_texts(400), english_texts(1_200_000))).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = train_mini(config, tokenizer, output, on_progress=on_progress).cpu()
    model.set_attn_implementation("sdpa")
    rows = measure(
        model,
        tokenizer,
        contexts=contexts,
        questions=8,
        passage_counts=(4, 8, 12),
        layouts=("full", "block", "single"),
        seed=1,
    )
    export_mini(model, tokenizer, output / "model", config=config, rows=rows)
    return [asdict(row) for row in rows]


def export_mini(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    destination: Path,
    *,
    config: MiniTrainConfig,
    rows: Sequence[AccuracyRow],
    notes: Mapping[str, Any] | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
) -> None:
    """Write the weights in `dtype`, the tokenizer, generation defaults and `ragkv.json` to `destination`.

    `model` itself is not changed. `rows` are the held-out accuracies to record.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    metadata = {
        "block_tuned": any(stage.block_share > 0 for stage in config.stages),
        "sink": "prefix",
        "chunk_tokens": 96,
        "recipe": {
            **asdict(config),
            **(notes or {}),
            "heldout_accuracy": [{**asdict(row), "accuracy": round(row.accuracy, 4)} for row in rows],
        },
    }
    with replace_folder(destination) as folder:
        copy = AutoModelForCausalLM.from_config(model.config, dtype=getattr(torch, dtype), trust_remote_code=False)
        copy.load_state_dict(model.state_dict())
        copy.generation_config = GenerationConfig(
            do_sample=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        copy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
