"""Which model this is: where its files are, what it says of itself, and the fingerprint that its KV is keyed by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragkv.errors import ModelLoadError
from ragkv.mini import lm_path

__all__ = ["DESCRIPTIONS", "MINI", "WEIGHTS", "Checkpoint", "digest_files", "resolve"]

MINI = "mini"
_ADAPTER_VERSION = 1  # raised when ragkv's own code changes what a chunk KV holds
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
DESCRIPTIONS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_IRRELEVANT = {"generation_config.json", "ragkv.json", "trainer_state.json"}  # read after the KV, or by nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model as the user named it (`name`) and as transformers loads it (`location`).

    `recommended` holds what the checkpoint's own `ragkv.json` says: `block_tuned`, `sink`, `chunk_tokens`.
    """

    name: str
    location: str
    local: bool
    recommended: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self, dtype: str, revision: str | None = None) -> str:
        """What KV is keyed by: weights, config, tokenizer, dtype and the adapter's version, as one hex digest.

        `dtype` is the option as given ("auto" means what the hashed config says), `revision` a hub model's commit.
        A local folder is read whole (about 1.7 GB/s): a changed byte anywhere is another model, also in a file that
        ragkv does not know, unless it is known not to matter.
        """
        facts = f"{self._digest(revision)}:{dtype}:{_ADAPTER_VERSION}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def _digest(self, revision: str | None) -> str:
        if not self.local:
            if revision is None:
                raise ModelLoadError(
                    f"Model {self.name!r} came from the hub without a revision to know it by; "
                    "download it to a folder and give that path."
                )
            return f"hub:{self.location}@{revision}"
        folder = Path(self.location)
        files = sorted(f for pattern in WEIGHTS for f in folder.glob(pattern))
        if not files:
            raise ModelLoadError(f"No weights (*.safetensors) in model folder {folder}.")
        files += sorted(f for f in folder.iterdir() if f.suffix in DESCRIPTIONS and f.name not in _IRRELEVANT)
        return digest_files(folder, files)


def digest_files(folder: Path, files: Iterable[Path]) -> str:
    """One hex digest over the names (from `folder` down), sizes and bytes of `files`, in the order given."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            total.update(f"{path.relative_to(folder).as_posix()}:{path.stat().st_size}:".encode())
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def resolve(
    name: str, *, bundled: Callable[[], Path] = lm_path, marks: tuple[str, ...] = ("config.json",)
) -> Checkpoint:
    """The checkpoint that `name` means: "mini" (the folder that `bundled` tells), a folder, or a hub id.

    A folder is a checkpoint when it holds one of `marks`.
    """
    folder = bundled() if name == MINI else Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / mark).exists() for mark in marks):
            raise ModelLoadError(f"Folder {folder} holds no model: {' or '.join(marks)} is missing.")
        return Checkpoint(name=name, location=str(folder), local=True, recommended=_recommended(folder))
    if name == MINI or name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise ModelLoadError(f"No model folder at {name!r}; give a folder in Hugging Face layout or a hub id.")
    return Checkpoint(name=name, location=name, local=False)


def _recommended(folder: Path) -> Mapping[str, Any]:
    path = folder / "ragkv.json"
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path} must hold one JSON object.")
    return found
