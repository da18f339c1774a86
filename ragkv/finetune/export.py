"""Write a trained mini model as an ordinary Hugging Face folder with ragkv's own note of how it was made."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragkv.finetune.measure import AccuracyRow
from ragkv.finetune.recipe import MiniTrainConfig

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["METADATA", "export_mini", "replace_folder"]

METADATA = "ragkv.json"


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
    """Save weights in `dtype`, tokenizer, generation defaults and `ragkv.json` to `destination`.

    `model` itself is left as it is. `rows` are the held-out accuracies to record.
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


@contextmanager
def replace_folder(destination: Path) -> Iterator[Path]:
    """A folder to write to; its files then replace those of `destination` one by one, so that all are whole."""
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".export-") as name:
        folder = Path(name)
        yield folder
        for old in set(destination.iterdir()) - {destination / file.name for file in folder.iterdir()}:
            if old.is_file():
                old.unlink()
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)  # safetensors files are born private
            file.replace(destination / file.name)
