"""RULER's niah_multikey_3 and vt in words of one token each, for small models with long contexts (APB Table 3)."""

from __future__ import annotations

import random
from typing import Literal

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import cut, match_all, require_sizes
from ragkv.worlds.variable import ASK, variable_list

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
    examples = []
    for number in range(limit):
        rng = random.Random(f"variables:{kind}:{seed}:{chunks}:{words}:{number}")
        drawn = variable_list(rng, max(2, chunks * words // 3 - 1))
        asked = rng.choice([line for line in drawn.known if line.refers == (kind == "reference")] or drawn.known)
        examples.append(
            Example(
                example_id=str(number),
                question=f"{ASK} {asked.name}",
                chunks=cut(drawn.texts(), chunks),
                answers=(asked.value,),
                kind=kind,
            )
        )
    return match_all("variables", examples, chunks, 2, seed)
