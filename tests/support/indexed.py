"""An index over a few short texts, with which most tests of questions begin."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv import RagKV

PAIR = {
    "halden.md": "# Halden Works\n\nHalden Works was founded by Mira Oskel in 1907.\n",
    "bolt.txt": "Bolt Ltd makes valves. Bolt Ltd was founded by Ann Lee in Varn.",
}
"""Two documents of one chunk each."""


def write_texts(folder: Path, texts: Mapping[str, str] = PAIR) -> Path:
    """`folder`, with these texts by file name."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def indexed(folder: Path, texts: Mapping[str, str] = PAIR, **settings: Any) -> RagKV:
    """`folder / "index"` over these texts, by file name in `folder`, on the CPU; the caller closes it."""
    write_texts(folder, texts)
    made = RagKV.create(folder / "index", **{"device": "cpu", **settings, "model": str(settings.get("model", "mini"))})
    made.ingest(*(folder / name for name in texts))
    return made
