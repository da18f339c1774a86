"""Labelled sentences with an arbitrary rule, for training and testing many-shot learning."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ragkv.worlds.name import listed

__all__ = ["GROUPS", "Shots", "sentence", "shot_text"]

GROUPS: Mapping[str, Sequence[str]] = {
    "animal": listed(
        "horse dog cat cow goat sheep lion tiger bear wolf fox rabbit eagle owl duck goose whale shark frog"
    ),
    "tool": listed("hammer saw drill chisel wrench pliers screwdriver axe shovel rake ladder crowbar file clamp lathe"),
    "fruit": listed("apple pear plum cherry peach grape lemon orange banana mango melon fig apricot papaya kiwi"),
    "clothing": listed("coat shirt hat glove scarf sock boot skirt jacket sweater belt vest cap sandal apron"),
    "vehicle": listed("car truck bus train tram bicycle boat ferry canoe airplane tractor scooter van wagon sled"),
    "instrument": listed("piano violin flute drum guitar trumpet harp cello clarinet banjo oboe tuba organ lute viola"),
}
_HELD_OUT = 5  # things per group that are in no shot


class Shots:
    """Sentences about things, each with the label of the thing's group.

    The label depends only on the group. `shown` are the (group, thing) pairs in order; `labels` maps groups to labels.
    """

    def __init__(self, rng: random.Random, *, count: int, classes: int, labels: Sequence[str]) -> None:
        groups = rng.sample(sorted(GROUPS), classes)
        self.labels = dict(zip(groups, rng.sample(labels, classes), strict=True))
        self._things = {group: rng.sample(GROUPS[group], len(GROUPS[group])) for group in groups}
        turns = [groups[at % classes] for at in range(count)]  # every label about as often
        rng.shuffle(turns)
        self.shown = [(group, rng.choice(self._things[group][_HELD_OUT:])) for group in turns]

    def fresh(self, rng: random.Random) -> tuple[str, str]:
        """A pair (group, thing) that is in no shot."""
        group = rng.choice(list(self.labels))
        return group, rng.choice(self._things[group][:_HELD_OUT])

    def chunks(self, sentences: Sequence[str], size: int) -> list[str]:
        """All shots as texts of `size` shots. `sentences` are in the order of `shown`."""
        labels = [self.labels[group] for group, _ in self.shown]
        lines = [f"{shot_text(said)} {label}" for said, label in zip(sentences, labels, strict=True)]
        return ["\n\n".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def sentence(rng: random.Random, thing: str, places: Sequence[str]) -> str:
    """A sentence about `thing` that does not reveal its label."""
    return f"The {thing} is {rng.choice(places)}."


def shot_text(said: str) -> str:
    """The text before a label."""
    return f"Input: {said}\nLabel:"
