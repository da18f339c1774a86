"""What a manifest says of its tensors: their numbers' types, the shapes of layers, and the states beside them.

Ordinary models have keys and values in every layer. Layers of others keep one tensor for both (latent attention),
nothing (they read another layer's), or states of a fixed size and of any type (recurrent layers).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from ragkv.attention.shape import DType, LayerShape, StateShape
from ragkv.store.seal import DamagedError

__all__ = ["DTYPES", "STATE_DTYPES", "code_of", "pack_states", "parse_states", "plain", "require_shapes"]

DTYPES: Mapping[int, DType] = {1: "bfloat16", 2: "float16", 3: "float32"}
STATE_DTYPES: Mapping[int, DType] = {
    **DTYPES,
    4: "float64",
    5: "int8",
    6: "int16",
    7: "int32",
    8: "int64",
    9: "uint8",
    10: "bool",
}
_WIDEST = 1 << 16
"""The most KV heads, and numbers per head, that a record may claim. No model comes near it."""
_MOST_LAYERS, _MOST_STATES = 1 << 13, 1 << 15
"""A layer or state takes memory for its tensors even if it has no numbers."""
_STATE = struct.Struct("<IBBH")
_SIZE = struct.Struct("<I")
_MOST_AXES = 8
_NAME_BYTES = 64


def code_of(codes: Mapping[int, object], value: object) -> int:
    return next(code for code, known in codes.items() if known == value)


def plain(shapes: Iterable[LayerShape], states: Sequence[StateShape]) -> bool:
    """Whether every layer has keys and values of its own, and nothing else: what the first schema can say."""
    return not states and all(map(all, shapes))


def require_shapes(shapes: Sequence[LayerShape], states: Sequence[StateShape]) -> None:
    """`DamagedError` unless these can be the layers and states of a model's KV."""
    if len(shapes) > _MOST_LAYERS or len(states) > _MOST_STATES:
        raise DamagedError(f"it has {len(shapes)} layers and {len(states)} states, more than any model")
    for shape in shapes:
        kv_heads, key_dim, value_dim = shape
        if not any(shape):
            continue
        if not (0 < kv_heads <= _WIDEST and 0 < key_dim <= _WIDEST and 0 <= value_dim <= _WIDEST):
            raise DamagedError("a layer of it has no heads, or more than any model")
    places = [(state.layer, state.name) for state in states]
    if places != sorted(set(places)) or any(not size > 0 for state in states for size in state.sizes):
        raise DamagedError("its states are not in the order of their layers and names, or have no numbers")


def pack_states(states: Sequence[StateShape]) -> bytes:
    """The table of states; `ValueError` for one that no manifest can describe."""
    rows = []
    for layer, name, dtype, sizes in states:
        label = name.encode()
        if dtype not in STATE_DTYPES.values() or len(sizes) > _MOST_AXES or not 0 < len(label) <= _NAME_BYTES:
            raise ValueError(f"a record holds no state {name!r} of {dtype} with {len(sizes)} axes")
        if not all(0 < size < 1 << 32 for size in sizes):
            raise ValueError(f"a record holds no state of the shape {sizes}")
        rows += [_STATE.pack(layer, code_of(STATE_DTYPES, dtype), len(sizes), len(label)), label]
        rows += map(_SIZE.pack, sizes)
    return b"".join(rows)


def parse_states(table: memoryview, count: int, layers: int) -> tuple[StateShape, ...]:
    """The `count` states of a table; `DamagedError`, `KeyError`, `ValueError` or `struct.error` when it is none."""
    states, start = [], 0
    if count * _STATE.size > len(table):
        raise DamagedError("its table of states has the wrong length")
    for _ in range(count):
        layer, dtype, axes, length = _STATE.unpack_from(table, start)
        name, start = bytes(table[start + _STATE.size :][:length]), start + _STATE.size + length
        if layer >= layers or axes > _MOST_AXES or not 0 < length <= _NAME_BYTES:
            raise DamagedError("a state of it belongs to no layer, or has no name, or too many axes")
        sizes = struct.unpack_from(f"<{axes}I", table, start)
        start += _SIZE.size * axes
        states.append(StateShape(layer, name.decode(), STATE_DTYPES[dtype], sizes))
    if start != len(table):
        raise DamagedError("its table of states has the wrong length")
    return tuple(states)
