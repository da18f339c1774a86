"""The key and value tensors of one chunk, and where a prompt places them.

Keys are kept as in the model's own cache: rotated for the positions at which they were encoded. They are read without
being rotated, concatenated or copied; `ragkv.attention.partial` gets a rotated query instead (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import RagkvError, UnsupportedModelError
from ragkv.types import ITEM_SIZES, MOST, SCALE_BYTES, DType, KVShape, LayerShape, StateShape
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.attention import varlen
else:
    torch, varlen = LazyModule("torch"), LazyModule("ragkv.attention.varlen")

Place: TypeAlias = "torch.device | tuple[torch.device, ...]"
"""The device of KV, or one device per layer of a model that is split."""


class Processor(str):
    """The processor as the device of KV, in a process without torch."""

    __slots__ = ()
    type = "cpu"


def torch_dtype(name: DType) -> torch.dtype:
    """The dtype of this name in stored KV."""
    return cast("torch.dtype", getattr(torch, name))


def dtype_name(dtype: torch.dtype) -> DType:
    """The name of a dtype in stored KV; ValueError for a dtype that KV cannot have."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        raise ValueError(f"KV holds no numbers of {dtype}")
    return cast("DType", name)


class PackedTensors(Sequence["Tensor"]):
    """Tensors that are stored in fewer bits than those of `dtype`, and are converted when an item is read.

    They are float16 for float32 (the codec `half`), or rows `(heads, tokens, head_dim + SCALE_BYTES)` of int8 (the
    codec `q8`): the numbers, followed by the value of `MOST` in bfloat16. A CPU widens a layer of a chunk within its
    caches faster than it reads wide numbers from memory, and its kernels read these in place
    (`ragkv.attention.in_place`). For anything else that a decode step reads every time, use `ChunkKV.wide`.
    """

    def __init__(self, stored: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.stored, self.dtype = tuple(stored), dtype

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, layer: Any) -> Any:
        return unpacked(self.stored[layer], self.dtype)


def unpacked(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor's numbers in `dtype`, from its form in memory."""
    if tensor.dtype != torch.int8:
        return tensor.to(dtype)
    largest = tensor[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    return (tensor[..., :-SCALE_BYTES] * (largest.float() / MOST)).to(dtype)


def stored(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in their form in memory, for shapes, sizes and devices; nothing is widened."""
    return tensors.stored if isinstance(tensors, PackedTensors) else tensors


def head_width(tensor: Tensor) -> int:
    """Numbers per head of a tensor in its form in memory."""
    return tensor.shape[2] - (SCALE_BYTES if tensor.dtype == torch.int8 else 0)


def _each(tensors: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
    made = tuple(change(tensor) for tensor in stored(tensors))
    return PackedTensors(made, tensors.dtype) if isinstance(tensors, PackedTensors) else made


class State(NamedTuple):
    """One state of a layer after the chunk's last token: a recurrent or convolution state, of any shape and dtype."""

    layer: int
    name: str
    value: Tensor


_WHOLE = (
    'The first tokens of this model\'s chunk KV cannot be read alone; set the sink to "prefix" or "none" under '
    "[tuning.block] in ragkv.toml."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Pages:
    """The location of a chunk KV: `count` pages of a block from page `first` on (`ragkv.attention.pages`)."""

    block: Any
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class ChunkKV:
    """One chunk's keys and values for one model.

    `keys[l]` and `values[l]` are `(kv_heads, tokens, head_dim)` of layer `l`. Layers may differ in shape except for
    `tokens`; a layer that keeps nothing has no heads (`LayerShape`). `encoded_at` is the position of the first token
    during prefill (0 for `standalone`, P for `prefixed`). `states`, sorted by layer and name, are those of recurrent
    layers after the last token. `pages` is set if the tensors are views of pages. `stacked`
    is set if they are views of one tensor: keys and values of all layers in turn,
    `(2 · layers, kv_heads, tokens, head_dim)`, packed if they are.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    encoded_at: int = 0
    states: tuple[State, ...] = ()
    pages: Pages | None = None
    stacked: Tensor | None = None
    _heads: dict[int, ChunkKV] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("a chunk KV needs one key and one value tensor per layer")
        tokens = self.tokens
        for layer, (key, value) in enumerate(zip(stored(self.keys), stored(self.values), strict=True)):
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
        return stored(self.keys)[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype if isinstance(self.keys, PackedTensors) else self.keys[0].dtype

    @property
    def packed(self) -> bool:
        """Whether keys and values are `PackedTensors`."""
        return isinstance(self.keys, PackedTensors)

    @property
    def shape(self) -> KVShape:
        pairs = zip(stored(self.keys), stored(self.values), strict=True)
        return KVShape(
            dtype_name(self.dtype),
            tuple(LayerShape(key.shape[0], head_width(key), head_width(value)) for key, value in pairs),
            tuple(
                StateShape(layer, name, dtype_name(value.dtype), tuple(value.shape))
                for layer, name, value in self.states
            ),
        )

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, in their form in memory."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys, values and states, in their form in memory."""
        return (*stored(self.keys), *stored(self.values), *(state.value for state in self.states))

    def head(self, tokens: int) -> ChunkKV:
        """The first `tokens` tokens as views. KV is causal, so they do not depend on what follows.

        Returns the same object each time, so that one call reads it for all sequences that see it.
        UnsupportedModelError if the chunk has states, which belong to the last token.
        """
        if self.states and tokens != self.tokens:
            raise UnsupportedModelError(_WHOLE)
        if tokens not in self._heads:
            head = ChunkKV(
                keys=_each(self.keys, lambda key: key[:, :tokens]),
                values=_each(self.values, lambda value: value[:, :tokens]),
                encoded_at=self.encoded_at,
                states=self.states,
                pages=self.pages,
            )
            self._heads.setdefault(tokens, head)
        return self._heads[tokens]

    def part(self, start: int, stop: int) -> ChunkKV:
        """A copy of the tokens `start:stop` that does not keep the others in memory. ValueError if the chunk has
        states, which belong to the last token.
        """
        if self.states:
            raise ValueError("a part of a chunk with states cannot be read without the rest")
        return ChunkKV(
            keys=_each(self.keys, lambda key: key[:, start:stop].clone()),
            values=_each(self.values, lambda value: value[:, start:stop].clone()),
            encoded_at=self.encoded_at + start,
        )

    def to(self, place: Place, *, copy: bool = False) -> ChunkKV:
        """The same KV at `place`; `self` if it is there already, unless a `copy` is wanted."""
        devices = place if isinstance(place, tuple) else (place,) * self.layers
        if not copy and all(t.device == device for t, device in zip(stored(self.keys), devices, strict=True)):
            return self

        def there(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            left = iter(devices)
            return _each(tensors, lambda tensor: moved(tensor, next(left), copy=copy))

        return ChunkKV(
            keys=there(self.keys),
            values=there(self.values),
            encoded_at=self.encoded_at,
            states=tuple(s._replace(value=moved(s.value, devices[s.layer], copy=copy)) for s in self.states),
        )

    def wide(self) -> ChunkKV:
        """The same KV without `PackedTensors`; `self` if it has none."""
        if not self.packed:
            return self
        return replace(self, keys=tuple(self.keys), values=tuple(self.values))


def moved(tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
    """The tensor on the device; the host does not wait for a copy to a GPU.

    The copy is made from pinned memory, which torch keeps until it is done, and before any later work of the GPU.
    """
    if tensor.device.type != "cpu" or device.type == "cpu" or device.type not in varlen.DEVICES:
        return tensor.to(device, copy=copy)
    return tensor.pin_memory().to(device, non_blocking=True)


class StateGoneError(RagkvError):
    """The record of a chunk's KV was deleted after a question had chosen it."""

    def __init__(self, kv: OpaqueKV) -> None:
        super().__init__("The KV of a chunk was deleted while a question waited for it; ask again.")
        self.kv = kv


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class OpaqueKV:
    """One chunk's KV in a form that only another runtime reads: bytes on the processor, as a record of this `shape`
    holds them, layer by layer and then the states.

    `source` is the bytes, or reads them from a store, which gives None once the record of this
    `identity` (a `KVIdentity`) is gone.
    """

    source: NDArray[np.uint8] | Callable[[], NDArray[np.uint8] | None]
    shape: KVShape
    tokens: int
    encoded_at: int = 0
    identity: Any = None

    packed = True

    @property
    def data(self) -> NDArray[np.uint8]:
        """The bytes; StateGoneError if they are no longer stored."""
        state = self.source() if callable(self.source) else self.source
        if state is None:
            raise StateGoneError(self)
        return state

    @property
    def nbytes(self) -> int:
        return self.shape.nbytes(self.tokens)

    def head(self, tokens: int) -> OpaqueKV:
        """As of a `ChunkKV` with states."""
        if tokens != self.tokens:
            raise UnsupportedModelError(_WHOLE)
        return self

    def to(self, place: Place, *, copy: bool = False) -> OpaqueKV:
        """As of a `ChunkKV`; it stays where it is."""
        return replace(self, source=self.data.copy()) if copy else self


class CopyStream:
    """Copies to a device beside its computation: kernels that are launched meanwhile do not wait for them.

    On a GPU the copies have a stream of their own. Use or free the result of `send` only after `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def staging(self, nbytes: int) -> Tensor:
        """`(nbytes,)` uninitialised bytes that the device can read directly (pinned); torch caches the buffers."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def send(self, staged: Tensor) -> Tensor:
        """The bytes on the device; from any thread.

        Their memory there belongs to the computing stream, which may still read its earlier content.
        """
        if self._stream is None:
            return moved(staged, self._device)
        there = torch.empty_like(staged, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return there.copy_(staged, non_blocking=True)

    def wait(self) -> None:
        """Make later computation wait for all copies sent so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


copy_stream = lru_cache(CopyStream)
"""The one stream of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedChunk:
    """A chunk KV in a sequence's prompt: `start` is the position of its first token there."""

    kv: ChunkKV
    start: int

    @property
    def offset(self) -> int:
        """How far the prompt moved the chunk from where it was encoded; the query is rotated back by this."""
        return self.start - self.kv.encoded_at

    @property
    def end(self) -> int:
        return self.start + self.kv.tokens
