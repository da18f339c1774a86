"""Long lists of variables, many of which stand for another one: what a line says depends on an earlier line.

A name is one word, and so are a value and a reference, so that a small model with a word for a token can read lists of
many tokens; nothing stands between the lines, because a word that says nothing draws all attention that is to do
nothing. The list begins with terms, to which any later line may refer. Other names come in families (river0 … river7),
and refer within their own. A variable that was referred to may get another value later, and every term does in the end;
the line that referred to it keeps the first one, as in a program. So who reads such a line without those before it
cannot make up for that at the end.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ragkv.worlds.name import listed

__all__ = [
    "BEGIN",
    "FAMILIES",
    "MEMBERS",
    "TERM",
    "VALUES",
    "Line",
    "VariableList",
    "asked",
    "referred",
    "variable_list",
]

MEMBERS = 8
_FAMILIES = listed(
    "anchor apple badge basket bell bottle bridge candle castle chair clock coat crown door eagle falcon feather ferry "
    "flag garden glove hammer harbor island jacket kettle ladder lantern lemon mirror needle orchard"
)
TERM = "term"
"""The family of the terms."""
FAMILIES = (TERM, *_FAMILIES)
VALUES = tuple(map(str, range(100, 196)))
BEGIN = ("variables", ":")
"""How a list begins; two words, as a line has, so that blocks of an even number of words break no line."""
TERMS = 4
_LINES_OF_A_FAMILY = 9
"""About so many: its members, and one that gets another value."""
_LATE = 0.75
"""From this part of the list on, terms get other values."""


@dataclass(frozen=True, slots=True)
class Line:
    """`name` stands for `value`, which the line says itself, or which the variable `content` stands for."""

    name: str
    content: str
    value: str

    @property
    def refers(self) -> bool:
        return self.content != self.value

    @property
    def text(self) -> str:
        return f"{self.name} {referred(self.content) if self.refers else self.content}"

    @property
    def family(self) -> str:
        return self.name.rstrip("0123456789")


def asked(name: str) -> str:
    """A question about a variable, which is a word as well."""
    return f"?{name}"


def referred(name: str) -> str:
    """What another line says to stand for the same as a variable, a word of its own too."""
    return f"={name}"


@dataclass(frozen=True, slots=True)
class VariableList:
    """All lines in order, and those of them whose variable has one value and may be asked for."""

    lines: tuple[Line, ...]
    known: tuple[Line, ...]

    def texts(self) -> list[str]:
        """Its beginning, and each line."""
        return [" ".join(BEGIN), *(line.text for line in self.lines)]


def variable_list(rng: random.Random, count: int, *, refer: float = 0.6, overwrite: float = 0.4) -> VariableList:
    """A list of at most `count` lines, the terms' among them; fewer when all names are used up.

    A line refers to an earlier one with the chance `refer`, where it can: to a term in half of the cases. A variable
    that was referred to gets another value with the chance `overwrite`, when its family's turn comes again.
    """
    families = rng.sample(_FAMILIES, max(1, min(len(_FAMILIES), math.ceil((count - TERMS) / _LINES_OF_A_FAMILY))))
    unused = {family: rng.sample(range(MEMBERS), MEMBERS) for family in families}
    used: dict[str, list[str]] = {family: [] for family in families}  # was referred to, and not overwritten yet
    lines = [_stated(rng, f"{TERM}{member}") for member in rng.sample(range(MEMBERS), min(TERMS, count))]
    terms = {line.name: line for line in lines}
    known: dict[str, dict[str, Line]] = {family: {} for family in families}
    gone: set[str] = set()
    while families and len(lines) < count:
        if terms and len(lines) > _LATE * count:
            lines.append(_stated(rng, terms.popitem()[0]))
            continue
        family = rng.choice(families)
        again = used[family]
        if (again and rng.random() < overwrite) or not unused[family]:
            if not again:
                families.remove(family)
                continue
            name = again.pop(rng.randrange(len(again)))
            gone.add(name)
            lines.append(_stated(rng, name))
            continue
        name = f"{family}{unused[family].pop()}"
        targets = [line for line in known[family].values() if not line.refers and line.name not in gone]
        if (targets or terms) and rng.random() < refer:
            target = rng.choice(list(terms.values()) if terms and (not targets or rng.random() < 0.5) else targets)
            if target.family == family and target.name not in again:
                again.append(target.name)
            line = Line(name, target.name, target.value)
        else:
            line = _stated(rng, name)
        known[family][name] = line
        lines.append(line)
    every = (line for of_one in known.values() for line in of_one.values())
    return VariableList(tuple(lines), tuple(line for line in every if line.name not in gone))


def _stated(rng: random.Random, name: str) -> Line:
    value = rng.choice(VALUES)
    return Line(name, value, value)
