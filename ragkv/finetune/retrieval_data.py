"""Training data of the mini embedder and reranker: questions about worlds, and the passages that answer them.

A question names its entity, or describes it in other words (`ragkv.worlds.paraphrase`). The facts say which passages
are right. Prose is used for inverse cloze: a sentence, and the passage that it was cut from. The data depend only on a
`random.Random`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.finetune.passage import passages
from ragkv.worlds import Split, World
from ragkv.worlds.paraphrase import paraphrases

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["Ask", "Step", "prose_step", "world_step"]

NAMED_SHARE, BRIDGE_SHARE = 0.35, 0.1
"""Shares of questions of one hop and of two hops that name their entity; all others describe it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question, the indices of the passages that answer it, and whether it shares their words."""

    question: str
    answers: tuple[int, ...]
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The passages and questions of a step. Each question is scored against all passages."""

    passages: tuple[str, ...]
    asks: tuple[Ask, ...]


def world_step(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: Split = "train",
    worlds: int = 2,
    size: int = 20,
    asks: int = 96,
    limit: int = 96,
) -> Step:
    """Questions about `worlds` worlds of `size` entities, and their passages of up to `limit` tokens."""
    texts: list[str] = []
    named: list[Ask] = []
    bridged: list[Ask] = []
    described: list[Ask] = []
    for _ in range(worlds):
        world = World.generate(rng.getrandbits(40), split=split, size=size)
        own = passages(rng, tokenizer, world, limit=limit)
        where = _Places(own, len(texts))
        texts += own
        for question in world.questions:
            answers = where.any_of(question.support)
            if answers:
                ask = Ask(question=question.question, answers=answers, named=True)
                (named if question.hops == 1 else bridged).append(ask)
        for other in paraphrases(world, seed=rng.getrandbits(30), wordings=1):
            told = set(where.any_of(other.traits))
            if answers := tuple(place for place in where.any_of([other.fact]) if place in told):
                described.append(Ask(question=other.question, answers=answers, named=False))
    counts = [round(asks * NAMED_SHARE), round(asks * BRIDGE_SHARE)]
    counts.append(asks - sum(counts))
    drawn = [
        ask
        for group, count in zip((named, bridged, described), counts, strict=True)
        for ask in rng.sample(group, min(count, len(group)))
    ]
    return Step(passages=tuple(texts), asks=tuple(drawn))


class _Places:
    """Finds the passages that contain a sentence."""

    def __init__(self, texts: Sequence[str], first: int) -> None:
        self._texts = [" ".join(text.split()) for text in texts]
        self._first = first

    def any_of(self, sentences: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            self._first + place
            for place, text in enumerate(self._texts)
            if any(sentence in text for sentence in sentences)
        )


def prose_step(rng: random.Random, texts: Sequence[str], *, count: int = 64) -> Step:
    """`count` passages of three to six sentences. One sentence of each is the question, and usually removed from it."""
    chosen: list[str] = []
    asks: list[Ask] = []
    for text in rng.sample(list(texts), len(texts)):
        sentences = [s for s in re.split(r"(?<=[.!?:])\s+|\n\n+", text) if len(s.split()) > 4]
        if len(sentences) < 3:
            continue
        length = rng.randint(3, 6)
        start = rng.randrange(max(1, len(sentences) - length + 1))
        piece = sentences[start : start + length]
        asked = piece.pop(rng.randrange(len(piece)))
        words = asked.split()
        if rng.random() < 0.3:  # so that equal words stay useful
            piece.insert(0, asked)
        width = rng.randint(4, 16)
        at = rng.randrange(max(1, len(words) - width + 1))
        asks.append(Ask(question=" ".join(words[at : at + width]), answers=(len(chosen),), named=True))
        chosen.append(" ".join(piece)[:600])
        if len(chosen) == count:
            break
    return Step(passages=tuple(chosen), asks=tuple(asks))
