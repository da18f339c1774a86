"""Texts that exist on every machine, on which the bundled models and their tokenizers are trained."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ragkv.worlds import World
from ragkv.worlds.cloze import module_docstrings

__all__ = ["english_texts", "world_texts"]


def world_texts(count: int, *, seed: int = 0) -> Iterator[str]:
    """The documents and questions of `count` worlds of the training split."""
    for index in range(count):
        world = World.generate(seed + index, split="train", size=24)
        for document in world.documents:
            yield f"# {document.title}\n\n{document.text}\n\n"
        for question in world.questions[::9]:
            yield f"Question: {question.question}\n"


def english_texts(limit: int = 2_000_000) -> Iterator[str]:
    """Docstrings of Python's standard library, up to `limit` characters: English text on any machine."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for text in module_docstrings(path):
            limit -= len(text)
            yield text + "\n\n"
            if limit < 0:
                return
