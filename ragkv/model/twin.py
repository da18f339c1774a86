"""A model a second time over the same weights: to switch its attention or shrink its windows, and harm nobody.

Modules and configurations are copies, every parameter and buffer is the very tensor of the original: a few
milliseconds and no memory that matters, at any size of model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

__all__ = ["set_windows", "spans", "twin"]

_SPANS = ("window", "attention_chunk", "index_topk")  # what the name of a number of tokens says that bound what is seen
_LAYER_COUNTS = frozenset({"max_window_layers"})  # says which layers have a window, not how long it is


def twin(model: nn.Module) -> Any:
    """`model` again, sharing every tensor with it; switch its attention with `set_attn_implementation`."""
    tensors = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, tensors)


def set_windows(model: nn.Module, sizes: Mapping[int, int]) -> None:
    """Replace each window that `sizes` names wherever the model keeps it: in its configurations and its modules.

    What no attribute named "…window…" or the like holds is not found: ask the masks afterwards whether it worked.
    """
    for holder, name, value in _spans(model):
        if value in sizes:
            setattr(holder, name, sizes[value])


def spans(model: nn.Module) -> list[int]:
    """Every number of tokens that bounds what a token of `model` sees, by the names that families give it."""
    return sorted({value for _, _, value in _spans(model)})


def _spans(model: nn.Module) -> Iterator[tuple[object, str, int]]:
    for holder in _holders(model):
        for name, value in list(vars(holder).items()):
            if any(word in name for word in _SPANS) and name not in _LAYER_COUNTS and type(value) is int:
                yield holder, name, value


def _holders(model: nn.Module) -> Iterator[object]:
    """The modules and every configuration that they or other configurations refer to, each once."""
    found: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        holder = waiting.pop()
        if id(holder) in found:
            continue
        found.add(id(holder))
        yield holder
        waiting += [value for value in vars(holder).values() if hasattr(value, "get_text_config")]
