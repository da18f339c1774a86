"""Mutations of plain data as by a hostile author: swapped types, numbers that are huge, negative or zero, repeated
lists, deep nesting, missing and added keys. Seeded, so that a failure can be reproduced.
"""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["deep", "mutants", "places"]


def deep(levels: int = 500) -> Any:
    """Nested as deeply as `json.dumps` allows."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def values(rng: random.Random) -> list[Any]:
    """Values that replace anything."""
    numbers = (-1, 0, 1, 7, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, 1 << 64, 10**400, -(10**400), 0.5, 1e308)
    texts = ("", ".", "..", "../../outside/precious", "/etc/passwd", "a/b", "x" * 5000, "\x00", "\x1b[31m", "\ud800")
    lists = ([], [[]], [None], [-1], [1 << 40], ["../x", "../x"], deep(), [0] * 5000)
    others = (None, True, math.nan, math.inf, {}, {"id": []}, {"": ""}, rng.randrange(-10, 1000))
    return [*numbers, *texts, *lists, *others]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value, but only the first few entries of lists."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(3, len(value))):
            yield from places(value[index], (*path, index))


def mutants(value: Any, rng: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """`count` mutated copies of a JSON value, each with a description of the change."""
    found = list(places(value))
    for _ in range(count):
        path = rng.choice(found)
        kind = rng.choice(("set", "set", "set", "drop", "add", "repeat"))
        changed = copy.deepcopy(value)
        new = rng.choice(values(rng))
        if not path:
            yield f"all -> {str(new)[:30]!r}", new
            continue
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        last = path[-1]
        if kind == "drop":
            del parent[last]
        elif kind == "add" and isinstance(parent, dict):
            parent[rng.choice(("extra", "../x", "", "__class__"))] = new
        elif kind == "repeat" and isinstance(parent, list):
            parent += parent * rng.choice((1, 3))
        else:
            parent[last] = new
        yield f"{kind} {'/'.join(map(str, path))[:60]} {str(new)[:30]!r}", changed
