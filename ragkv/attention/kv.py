"""Key/value tensors of one chunk, and where a prompt puts them.

Keys are kept as the model's own cache holds them: rotated for the positions they were encoded at. Nothing here
ever rotates, concatenates or copies them; `ragkv.attention.part` turns the query instead (docs/design.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["ChunkKV", "KVShape", "LayerShape", "OwnKV", "Place", "Segment", "State", "StateShape"]

Place: TypeAlias = torch.device | tuple[torch.device, ...]
"""Where KV lies: on one device, or, of a model whose layers are on several, on one for each layer."""


class LayerShape(NamedTuple):
    """Keys of a layer are `(kv_heads, tokens, key_dim)`, values `(kv_heads, tokens, value_dim)`.

    A `value_dim` of 0: the values are columns of the keys (latent attention), which are kept once. All 0: the layer
    keeps nothing, because it reads another layer's KV or has none.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """What is kept of a layer besides keys and values, of a size that no number of tokens changes."""

    layer: int
    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class KVShape(NamedTuple):
    """What all KV of one model has in common: the dtype of keys and values, every layer's shape, and its states."""

    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a chunk's states, however long it is."""
        return sum(state.nbytes for state in self.states)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the KV of a chunk of so many tokens."""
        return self.state_bytes + tokens * self.token_bytes


class State(NamedTuple):
    """One state of a layer after the chunk's last token: a recurrent or convolution state, of any shape and dtype."""

    layer: int
    name: str
    value: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ChunkKV:
    """One chunk's keys and values for one model.

    `keys[l]` and `values[l]` are `(kv_heads, tokens, head_dim)` of layer `l`; layers may differ in shape except for
    `tokens`, and a layer that keeps nothing has no heads (`LayerShape`). `encoded_at` is the position of the first
    token while the chunk was prefilled (0 for `standalone`, P for `prefixed`). `states`, sorted by layer and name, are
    what recurrent layers hold after the last token.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    encoded_at: int = 0
    states: tuple[State, ...] = ()
    _heads: dict[int, ChunkKV] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("a chunk KV needs one key and one value tensor per layer")
        tokens = self.keys[0].shape[1]
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if key.ndim != 3 or value.ndim != 3 or key.shape[:2] != value.shape[:2] or key.shape[1] != tokens:
                raise ValueError(
                    f"layer {layer}: keys {tuple(key.shape)} and values {tuple(value.shape)} are not "
                    f"(kv_heads, {tokens}, head_dim)"
                )
        names = [(state.layer, state.name) for state in self.states]
        if names != sorted(set(names)) or any(not 0 <= layer < len(self.keys) for layer, _ in names):
            raise ValueError("states are sorted by layer and name, each there once")

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def shape(self) -> KVShape:
        pairs = zip(self.keys, self.values, strict=True)
        return KVShape(
            self.dtype,
            tuple(LayerShape(key.shape[0], key.shape[2], value.shape[2]) for key, value in pairs),
            tuple(StateShape(layer, name, value.dtype, tuple(value.shape)) for layer, name, value in self.states),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and states."""
        return (*self.keys, *self.values, *(state.value for state in self.states))

    def head(self, tokens: int) -> ChunkKV:
        """The first `tokens` of it, not copied: causal, they do not depend on what follows.

        The same object each time, so that all rows that see it read it together. `ValueError` if it has states, which
        are those after the last token.
        """
        if self.states and tokens != self.tokens:
            raise ValueError("states of the first tokens of a chunk are not kept")
        if tokens not in self._heads:
            made = ChunkKV(
                keys=tuple(key[:, :tokens] for key in self.keys),
                values=tuple(value[:, :tokens] for value in self.values),
                encoded_at=self.encoded_at,
                states=self.states,
            )
            self._heads.setdefault(tokens, made)
        return self._heads[tokens]

    def to(self, place: Place, *, copy: bool = False) -> ChunkKV:
        """The same KV at `place`; itself when it is there already, unless a `copy` is wanted."""
        devices = place if isinstance(place, tuple) else (place,) * self.layers
        if not copy and all(t.device == device for t, device in zip(self.keys, devices, strict=True)):
            return self
        return ChunkKV(
            keys=tuple(t.to(device, copy=copy) for t, device in zip(self.keys, devices, strict=True)),
            values=tuple(t.to(device, copy=copy) for t, device in zip(self.values, devices, strict=True)),
            encoded_at=self.encoded_at,
            states=tuple(s._replace(value=s.value.to(devices[s.layer], copy=copy)) for s in self.states),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A chunk KV as one row sees it: `start` is the position at which the row's prompt puts its first token."""

    kv: ChunkKV
    start: int

    @property
    def offset(self) -> int:
        """How far the prompt moved the chunk from where it was encoded: the query is turned back by this."""
        return self.start - self.kv.encoded_at

    @property
    def end(self) -> int:
        return self.start + self.kv.tokens


class OwnKV:
    """Keys and values of the tokens that a row computes itself: its question and what it generates.

    Memory is taken in blocks that double, so that a decode step writes one column and never copies the rest
    (a `DynamicCache` concatenates the whole cache at every step). `reserve` is how many tokens more than the first
    ones it makes room for.
    """

    __slots__ = ("_keys", "_values", "length", "reserve", "shared")

    def __init__(self, *, reserve: int = 64) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        """Tokens held: what `commit` has counted."""
        self.reserve = reserve
        self.shared: Mapping[int, int] = {}
        """Layers that hold nothing, because they read what another holds: that one."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write `(1, kv_heads, n, head_dim)` of `layer` after the tokens held; views of these and the new ones.

        They count once the forward pass is over and `commit` was called; until then a second try overwrites them.
        """
        used, end = self.length, self.length + key.shape[2]
        keys = self._keys[layer] = _reserved(self._keys.get(layer), key, used, end, self.reserve)
        values = self._values[layer] = _reserved(self._values.get(layer), value, used, end, self.reserve)
        keys[:, :, used:end] = key
        values[:, :, used:end] = value
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, tokens: int) -> None:
        """All layers hold `tokens` more."""
        self.length += tokens

    @torch.inference_mode()
    def select(self, tokens: Sequence[int]) -> None:
        """Keep only these of the tokens held, in this order."""
        places = torch.tensor(tokens)

        def kept(held: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: block[:, :, places.to(block.device, non_blocking=True)] for layer, block in held.items()}

        self._keys, self._values, self.length = kept(self._keys), kept(self._values), len(tokens)

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        """All tokens, cut free from the memory that is reserved for more."""

        def cut(held: dict[int, Tensor]) -> tuple[Tensor, ...]:
            nothing = {layer: held[at].new_empty((1, 0, self.length, 0)) for layer, at in self.shared.items()}
            whole = (each[0] for _, each in sorted((held | nothing).items()))
            return tuple(t if t.shape[1] == self.length else t[:, : self.length].clone() for t in whole)

        keys, values = self.layers()
        return ChunkKV(keys=cut(keys), values=cut(values), encoded_at=encoded_at)

    def layers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Keys and values by layer, `(1, kv_heads, capacity, head_dim)`, of which the first `length` tokens count."""
        return self._keys, self._values


def _reserved(held: Tensor | None, new: Tensor, used: int, end: int, reserve: int) -> Tensor:
    """`held` with room for `end` tokens, grown at least twofold when it must move."""
    if held is not None and held.shape[2] >= end:
        return held
    capacity = max(end + reserve, 2 * used)
    batch, kv_heads, _, head_dim = new.shape
    grown = new.new_empty((batch, kv_heads, capacity, head_dim))
    if held is not None:
        grown[:, :, :used] = held[:, :, :used]
    return grown
