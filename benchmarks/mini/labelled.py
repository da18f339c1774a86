"""Training rows for many-shot learning: meaningless labels that depend on the kind of thing in a sentence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ragkv.benchmarks.mini.sample import GOLD_WEIGHT, Ask, Sample, pack
from ragkv.worlds import UNANSWERABLE
from ragkv.worlds.name import listed
from ragkv.worlds.shot import Shots, sentence, shot_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["shot_sample"]

_PLACES = listed("on the table|in the garden|at home|under a tree|near the wall|in the street|by the sea|up there", "|")
_ONSETS, _ENDS = listed("b d f g h k l m n p r s t v z st gr"), listed("al en ip or ux ad im ost ek un arn id")


def shot_sample(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, chunks: int, questions: int = 18, block: bool = False
) -> Sample:
    """Pack questions about the labels of things on chunks of a few shots each. Half of the things are in a shot.

    The answer restates a shot, as other answers restate facts: one about the same thing, else about another thing of
    its kind. When only the label was the answer, the same model had learned nothing after a hundred steps.
    """
    size, classes = rng.randint(2, 5), rng.randint(2, 4)
    labels = {f"{rng.choice(_ONSETS)}{rng.choice(_ENDS)}{rng.choice(_ENDS)}" for _ in range(20)}
    drawn = Shots(rng, count=chunks * size, classes=classes, labels=sorted(labels))
    sentences = [sentence(rng, thing, _PLACES) for _, thing in drawn.shown]
    asks = []
    for number in range(questions):
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        same = [said for (_, shown), said in zip(drawn.shown, sentences, strict=True) if shown == thing]
        alike = [said for (kind, _), said in zip(drawn.shown, sentences, strict=True) if kind == group]
        question = shot_text(sentence(rng, thing, _PLACES))
        if alike:
            asks.append(_ask(question, rng.choice(same or alike), drawn.labels[group]))
        else:
            asks.append(Ask(question, UNANSWERABLE))
    return pack(tokenizer, drawn.chunks(sentences, size), asks, block=block)


def _ask(question: str, said: str, label: str) -> Ask:
    """The thing and its place decide which shot is read; they weigh half as much as the label, which is the answer."""
    text = f"{said} Label: {label}"
    shot = len("The "), len(said) - 1, GOLD_WEIGHT / 2
    return Ask(question, text, (shot, (len(text) - len(label), len(text), GOLD_WEIGHT)))
