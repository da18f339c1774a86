"""Cloze questions about English prose: words are left out of a sentence that one of the chunks contains."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

from ragkv.errors import UsageError
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import gathered, require
from ragkv.worlds.cloze import clozes, english_sentences, reference_texts

__all__ = ["cloze"]

_QUESTIONS = 4  # per context, whose KV is then made once for all of them
_RUN = 3  # consecutive passages of a text, which are the hardest distractors

_PATIENCE = 500  # consecutive contexts without a question


def cloze(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 50, folder: str = "") -> Task:
    """Words left out of a sentence of plain English, from Python's language reference or the texts of a `folder`.

    A chunk has about `words` words. `folder` is searched for .txt, .md and .rst files.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    require("words", words, 20, 2000)
    passages = [_passages(text, words) for text in (_files(folder) if folder else reference_texts())]
    passages = [cut for cut in passages if cut]
    if sum(map(len, passages)) < chunks or not any(english_sentences(p) for cut in passages for p in cut):
        raise UsageError(f"cloze: {folder or 'the reference'} holds too little plain English for {chunks} chunks.")
    rng = random.Random(f"cloze:{seed}:{chunks}:{words}")
    examples = gathered(
        limit,
        lambda number: _context(rng, _drawn(rng, passages, chunks), number),
        patience=_PATIENCE,
        barren=f"cloze: {folder or 'the reference'} has no sentence to ask about in {chunks} chunks.",
    )
    return Task(name=f"cloze/{chunks}", metric="contains", examples=examples, max_new_tokens=96, seed=seed)


def _files(folder: str) -> list[str]:
    root = Path(folder).expanduser()
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".txt", ".md", ".rst") and path.is_file())
    if not paths:
        raise UsageError(f"cloze: {folder} holds no .txt, .md or .rst file.")
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _passages(text: str, words: int) -> list[str]:
    """Passages of whole paragraphs or sentences with about `words` words; longer units are cut between words."""
    units = re.split(r"\n\s*\n|(?<=\.)\s", text)
    found: list[str] = []
    held: list[str] = []
    for unit in units:
        own = unit.split()
        if held and len(held) + len(own) > words:
            found.append(" ".join(held))
            held = []
        held += own
        while len(held) > words:
            found.append(" ".join(held[:words]))
            held = held[words:]
    return [*found, " ".join(held)] if held else found


def _drawn(rng: random.Random, passages: Sequence[Sequence[str]], chunks: int) -> list[str]:
    """Distinct passages in random order, drawn in runs of up to `_RUN` passages of one text."""
    chosen: dict[str, None] = {}
    while len(chosen) < chunks:
        cut = rng.choice(passages)
        at = rng.randrange(len(cut))
        for passage in cut[at : at + _RUN]:
            if len(chosen) < chunks:
                chosen[passage] = None
    drawn = list(chosen)
    rng.shuffle(drawn)
    return drawn


def _context(rng: random.Random, texts: list[str], number: int) -> list[Example]:
    """Questions about different sentences, each of which only one chunk contains."""
    stands = [(index, sentence) for index, text in enumerate(texts) for sentence in english_sentences(text)]
    stands = [pair for pair in stands if sum(pair[1] in text for text in texts) == 1]
    rng.shuffle(stands)
    asked = [(index, blank) for index, sentence in stands for blank in clozes(rng, sentence)][:_QUESTIONS]
    return [
        Example(
            example_id=f"{number}-{place}",
            question=blank.question,
            chunks=tuple(texts),
            answers=(blank.gold,),
            kind="cloze",
            needed=(index,),
        )
        for place, (index, blank) in enumerate(asked)
    ]
