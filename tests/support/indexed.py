"""An index over a few short texts, with which most tests of questions begin."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv import RagKV


def indexed(folder: Path, texts: Mapping[str, str], **settings: Any) -> RagKV:
    """`folder / "index"` over these texts, by file name in `folder`, on the CPU; the caller closes it."""
    files = [folder / name for name in texts]
    for path, text in zip(files, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    made = RagKV.create(folder / "index", **{"device": "cpu", **settings, "model": str(settings.get("model", "mini"))})
    made.ingest(*files)
    return made
