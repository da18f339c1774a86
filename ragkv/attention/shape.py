"""The shapes and dtypes of KV without torch.

Most commands only describe what is stored; importing torch would take longer than they run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

DType: TypeAlias = Literal[
    "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"
]
"""torch's name of a dtype; `ragkv.attention.kv` maps it to the dtype itself."""
ITEM_SIZES: Mapping[DType, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per number."""
SCALE_BYTES, MOST = 2, 127
"""Bytes after the int8 numbers of a head and token, and the greatest of these (`ragkv.attention.kv.PackedTensors`)."""


class LayerShape(NamedTuple):
    """Keys of a layer are `(kv_heads, tokens, key_dim)`, values `(kv_heads, tokens, value_dim)`.

    A `value_dim` of 0: the values are columns of the keys (latent attention), which are kept once. All 0: the layer
    keeps nothing, because it reads another layer's KV or has none.
    """

    kv_heads: int
    key_dim: int
    value_dim: int


class StateShape(NamedTuple):
    """The shape of a layer's state besides keys and values. Its size does not depend on the number of tokens."""

    layer: int
    name: str
    dtype: DType
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * ITEM_SIZES[self.dtype]


class KVShape(NamedTuple):
    """What all KV of one model has in common: the dtype of keys and values, every layer's shape, and its states."""

    dtype: DType
    layers: tuple[LayerShape, ...]
    states: tuple[StateShape, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * ITEM_SIZES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """Bytes of a chunk's states, whatever its length."""
        return sum(state.nbytes for state in self.states)

    def nbytes(self, tokens: int) -> int:
        """Bytes of the KV of a chunk of `tokens` tokens."""
        return self.state_bytes + tokens * self.token_bytes
