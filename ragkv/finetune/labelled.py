"""Rows of many-shot learning: labels that mean nothing, of things whose kind is the rule."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ragkv.finetune.sample import GOLD_WEIGHT, Ask, Sample, pack
from ragkv.shot import Shots, shot_text
from ragkv.worlds.name import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["shot_sample"]

_PLACES = listed("on the table|in the garden|at home|under a tree|near the wall|in the street|by the sea|up there", "|")
_ONSETS, _ENDS = listed("b d f g h k l m n p r s t v z st gr"), listed("al en ip or ux ad im ost ek un arn id")


def shot_sample(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, chunks: int, questions: int = 12, block: bool = False
) -> Sample:
    """Pack questions for the label of things, half of them in a shot, on at least four chunks of a few shots."""
    size, classes = rng.randint(2, 5), rng.randint(2, 4)
    labels = {f"{rng.choice(_ONSETS)}{rng.choice(_ENDS)}{rng.choice(_ENDS)}" for _ in range(20)}
    drawn = Shots(rng, count=max(4, chunks) * size, classes=classes, labels=sorted(labels))
    texts = drawn.chunks(rng, _PLACES, size)
    asks = []
    for number in range(questions):
        group, thing = drawn.fresh(rng) if number % 2 else rng.choice(drawn.shown)
        label = drawn.labels[group]
        asks.append(Ask(shot_text(rng, thing, _PLACES), label, ((0, len(label), GOLD_WEIGHT),)))
    return pack(tokenizer, texts, asks, block=block)
