"""Long lists of variables, many of which stand for another one: what a line says depends on an earlier line.

A name is one word and so is a value, so that a small model with a word for a token can read lists of a thousand tokens.
Names come in families (river0 … river7), and a line refers only to its own family. A variable that was referred to may
get another value later; the line that referred to it keeps the first one, as in a program. So who reads such a line
without those before it cannot make up for that at the end. The list's heading (plus0 … plus3) says how references are
meant: so many values further on, within a value's group of eight.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ragkv.worlds.name import listed

__all__ = [
    "ASK",
    "BEGIN",
    "HEADINGS",
    "NAMES",
    "STOP",
    "VALUES",
    "Line",
    "VariableList",
    "family_of",
    "variable_list",
]

MEMBERS = 8
_FAMILIES = listed(
    "anchor apple badge basket bell bottle bridge candle castle chair clock coat crown door eagle falcon feather ferry "
    "flag garden glove hammer harbor island jacket kettle ladder lantern lemon mirror needle orchard"
)
NAMES = tuple(f"{family}{member}" for family in _FAMILIES for member in range(MEMBERS))
VALUES = tuple(map(str, range(100, 196)))
HEADINGS = tuple(f"plus{steps}" for steps in range(4))
BEGIN, STOP, ASK = "<begin>", ";", "?"
_GROUP = 8
_LINES_OF_A_FAMILY = 9
"""About so many: its members, and one that gets another value."""


@dataclass(frozen=True, slots=True)
class Line:
    """`name` stands for `value`, which the line says itself, or which follows from the variable `content`."""

    name: str
    content: str
    value: str

    @property
    def refers(self) -> bool:
        return self.content != self.value


def family_of(name: str) -> str:
    """What the names of a family have in common."""
    return name.rstrip("0123456789")


@dataclass(frozen=True, slots=True)
class VariableList:
    """All lines in order, and those of them whose variable has one value and may be asked for."""

    heading: str
    lines: tuple[Line, ...]
    known: tuple[Line, ...]

    def texts(self) -> list[str]:
        """Its beginning, and each line."""
        return [f"{BEGIN} {self.heading} {STOP}", *(f"{line.name} {line.content} {STOP}" for line in self.lines)]


def variable_list(
    rng: random.Random, count: int, *, refer: float = 0.6, overwrite: float = 0.4, headings: int = len(HEADINGS)
) -> VariableList:
    """A list of at most `count` lines, under one of the first `headings`.

    A line refers to an earlier one with the chance `refer`, where it can; a variable that was referred to gets another
    value with the chance `overwrite`, when its family's turn comes again.
    """
    steps = rng.randrange(headings)
    families = rng.sample(_FAMILIES, max(1, min(len(_FAMILIES), math.ceil(count / _LINES_OF_A_FAMILY))))
    unused = {family: rng.sample(range(MEMBERS), MEMBERS) for family in families}
    known: dict[str, dict[str, Line]] = {family: {} for family in families}
    referred: dict[str, list[str]] = {family: [] for family in families}  # and not overwritten yet
    gone: set[str] = set()
    lines: list[Line] = []
    while families and len(lines) < count:
        family = rng.choice(families)
        again = referred[family]
        if (again and rng.random() < overwrite) or not unused[family]:
            if not again:
                families.remove(family)
                continue
            name, value = again.pop(rng.randrange(len(again))), rng.choice(VALUES)
            gone.add(name)
            lines.append(Line(name, value, value))
            continue
        name = f"{family}{unused[family].pop()}"
        targets = [line for line in known[family].values() if not line.refers and line.name not in gone]
        if targets and rng.random() < refer:
            target = rng.choice(targets)
            again += [] if target.name in again else [target.name]
            line = Line(name, target.name, _further(target.value, steps))
        else:
            value = rng.choice(VALUES)
            line = Line(name, value, value)
        known[family][name] = line
        lines.append(line)
    asked = tuple(line for of_one in known.values() for line in of_one.values() if line.name not in gone)
    return VariableList(HEADINGS[steps], tuple(lines), asked)


def _further(value: str, steps: int) -> str:
    group, place = divmod(VALUES.index(value), _GROUP)
    return VALUES[group * _GROUP + (place + steps) % _GROUP]
