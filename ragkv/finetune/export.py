"""Replace the files of a trained model's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["METADATA", "replace_folder"]

METADATA = "ragkv.json"


@contextmanager
def replace_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder whose files afterwards replace those of `destination` one by one, each atomically."""
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".export-") as name:
        folder = Path(name)
        yield folder
        for old in set(destination.iterdir()) - {destination / file.name for file in folder.iterdir()}:
            if old.is_file():
                old.unlink()
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)  # safetensors creates files that only the owner can read
            file.replace(destination / file.name)
