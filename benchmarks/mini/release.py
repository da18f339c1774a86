"""Make the bundled mini model from nothing: tokenizer, training, held-out evaluation, export."""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragkv.finetune.export import export_mini
from ragkv.finetune.measure import measure
from ragkv.finetune.mini import Progress, train_mini
from ragkv.finetune.recipe import MiniTrainConfig
from ragkv.finetune.tokenizer import english_texts, train_tokenizer, world_texts

__all__ = ["build_mini"]

logger = logging.getLogger(__name__)


def build_mini(
    config: MiniTrainConfig, output: Path, *, contexts: int = 25, on_progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Train into `output` (tokenizer and checkpoint are kept, so a killed run goes on) and write `output/model`.

    Returns the held-out accuracies: layout, passages, kind, accuracy, n. `contexts` worlds are asked.
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
