"""Words, filler text and helpers that the synthetic tasks share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from ragkv.errors import UsageError
from ragkv.evaluation.example import Example, Task
from ragkv.worlds.name import listed

__all__ = [
    "ADJECTIVES",
    "NOISE",
    "NOUNS",
    "cut",
    "filler",
    "gathered",
    "match_all",
    "require",
    "require_sizes",
    "scatter",
]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated haystack (`type_haystack: noise`)."""


ADJECTIVES = listed(
    "amber bitter bold brave brief bright broad calm careful cheap clever cold common cool crisp curious dark "
    "deep distant dry eager early empty fair faint famous fast fierce firm flat fresh gentle giant glad golden "
    "grand gray green happy hard heavy hidden high hollow honest huge humble idle keen kind large late lazy "
    "light little lonely long loud lucky mellow mild modern narrow neat noble odd old open pale patient plain "
    "polite proud quick quiet rapid rare red rich rough round rural sharp short shy silent simple slow small "
    "smooth soft solid steady steep still strange strong sudden sweet swift tall tame thick thin tidy tiny vast "
    "warm weary wet wide wild wise young"
)
NOUNS = listed(
    "acorn anchor apple arrow badge barrel basket beacon bell bench bottle branch bridge brook bucket button "
    "cabin candle canoe carpet castle cellar chain chair cherry circle clock cloud coat comet copper corner "
    "cottage cradle crane crown curtain daisy desert door drum eagle engine falcon farm feather fence ferry "
    "field finger flag flame flute forest fountain garden gate glove goose grain guitar hammer harbor hat hill "
    "horse house island jacket jar kettle key kite ladder lake lamp lantern leaf lemon letter library lion lock "
    "lumber magnet map market meadow melon mill mirror mountain needle nest oak ocean orchard otter oven owl "
    "paddle palace paper parrot path pearl pebble pencil piano pillow planet plow pocket pond puzzle quilt "
    "rabbit railway ribbon river road robin rocket roof rope rose saddle sail salmon school shelf ship shoe "
    "signal silver spoon spring stable statue stone street summer table teapot temple thimble thunder ticket "
    "tiger timber tower trail train tulip tunnel turtle valley velvet village violin wagon walnut water whale "
    "wheel whistle willow window winter wolf yard"
)


def require(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise UsageError if a size is out of range."""
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} of the task must be {bounds}, not {value}.")


def require_sizes(limit: int, chunks: int, words: int) -> None:
    """Raise UsageError if a size of a task with chunks of `words` words is out of range."""
    require("limit", limit, 1)
    require("chunks", chunks, 1, 1024)
    require("words", words, 1, 10_000)


def match_all(name: str, examples: Sequence[Example], chunks: int, tokens: int, seed: int) -> Task:
    """A task that scores the share of gold answers in an answer of at most `tokens` tokens."""
    return Task(name=f"{name}/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=tokens, seed=seed)


def gathered(limit: int, context: Callable[[int], Sequence[Example]], *, patience: int, barren: str) -> list[Example]:
    """`limit` examples of contexts 0, 1, 2, …; raises UsageError(`barren`) after `patience` contexts without any."""
    examples: list[Example] = []
    number = last = 0
    while len(examples) < limit:
        found = context(number)[: limit - len(examples)]
        number += 1
        if found:
            examples += found
            last = number
        elif number - last == patience:
            raise UsageError(barren)
    return examples


def filler(rng: random.Random, words: int) -> list[str]:
    """Sentences of about `words` words in all, without numbers or names."""
    found: list[str] = []
    while sum(len(sentence.split()) for sentence in found) < words:
        first, second = rng.sample(NOUNS, 2)
        found.append(f"The {rng.choice(ADJECTIVES)} {first} stood beside the {rng.choice(ADJECTIVES)} {second}.")
    return found


def cut(items: Sequence[str], chunks: int, joint: str = " ") -> tuple[str, ...]:
    """Join `items` in order into `chunks` texts of nearly equally many items."""
    edges = [len(items) * at // chunks for at in range(chunks + 1)]
    return tuple(joint.join(items[left:right]) for left, right in pairwise(edges))


def scatter(rng: random.Random, chunks: list[list[str]], sentences: Sequence[str]) -> tuple[int, ...]:
    """Insert `sentences` in order at random places of the chunks, and return the chunks that they are in."""
    places = sorted((at, rng.randint(0, len(chunks[at]))) for at in rng.choices(range(len(chunks)), k=len(sentences)))
    for (chunk, gap), sentence in reversed(list(zip(places, sentences, strict=True))):
        chunks[chunk].insert(gap, sentence)  # from the end, so that earlier gaps keep their indices
    return tuple(chunk for chunk, _ in places)
