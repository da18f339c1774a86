"""A row's cache as the store keeps it, and back: what grows with the tokens is a layer's KV, the rest are its states.

Of what grows, a chunk holds its own tokens alone, as for any other model; what stood before it is in the prefix's KV.
States have no parts: those of a chunk are those after all that it was encoded after, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragkv.attention.kv import ChunkKV, Segment, State
from ragkv.errors import UnsupportedModelError
from ragkv.model.cachetree import CacheTree, Leaf

__all__ = ["Packing", "require_chain"]


@dataclass(slots=True)
class _Layer:
    """Which leaves are a layer's keys and values, by number."""

    owner: str = ""
    kv: list[int] = field(default_factory=list)


class Packing:
    """Where each leaf of a tree has its place in a `ChunkKV` of a model with so many layers.

    Raises UnsupportedModelError for a cache that has none.
    """

    def __init__(self, tree: CacheTree, sample: Sequence[Tensor], *, layers: int, dtype: torch.dtype) -> None:
        self._tree = tree
        self._dtype = dtype
        self._devices = [tensor.device for tensor in sample]  # a model may be split over several
        self._layers = [_Layer() for _ in range(layers)]
        self._states: list[tuple[int, str, int]] = []
        for number, (leaf, tensor) in enumerate(zip(tree.leaves, sample, strict=True)):
            at = next((key for kind, key in leaf.path if kind == "item" and type(key) is int), 0)
            if leaf.tokens is None:
                self._states.append((min(at, layers - 1), leaf.name, number))
            elif (leaf.rows, leaf.tokens, tensor.ndim) not in ((0, 2, 4), (0, 1, 3)):
                raise UnsupportedModelError(f"its cache grows along a dimension that ragkv does not know ({leaf.name})")
            elif tensor.dtype != dtype:
                raise UnsupportedModelError(f"its cache grows in another type than the model's ({leaf.name})")
            else:
                self._seat(leaf, at, number, tensor, sample)
        self._states.sort()

    def _seat(self, leaf: Leaf, at: int, number: int, tensor: Tensor, sample: Sequence[Tensor]) -> None:
        """In its layer as keys, or beside keys of as many heads as values; else in a layer of its own behind all."""
        owner = leaf.name.rpartition(".")[0]
        layer = self._layers[at] if at < len(self._layers) else _Layer(owner="?")
        if not layer.kv and not layer.owner:
            layer.owner, layer.kv = owner, [number]
        elif layer.owner == owner and len(layer.kv) == 1 and _heads(sample[layer.kv[0]]) == _heads(tensor):
            layer.kv.append(number)
        else:
            self._layers.append(_Layer(owner=owner, kv=[number]))

    def pack(self, tensors: Sequence[Tensor], tokens: int, encoded_at: int) -> ChunkKV:
        """A chunk's KV from one row's tensors, of which what grows holds the chunk's own tokens."""
        keys, values = [], []
        devices = {layer: self._devices[number] for layer, _, number in self._states}
        for at, layer in enumerate(self._layers):
            nothing = torch.empty((0, tokens, 0), dtype=self._dtype, device=devices.get(at, self._devices[0]))
            kv = [tensors[number] for number in layer.kv]
            kv = [t[0] if t.ndim == 4 else t for t in kv]  # (kv_heads, tokens, head_dim)
            keys.append(kv[0] if kv else nothing)
            values.append(kv[1] if len(kv) == 2 else keys[-1][..., :0])
        states = tuple(State(layer, name, tensors[number]) for layer, name, number in self._states)
        return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=encoded_at, states=states)

    def unpack(self, chain: Sequence[ChunkKV]) -> list[Tensor]:
        """One row's tensors after these, each of which was encoded after those before it."""
        found: list[Tensor | None] = [None] * len(self._tree.leaves)
        for at, layer in enumerate(self._layers):
            for number, held in zip(layer.kv, ("keys", "values"), strict=False):
                parts = [getattr(kv, held)[at].to(self._devices[number]) for kv in chain]
                whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                found[number] = whole[None] if self._tree.leaves[number].tokens == 2 else whole
        for state, (layer_at, name, number) in zip(chain[-1].states, self._states, strict=True):
            if (state.layer, state.name) != (layer_at, name):
                raise ValueError(f"the KV has the state {state.name!r} where this model has {name!r}")
            found[number] = state.value.to(self._devices[number])
        return [tensor for tensor in found if tensor is not None]


def require_chain(segments: Sequence[Segment], position: int) -> None:
    """ValueError unless each segment stands where it was encoded, right after those before it, up to `position`."""
    at = 0
    for segment in segments:
        if segment.start != at or segment.offset:
            raise ValueError(
                "a row of this model resumes one state: it reads a prefix, and what was encoded right after it"
            )
        at = segment.end
    if at != position:
        raise ValueError(f"the row's next token stands at {position}, but what it reads ends at {at}")


def _heads(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.ndim == 4 else 1
