"""Many-shot in-context learning: labelled examples as chunks, whose rule nothing else tells (APE Table 3's shape)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ragkv.evaluation.synthetic.wording import require
from ragkv.evaluation.task import Example, Task
from ragkv.worlds.name import listed

__all__ = ["icl"]

_LABELS = listed("brask dolin fenup garo hivel jumat kesto lorip mavun noxel pidra quern")
_PLACES = listed(
    "in the yard|by the road|near the river|behind the house|under the bridge|at the market|on the hill", "|"
)
_GROUPS: Mapping[str, Sequence[str]] = {
    "animal": listed(
        "horse dog cat cow goat sheep lion tiger bear wolf fox rabbit eagle owl duck goose whale shark frog"
    ),
    "tool": listed("hammer saw drill chisel wrench pliers screwdriver axe shovel rake ladder crowbar file clamp lathe"),
    "fruit": listed("apple pear plum cherry peach grape lemon orange banana mango melon fig apricot papaya kiwi"),
    "clothing": listed("coat shirt hat glove scarf sock boot skirt jacket sweater belt vest cap sandal apron"),
    "vehicle": listed("car truck bus train tram bicycle boat ferry canoe airplane tractor scooter van wagon sled"),
    "instrument": listed("piano violin flute drum guitar trumpet harp cello clarinet banjo oboe tuba organ lute viola"),
}
_HELD_OUT = 5  # of each group, in no shot


def icl(*, seed: int = 0, limit: int = 100, chunks: int = 8, shots: int = 4, classes: int = 3) -> Task:
    """Many-shot learning: `shots` sentences a chunk with labels that mean nothing; the label of a new one is asked for.

    The rule is the kind of thing that a sentence names. Slices: "seen", the thing stands in a shot, so that looking it
    up is enough; "unseen", it does not, so that the rule must be learnt. With no `chunks` nothing is read.
    """
    require("limit", limit, 1)
    require("chunks", chunks, 0, 1024)
    require("shots", shots, 1, 1000)
    require("classes", classes, 2, len(_GROUPS))
    examples = []
    for number in range(limit):
        rng = random.Random(f"icl:{seed}:{chunks}:{shots}:{number}")
        drawn = _Shots(rng, count=chunks * shots, classes=classes)
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        texts = drawn.chunks(rng, shots)
        examples.append(
            Example(
                example_id=str(number),
                question=_shot_text(rng, thing),
                chunks=tuple(texts),
                answers=(drawn.labels[group],),
                kind="seen" if seen else "unseen",
                needed=tuple(dict.fromkeys(at // shots for at, (_, shot) in enumerate(drawn.shown) if shot == thing)),
                classes=tuple(sorted(drawn.labels.values())),
            )
        )
    return Task(name=f"icl/{chunks}", metric="classification", examples=examples, max_new_tokens=16, seed=seed)


class _Shots:
    """Sentences about things of some groups, each with the label that stands for its group here.

    The rule is the kind of thing that a sentence names. `shown` are (group, thing) in order, `labels` maps groups.
    """

    def __init__(self, rng: random.Random, *, count: int, classes: int) -> None:
        groups = rng.sample(sorted(_GROUPS), classes)
        self.labels = dict(zip(groups, rng.sample(_LABELS, classes), strict=True))
        self._things = {group: rng.sample(_GROUPS[group], len(_GROUPS[group])) for group in groups}
        turns = [groups[at % classes] for at in range(count)]  # every label about as often
        rng.shuffle(turns)
        self.shown = [(group, rng.choice(self._things[group][_HELD_OUT:])) for group in turns]

    def fresh(self, rng: random.Random) -> tuple[str, str]:
        """A (group, thing) that is in no shot."""
        group = rng.choice(list(self.labels))
        return group, rng.choice(self._things[group][:_HELD_OUT])

    def chunks(self, rng: random.Random, size: int) -> list[str]:
        """All shots, `size` in a text, each in some place."""
        lines = [f"{_shot_text(rng, thing)} {self.labels[group]}" for group, thing in self.shown]
        return ["\n\n".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def _shot_text(rng: random.Random, thing: str) -> str:
    """What stands before a label."""
    return f"Input: The {thing} is {rng.choice(_PLACES)}.\nLabel:"
