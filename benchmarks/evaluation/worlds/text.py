"""Synthetic reading tasks: cloze questions about English text, lists of variables, and labels learned from examples.

To answer a cloze question, a model has to find the sentence in the retrieved text and read the missing words. The
documents are texts of Python itself, because they are installed everywhere: docstrings of the standard library for
training, the language reference (`pydoc_data.topics`) for testing.

In a list of variables many lines refer to an earlier line. Names, values and references are one word each, so that a
small model with a token per word can read long lists; nothing separates the lines, because meaningless separators
attract attention. The list begins with terms, to which any later line may refer. Other names come in families (river0
… river7) and refer within their own. A variable may get another value later, and every term finally does; a line that
referred to it keeps the first one, as in a program. So a model that reads a line without the earlier ones cannot make
up for that at the end.

The examples of many-shot learning are sentences labelled by an arbitrary rule.
"""

from __future__ import annotations

import ast
import math
import random
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ragkv.benchmarks.evaluation.worlds.world import listed

BLANK = "____"
_SENTENCE = re.compile(r"(?<![\w.>])[A-Z][A-Za-z0-9 ,;:'\"()\-_]*[A-Za-z0-9)'\"][.](?= |$)")
_WORDINGS = (
    'Fill in the blank: "{s}"',
    'What is left out of "{s}"?',
    'Complete the sentence: "{s}"',
)
_COMMON = frozenset(
    """a an and are as at be by can for from has have if in is it its may must not of on or so that the then they this
    to was were when which will with""".split()  # noqa: SIM905
)
LEAST_WORDS, MOST_WORDS = 7, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloze:
    """A question that shows `sentence` without the words `gold`, which begin at character `start`.

    The answer is the whole sentence.
    """

    question: str
    sentence: str
    gold: str
    start: int


def english_sentences(text: str) -> list[str]:
    """The plain sentences of `text`, with single spaces: 7 to 20 words without code or special characters."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        for match in _SENTENCE.finditer(" ".join(paragraph.split())):
            sentence = match.group()
            letters = sum(char.isalpha() or char == " " for char in sentence)
            if LEAST_WORDS <= sentence.count(" ") + 1 <= MOST_WORDS and letters >= 0.9 * len(sentence):
                sentences.append(sentence)
    return sentences


def clozes(rng: random.Random, sentence: str, count: int = 1) -> list[Cloze]:
    """Up to `count` questions about `sentence`, each without one to three words that are not among its first three.

    The words left out begin and end with a content word, and do not occur elsewhere in the sentence.
    """
    words = sentence.split(" ")
    spans = [
        (first, last)
        for first in range(3, len(words))
        for last in range(first + 1, min(first + 3, len(words)) + 1)
        if _is_content_word(words[first]) and _is_content_word(words[last - 1])
    ]
    gaps = []
    for first, last in rng.sample(spans, min(count, len(spans))):
        gold = " ".join(words[first:last]).rstrip(".,;:")
        blank = " ".join([*words[:first], BLANK + " ".join(words[first:last])[len(gold) :], *words[last:]])
        if gold.casefold() not in blank.casefold():
            question = rng.choice(_WORDINGS).format(s=blank)
            gaps.append(Cloze(question=question, sentence=sentence, gold=gold, start=blank.index(BLANK)))
    return gaps


def _is_content_word(word: str) -> bool:
    bare = word.strip(".,;:()'\"").casefold()
    return len(bare) > 1 and bare not in _COMMON and bare.isalnum()


@cache
def docstrings() -> tuple[str, ...]:
    """Docstrings of the standard library with at least three plain sentences, without those of its tests."""
    found = dict.fromkeys(text for path in _modules() for text in module_docstrings(path) if text.count(". ") >= 2)
    return tuple(text for text in found if len(english_sentences(text)) >= 3)


def _modules() -> Iterator[Path]:
    """Every file except tests, the language reference, and the debugger, whose text the reference repeats."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "site-packages", "pydoc_data", "pdb.py"}.intersection(parts):
            yield path


def module_docstrings(path: Path) -> Iterator[str]:
    """Every docstring of a Python file; none if the file cannot be parsed, such as a template."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@cache
def reference_texts() -> tuple[str, ...]:
    """The chapters of Python's language reference, as shown by `help()`. They are used for tests only."""
    from pydoc_data.topics import topics

    return tuple(topics[name] for name in sorted(topics))


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
"""The beginning of a list; two words like a line, so that blocks of an even number of words break no line."""
TERMS = 4
_LINES_OF_A_FAMILY = 9
"""The approximate size of a family: its members, and one that gets another value."""
_LATE = 0.75
"""From this part of the list on, terms get other values."""


@dataclass(frozen=True, slots=True)
class VariableLine:
    """`name` has `value`, which the line states, or which the variable `content` has."""

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
    """The word for a question about a variable."""
    return f"?{name}"


def referred(name: str) -> str:
    """The word for a reference to a variable."""
    return f"={name}"


@dataclass(frozen=True, slots=True)
class VariableList:
    """All lines in order, and those whose variable has a single value, which may be asked for."""

    lines: tuple[VariableLine, ...]
    known: tuple[VariableLine, ...]

    def texts(self) -> list[str]:
        """The beginning and the lines."""
        return [" ".join(BEGIN), *(line.text for line in self.lines)]


def variable_list(rng: random.Random, count: int, *, refer: float = 0.6, overwrite: float = 0.4) -> VariableList:
    """A list of at most `count` lines, the terms' among them; fewer when all names are used up.

    A line refers to an earlier one with probability `refer` if possible, in half of the cases to a term. A variable
    that was referred to gets another value with probability `overwrite` at its family's next turn.
    """
    families = rng.sample(_FAMILIES, max(1, min(len(_FAMILIES), math.ceil((count - TERMS) / _LINES_OF_A_FAMILY))))
    unused = {family: rng.sample(range(MEMBERS), MEMBERS) for family in families}
    used: dict[str, list[str]] = {family: [] for family in families}  # was referred to, and not overwritten yet
    lines = [_stated(rng, f"{TERM}{member}") for member in rng.sample(range(MEMBERS), min(TERMS, count))]
    terms = {line.name: line for line in lines}
    known: dict[str, dict[str, VariableLine]] = {family: {} for family in families}
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
            line = VariableLine(name, target.name, target.value)
        else:
            line = _stated(rng, name)
        known[family][name] = line
        lines.append(line)
    every = (line for of_one in known.values() for line in of_one.values())
    return VariableList(tuple(lines), tuple(line for line in every if line.name not in gone))


def _stated(rng: random.Random, name: str) -> VariableLine:
    value = rng.choice(VALUES)
    return VariableLine(name, value, value)


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
        lines = [f"{shot_text(sentence)} {label}" for sentence, label in zip(sentences, labels, strict=True)]
        return ["\n\n".join(lines[at : at + size]) for at in range(0, len(lines), size)]


def neutral_sentence(rng: random.Random, thing: str, places: Sequence[str]) -> str:
    """A sentence about `thing` that does not reveal its label."""
    return f"The {thing} is {rng.choice(places)}."


def shot_text(sentence: str) -> str:
    """The text before a label."""
    return f"Input: {sentence}\nLabel:"
