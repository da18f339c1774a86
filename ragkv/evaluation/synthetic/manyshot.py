"""Many-shot in-context learning: chunks of labelled examples whose rule must be learned from them (APE Table 3)."""

from __future__ import annotations

import random

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import require
from ragkv.worlds.name import listed
from ragkv.worlds.shot import GROUPS, Shots, sentence, shot_text

__all__ = ["icl"]

_LABELS = listed("brask dolin fenup garo hivel jumat kesto lorip mavun noxel pidra quern")
_PLACES = listed(
    "in the yard|by the road|near the river|behind the house|under the bridge|at the market|on the hill", "|"
)


def icl(*, seed: int = 0, limit: int = 100, chunks: int = 8, shots: int = 4, classes: int = 3) -> Task:
    """Many-shot learning: `shots` sentences per chunk with meaningless labels; the question is the label of a new one.

    The label depends on the kind of thing in the sentence. In the slice "seen" the thing is in a shot, so looking it up
    is enough. In "unseen" it is not, so the rule must be learned. With 0 `chunks` nothing is read.
    """
    require("limit", limit, 1)
    require("chunks", chunks, 0, 1024)
    require("shots", shots, 1, 1000)
    require("classes", classes, 2, len(GROUPS))
    examples = []
    for number in range(limit):
        rng = random.Random(f"icl:{seed}:{chunks}:{shots}:{number}")
        drawn = Shots(rng, count=chunks * shots, classes=classes, labels=_LABELS)
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        texts = drawn.chunks([sentence(rng, shown, _PLACES) for _, shown in drawn.shown], shots)
        examples.append(
            Example(
                example_id=str(number),
                question=shot_text(sentence(rng, thing, _PLACES)),
                chunks=tuple(texts),
                answers=(drawn.labels[group],),
                kind="seen" if seen else "unseen",
                needed=tuple(dict.fromkeys(at // shots for at, (_, shot) in enumerate(drawn.shown) if shot == thing)),
                classes=tuple(sorted(drawn.labels.values())),
            )
        )
    return Task(name=f"icl/{chunks}", metric="classification", examples=examples, max_new_tokens=32, seed=seed)
