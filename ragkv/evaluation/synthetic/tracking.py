"""RULER's niah_multikey_3 and vt in words of one token each, for small models with long contexts (APB Table 3)."""

from __future__ import annotations

import random
from typing import Literal

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import cut, match_all, require, require_sizes
from ragkv.worlds.variable import asked, variable_list

__all__ = ["variables"]


def variables(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    words: int = 60,
    kind: Literal["value", "reference"] = "reference",
) -> Task:
    """What a variable stands for, in a list of nothing but variables; `kind` "reference": for what another one did.

    "value" asks for a line that gives its value itself, as RULER's niah_multikey_3 does. "reference" is its variable
    tracking: the line names an earlier variable, which gets another value later, and is asked for what it stood for.
    Lists of both kinds are drawn alike.
    """
    require_sizes(limit, chunks, words)
    require("words", words, 4)  # each chunk has a line
    require("chunks x words", chunks * words, 120, 570)  # both kinds are there; names suffice
    examples = []
    for number in range(limit):
        rng = random.Random(f"variables:{kind}:{seed}:{chunks}:{words}:{number}")
        drawn = variable_list(rng, chunks * words // 2 - 1)
        line = rng.choice([each for each in drawn.known if each.refers == (kind == "reference")])
        examples.append(
            Example(
                example_id=str(number),
                question=asked(line.name),
                chunks=cut(drawn.texts(), chunks),
                answers=(line.value,),
                kind=kind,
            )
        )
    return match_all("variables", examples, chunks, 2, seed)
