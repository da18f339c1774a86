"""The folder of a tuned model: check it, find the checkpoint to resume from, and export the model to it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.boundary.plainfile import is_folder, make_folder, parse_json, read_plain, remove_tree, replace_plain
from ragkv.errors import ModelLoadError, UsageError
from ragkv.finetune.export import METADATA, replace_folder

if TYPE_CHECKING:
    from ragkv.model.checkpoint import Checkpoint

__all__ = ["RUNS", "check_output", "export_tuned", "last_checkpoint"]

RUNS = "checkpoints"
_SETTINGS = "run.json"
_CHECKPOINT = re.compile(r"checkpoint-[0-9]{1,18}")


def check_output(output: Path) -> None:
    """Refuse a folder with files of something else than an earlier run, because the tuned model would replace them."""
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a folder for --output.")
    if output.is_dir() and any(output.iterdir()) and not (output / RUNS / _SETTINGS).exists():
        raise UsageError(f"{output} holds other files, which the tuned model would replace; name an empty folder.")


def last_checkpoint(runs: Path, settings: Mapping[str, Any], *, resume: bool) -> Path | None:
    """The checkpoint to resume from, or None. Raises UsageError if the folder has a run of other settings."""
    note = runs / _SETTINGS
    if not resume and runs.exists():
        remove_tree(runs)
    if os.path.lexists(note):
        try:
            before = parse_json(read_plain(note))
            if not isinstance(before, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise UsageError(f"{note} is damaged ({error}); start anew with --no-resume.") from error
        changed = sorted(name for name in before.keys() | settings if before.get(name) != settings.get(name))
        if changed:
            raise UsageError(
                f"{runs.parent} holds a run of other settings ({', '.join(changed)}); give those of then, "
                "another --output, or --no-resume to begin again."
            )
    # the state is written last, so a folder that has it is complete
    found = {path.parent for path in runs.glob("checkpoint-*/trainer_state.json")}
    whole = [path for path in found if _CHECKPOINT.fullmatch(path.name) and is_folder(path)]
    make_folder(runs)
    replace_plain(note, (json.dumps(settings, indent=1) + "\n").encode())
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def export_tuned(
    learner: Any, output: Path, checkpoint: Checkpoint, revision: str | None, *, metadata: Mapping[str, Any]
) -> None:
    """Write peft's adapter, then the merged weights in the dtype of `checkpoint`, its tokenizer, and `ragkv.json`."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    options = {"local_files_only": checkpoint.local, "revision": revision, "trust_remote_code": False}
    try:
        stored = AutoConfig.from_pretrained(checkpoint.location, **options)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **options)
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"Model {checkpoint.name!r} disappeared while it was tuned ({error}); restore it and run the command again."
        ) from error
    module = learner
    if hasattr(learner, "merge_and_unload"):
        with replace_folder(output / "adapter") as folder:
            learner.save_pretrained(folder, save_embedding_layers=False)
        module = learner.merge_and_unload()
    module.config.use_cache = getattr(stored, "use_cache", True)  # the Trainer turned it off
    with replace_folder(output) as folder:
        module.to(stored.dtype or torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / METADATA).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
