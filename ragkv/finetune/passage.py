"""Passages of generated worlds, cut like files by the chunker, and sometimes damaged like extracted text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragkv.worlds import World, WorldDocument, WorldQuestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["answerable", "passages"]


def _file_units(rng: random.Random, world: World) -> list[tuple[str, ...]]:
    """Group the documents into files of one to four sections. A file is a tuple of headings and sentences."""
    documents = list(world.documents)
    rng.shuffle(documents)
    files: list[tuple[str, ...]] = []
    while documents:
        count = rng.choice((1, 1, 2, 3, 4))
        sections, documents = documents[:count], documents[count:]
        markdown = rng.random() < 0.8
        units: list[str] = []
        for index, document in enumerate(sections):
            units += _section_units(rng, document, ("# " if index == 0 else "## ") if markdown else "")
        files.append(tuple(units))
    return files


def _section_units(rng: random.Random, document: WorldDocument, mark: str) -> list[str]:
    """One section: its heading (one in eight has none) and its sentences, with or without paragraphs."""
    units = [] if rng.random() < 0.125 else [f"{mark}{document.title}{rng.choice((chr(10), chr(10) * 2))}"]
    paragraphs = rng.random() < 0.3
    for index, sentence in enumerate(document.sentences):
        last = index == len(document.sentences) - 1
        units.append(sentence + ("\n\n" if last or (paragraphs and rng.random() < 0.35) else " "))
    return units


def passages(rng: random.Random, tokenizer: PreTrainedTokenizerFast, world: World, *, limit: int = 96) -> list[str]:
    """Cut the world into passages of about 30 to `limit` tokens, in random order and stripped.

    Most cuts are between sentences. One passage in ten loses a few words at either end, and one in twenty has broken
    lines, like text from a PDF.
    """
    files = _file_units(rng, world)
    flat = [unit for file in files for unit in file]
    sizes = iter([len(ids) for ids in tokenizer(flat, add_special_tokens=False)["input_ids"]])
    found: list[str] = []
    for file in files:
        target = rng.randint(30, limit)
        text, size = "", 0
        for unit in file:
            tokens = next(sizes)
            if size and size + tokens > target:
                found.append(text)
                text, size = "", 0
                target = rng.randint(30, limit) if rng.random() < 0.5 else limit
            text += unit
            size += tokens
        if size >= 8:
            found.append(text)
    rng.shuffle(found)
    return [_damaged(rng, text).strip() for text in found]


def _damaged(rng: random.Random, text: str) -> str:
    """Sometimes damage a passage as real extraction and chunking do."""
    kind = rng.random()
    words = text.split(" ")
    if kind < 0.1 and len(words) > 20:
        return " ".join(words[rng.randint(0, 5) : len(words) - rng.randint(0, 5)])
    if kind < 0.15:
        return "".join(word + ("\n" if rng.random() < 0.1 else " ") for word in words)
    return text


def answerable(world: World, texts: Sequence[str]) -> list[WorldQuestion]:
    """The world's questions of one or two hops whose supporting sentences are all in `texts`."""
    stands = {fact.sentence for fact in world.stated(texts)}
    return [question for question in world.questions if stands.issuperset(question.support)]
