"""What transformers holds after some tokens, whatever class it holds it in: tensors in a tree, and how each one grows.

A family's cache may be a `DynamicCache` of attention and recurrent layers, a class of its own, or a plain list. All of
them are trees of tensors and numbers, so nothing here knows their names: how a tensor depends on the tokens and on the
rows is found by trying, once when the model is loaded, and a family whose cache cannot be told is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragkv.errors import UnsupportedModelError

__all__ = ["CacheTree", "Leaf"]

_PLAIN = (str, bytes, type, torch.dtype, torch.device, torch.Size)
_DEPTH = 6

Path = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of a cache. `rows` is the dimension along which rows stand side by side.

    `tokens` is the dimension that grows by one with every token; None for a state, whose size tokens do not change.
    """

    path: Path
    rows: int
    tokens: int | None

    @property
    def name(self) -> str:
        """The path as one word."""
        return _name(self.path)


class CacheTree:
    """The form of one model's cache.

    `leaves` are its tensors, in a fixed order; a row's cache is a list of tensors in this order, with one row each.
    """

    def __init__(self, skeleton: Any, leaves: Sequence[Leaf], counts: Sequence[Path]) -> None:
        self._skeleton = skeleton
        self.leaves = tuple(leaves)
        self._counts = tuple(counts)

    @classmethod
    def of(cls, first: tuple[int, Any], longer: Sequence[tuple[int, Any]], wider: Any) -> CacheTree:
        """Learn the form from caches of one row after (n, cache) tokens, and one of two rows after as many as `first`.

        Raises UnsupportedModelError when they do not go together.
        """
        n, cache = first
        tensors, numbers = _parts(cache)
        others = [(length - n, *_parts(other)) for length, other in longer]
        two, _ = _parts(wider)
        forms = {(*each, *more) for each, more in ((tensors, numbers), _parts(wider), *(other[1:] for other in others))}
        if len(forms) > 1:
            raise UnsupportedModelError("what it caches changes its form with the tokens")
        leaves, counts = [], []
        for path, tensor in tensors.items():
            leaf = _leaf(path, tensor, [(more, each[path]) for more, each, _ in others], two[path])
            if leaf is not None:
                leaves.append(leaf)
            elif not all(torch.equal(tensor, each[path]) for _, each, _ in others):
                raise UnsupportedModelError(f"its cache keeps what rows do not have apart ({_name(path)})")
        for path, number in numbers.items():
            if number == n and all(each[path] == n + more for more, _, each in others):
                counts.append(path)
            elif any(each[path] != number for _, _, each in others):
                raise UnsupportedModelError(f"its cache counts by a rule that ragkv does not know ({_name(path)})")
        placeholder = torch.empty(0)
        memo: dict[int, Any] = {id(tensors[leaf.path]): placeholder for leaf in leaves}  # their numbers are not kept
        return cls(copy.deepcopy(cache, memo), leaves, counts)

    def read(self, cache: Any) -> list[Tensor]:
        """The tensors of a cache of this form, not copied."""
        tensors, _ = _parts(cache)
        return [tensors[leaf.path] for leaf in self.leaves]

    def make(self, tensors: Sequence[Tensor], tokens: int) -> Any:
        """A cache of these tensors after `tokens` tokens. A forward pass may write into those that are states."""
        made = copy.deepcopy(self._skeleton)
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            _put(made, leaf.path, tensor)
        for path in self._counts:
            _put(made, path, tokens)
        return made


def _parts(cache: Any) -> tuple[dict[Path, Tensor], dict[Path, int | float]]:
    """Every tensor and every number in a cache by the path to it, in a fixed order."""
    found = list(_walk(cache, (), set()))
    tensors = {path: value for path, value in found if isinstance(value, Tensor)}
    return tensors, {path: value for path, value in found if not isinstance(value, Tensor)}


def _walk(value: Any, path: Path, above: set[int]) -> Iterator[tuple[Path, Tensor | int | float]]:
    if isinstance(value, Tensor | int | float):
        yield path, value
        return
    if value is None or isinstance(value, _PLAIN) or id(value) in above or len(path) > _DEPTH:
        return
    inside = above | {id(value)}
    if isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _walk(each, (*path, ("item", index)), inside)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, (*path, ("item", key)), inside)
    elif hasattr(value, "__dict__"):
        for name in sorted(vars(value)):
            yield from _walk(vars(value)[name], (*path, ("attribute", name)), inside)


def _put(cache: Any, path: Path, value: Any) -> None:
    for kind, key in path[:-1]:
        cache = getattr(cache, key) if kind == "attribute" else cache[key]
    kind, key = path[-1]
    if kind == "attribute":
        setattr(cache, key, value)
    else:
        cache[key] = value


def _leaf(path: Path, value: Tensor, along: Sequence[tuple[int, Tensor]], two: Tensor) -> Leaf | None:
    """How a tensor depends on rows and tokens; None for one that depends on neither."""
    dims = range(value.ndim)
    if any(other.ndim != value.ndim for _, other in along) or two.ndim != value.ndim:
        raise UnsupportedModelError(f"what it caches changes its form with the tokens ({_name(path)})")
    grown = {d for more, other in along for d in dims if other.shape[d] != value.shape[d]}
    wide = [d for d in dims if two.shape[d] != value.shape[d]]
    if len(wide) > 1 or any(two.shape[d] != 2 * value.shape[d] for d in wide):
        raise UnsupportedModelError(f"its cache keeps rows together in a way that ragkv does not know ({_name(path)})")
    if not grown:
        return Leaf(path=path, rows=wide[0], tokens=None) if wide else None
    [tokens, *rest] = sorted(grown)
    steady = all(other.shape[tokens] == value.shape[tokens] + more for more, other in along)
    if rest or not wide or not steady:
        raise UnsupportedModelError(f"its cache grows by a rule that ragkv does not know ({_name(path)})")
    return Leaf(path=path, rows=wide[0], tokens=tokens)


def _name(path: Path) -> str:
    return ".".join(str(key) for _, key in path)
