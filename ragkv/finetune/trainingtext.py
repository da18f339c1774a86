"""Text that is there on every machine: what the tokenizers and encoders of the bundled models are trained on."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ragkv.worlds import World
from ragkv.worlds.cloze import module_docstrings

__all__ = ["english_texts", "world_texts"]


def world_texts(count: int, *, seed: int = 0) -> Iterator[str]:
    """Yield the documents and questions of `count` worlds of the train split."""
    for index in range(count):
        world = World.generate(seed + index, split="train", size=24)
        for document in world.documents:
            yield f"# {document.title}\n\n{document.text}\n\n"
        for question in world.questions[::9]:
            yield f"Question: {question.question}\n"


def english_texts(limit: int = 2_000_000) -> Iterator[str]:
    """Yield docstrings of Python's standard library, plain English on any machine, up to `limit` characters."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for text in module_docstrings(path):
            limit -= len(text)
            yield text + "\n\n"
            if limit < 0:
                return
