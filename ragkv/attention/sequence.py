"""`TokenSequence`: one stream of tokens, the chunks that it reads, its position, and the KV of its own tokens.

Own KV is a `KVCache`. Short sequences that decode together keep theirs in a `KVArena`: a block has slots for several
sequences of the same capacity, so that one call per layer reads all of them, masked to their lengths. A sequence that
outgrows its block moves to memory of its own.

It is the paper's form; a sequence per answer is the same computation without the masked scores.

`join` copies a context's chunks together for decoding, if `ragkv.attention.in_place` does not read them in place. The
question reads chunks in place, which keeps the time to first token short, but a decode step with one query per sequence
would pay more for a kernel call per chunk than for its keys (65 calls per layer at 16K tokens in chunks of 256). So
before the second token a group's chunks are copied side by side, once per answer, with moved keys rotated in fp32:
Block-Attention's re-encoding (§2.3, Eq. 3). The copy takes the context's KV once more in memory. In fp32 nothing
changes; in half types a moved key is rounded once more (0.17 % at most).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ragkv.attention.kv import ChunkKV, PlacedChunk, head_width, stored, unpacked
from ragkv.util.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ragkv.attention.partial import LayerCall, PartialAttention
    from ragkv.attention.rope import Angles, Rotary
else:
    torch = LazyModule("torch")


class KVCache:
    """Keys and values of the tokens that a sequence computes itself: its question and what it generates.

    Memory grows by doubling, so a decode step writes one column and does not copy the rest (a `DynamicCache`
    concatenates the whole cache at every step). `reserve` is the number of tokens beyond the first ones that it
    allocates memory for.
    """

    __slots__ = ("_keys", "_values", "length", "reserve", "shared")

    def __init__(self, *, reserve: int = 64) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.length = 0
        """Tokens held: the number that `commit` has counted."""
        self.reserve = reserve
        self.shared: Mapping[int, int] = {}
        """Layers that hold nothing because they read another layer's KV -> that layer."""

    @classmethod
    def joined(cls, chunks: Sequence[PlacedChunk], rotary: Rotary, *, reserve: int) -> KVCache:
        """A copy of adjacent chunks, every key rotated to its position in the prompt, as a sequence's own KV.

        It has room for `reserve` more tokens. Layers that read another layer's keys hold nothing.
        """
        cache = cls(reserve=reserve)
        keys, values = _joined(chunks, rotary, reserve)
        cache._keys = {layer: key[None] for layer, key in enumerate(keys) if key.shape[0]}
        cache._values = {layer: value[None] for layer, value in enumerate(values) if value.shape[0]}
        cache.length = sum(chunk.kv.tokens for chunk in chunks)
        return cache

    def lies_in(self) -> tuple[ArenaBlock, int] | None:
        """Its block, and its slot there; memory of its own is a block of one. None before it has any."""
        if not self._keys:
            return None
        block = ArenaBlock(1, next(iter(self._keys.values())).shape[2])
        block.keys, block.values = self._keys, self._values
        return block, 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write `(1, kv_heads, n, head_dim)` of `layer` after the tokens held; returns views of all of them.

        The new tokens count after `commit`, once the forward pass is over; until then a second attempt overwrites them.
        """
        used, end = self.length, self.length + key.shape[2]
        keys = self._keys[layer] = _reserved(self._keys.get(layer), key, used, end, self.reserve)
        values = self._values[layer] = _reserved(self._values.get(layer), value, used, end, self.reserve)
        keys[:, :, used:end] = key
        values[:, :, used:end] = value
        return keys[:, :, :end], values[:, :, :end]

    def commit(self, tokens: int) -> None:
        """Count `tokens` more, which all layers now hold."""
        self.length += tokens

    def select(self, tokens: Sequence[int]) -> None:
        """Keep only these of the tokens held, in this order."""
        places = torch.tensor(tokens)

        def kept(held: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: block[:, :, places.to(block.device, non_blocking=True)] for layer, block in held.items()}

        self._keys, self._values, self.length = kept(self._keys), kept(self._values), len(tokens)

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        """All tokens as a chunk KV, without the memory reserved for more."""

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
    """`held` with room for `end` tokens; it at least doubles when it has to be copied."""
    if held is not None and held.shape[2] >= end:
        return held
    capacity = max(end + reserve, 2 * used)
    batch, kv_heads, _, head_dim = new.shape
    grown = new.new_empty((batch, kv_heads, capacity, head_dim))
    if held is not None:
        grown[:, :, :used] = held[:, :, :used]
    return grown


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Placed chunks under one softmax, and the weight of the group against the rest of the sequence.

    `temperature` T divides the softmax scale; the group's logsumexp enters the merge as S·T·lse (`power`, APE §4.4 with
    the searched pair) or T·lse + log S (`log`, the variant of its later code). T = S = 1 is ordinary attention.
    """

    segments: tuple[PlacedChunk, ...]
    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    @property
    def plain(self) -> bool:
        """Whether the group is ordinary attention, so that its chunks merge with the rest in one step."""
        return self.temperature == 1.0 and self.scale == 1.0

    @property
    def weight(self) -> tuple[float, float]:
        """(a, b): the group's logsumexp enters the sequence's softmax as a·lse + b."""
        if self.scale_mode == "power":
            return self.scale * self.temperature, 0.0
        return self.temperature, math.log(self.scale)

    def weigh(self, partial: PartialAttention) -> PartialAttention:
        """The merged group as it enters the sequence's softmax."""
        factor, addend = self.weight
        return replace(partial, lse=partial.lse * factor + addend)


@dataclass(slots=True, weakref_slot=True, eq=False)
class TokenSequence:
    """One stream of tokens: a question, an expert or the amateur of PCED, a question of an IPPD prompt.

    `groups` is all KV that it reads besides its own tokens; `position` is that of its next token. Its own KV, `cache`,
    grows with every token that it reads. `laid_out`: its groups are laid out for decoding (`ragkv.runtime.kv_pool`).
    `silent`: it is run only for its KV, not its logits. `located` caches the addresses of its groups
    (`ragkv.attention.in_place`).
    """

    groups: tuple[ChunkGroup, ...]
    position: int
    cache: KVCache = field(default_factory=KVCache)
    laid_out: bool = False
    silent: bool = False
    located: Any = field(default=None, init=False, repr=False)

    @classmethod
    def over(cls, segments: Iterable[PlacedChunk], *, position: int) -> TokenSequence:
        """A sequence that reads these chunks by ordinary attention."""
        found = tuple(segments)
        return cls((ChunkGroup(segments=found),) if found else (), position)

    @classmethod
    def for_kv(cls, segments: Iterable[PlacedChunk], *, position: int) -> TokenSequence:
        """A sequence that is run once, only for its KV: it reserves no memory for more, and its logits are not used."""
        sequence = cls.over(segments, position=position)
        sequence.cache, sequence.silent = KVCache(reserve=0), True
        return sequence

    def places(self, n: int) -> Sequence[int]:
        """Positions of its next `n` tokens."""
        return range(self.position, self.position + n)

    def kept(self, n: int) -> list[int]:
        """Indices among its next `n` tokens of those whose logits are wanted: usually the last one."""
        return [] if self.silent else [n - 1]

    @property
    def segments(self) -> tuple[PlacedChunk, ...]:
        """All placed chunks of all groups."""
        return tuple(chunk for group in self.groups for chunk in group.segments)

    @property
    def until(self) -> int | None:
        """The last layer to run, if only its keys and values are wanted; None: run all layers."""
        return None

    def append(self, call: LayerCall, tokens: slice) -> tuple[Tensor, Tensor]:
        """Write the keys and values of its new tokens, the `tokens` of the pass; returns all of the layer's."""
        key, value = call.key, call.value
        if tokens.stop - tokens.start < key.shape[2]:
            key, value = key[:, :, tokens], value[:, :, tokens]
        return self.cache.append(call.layer, key, value)

    def observe(self, layer: int, call: LayerCall, tokens: slice) -> None:
        """Hook after `append` in every layer of the pass; `call.layer` is the layer whose keys it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """The new tokens of one sequence in a step: `n` tokens, beginning with the step's token `start`."""

    sequence: TokenSequence
    start: int
    n: int

    @property
    def tokens(self) -> slice:
        """Their place in the step."""
        return slice(self.start, self.start + self.n)

    @property
    def last(self) -> int:
        """Position of the last of them."""
        return self.sequence.position + self.n - 1


def tokens_of(slices: Sequence[SequenceSlice], device: torch.device) -> slice | Tensor:
    """The places of these slices' tokens in the step: a slice if they are adjacent, else indices."""
    if all(before.start + before.n == after.start for before, after in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].start + slices[-1].n)
    return torch.cat([torch.arange(p.start, p.start + p.n) for p in slices]).to(device, non_blocking=True)


MOST_TOKENS = 1024
"""A sequence that needs more has memory of its own: its keys justify a kernel call."""
MOST_SEQUENCES = 32


class ArenaBlock:
    """One slot of `capacity` tokens for each of some sequences: `(slots, kv_heads, capacity, head_dim)` per layer,
    allocated at first use.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.free = list(range(slots))[::-1]
        self._slots = slots

    def take(self) -> int:
        """A free slot, zeroed: a NaN of its last sequence would get through any mask."""
        slot = self.free.pop()
        with torch.inference_mode():
            for held in (*self.keys.values(), *self.values.values()):
                held[slot].zero_()
        return slot

    def make(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Allocate a layer, of the shape and dtype of `(1, kv_heads, n, head_dim)`."""
        if layer not in self.values:  # values are allocated last: if that failed, the keys may exist already
            for held, like in ((self.keys, key), (self.values, value)):
                # zeros: unwritten places are masked, but a NaN would get through any mask
                _, heads, _, head_dim = like.shape
                if like.device.type == "cpu":
                    held[layer] = like.new_zeros((self._slots, heads, self.capacity, head_dim))
                else:  # token-major, for one kernel call over all slots (`varlen.packed`)
                    held[layer] = like.new_zeros((self._slots, self.capacity, heads, head_dim)).transpose(1, 2)

    def write(self, layer: int, slots: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
        """One token per slot: `key`/`value` `(slots, kv_heads, head_dim)` at `places` of `slots`."""
        self.keys[layer][slots, :, places] = key
        self.values[layer][slots, :, places] = value


class ArenaKVCache(KVCache):
    """A sequence's own KV in an arena block; it moves to its own memory once it needs more than the block's
    capacity."""

    __slots__ = ("block", "slot")

    def __init__(self, block: ArenaBlock) -> None:
        super().__init__()
        self.slot = block.take()
        self.block: ArenaBlock | None = block

    def __del__(self) -> None:
        block: ArenaBlock | None = getattr(self, "block", None)  # None: `__init__` failed
        if block is not None:
            block.free.append(self.slot)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + key.shape[2]
        if self.block is not None and end > self.block.capacity:
            self._leave(self.block)
        if self.block is None:
            return super().append(layer, key, value)
        self.block.make(layer, key, value)
        keys, values = (t[layer][self.slot : self.slot + 1] for t in (self.block.keys, self.block.values))
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def lies_in(self) -> tuple[ArenaBlock, int] | None:
        return super().lies_in() if self.block is None else (self.block, self.slot)

    def layers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        if self.block is None:
            return super().layers()
        one = slice(self.slot, self.slot + 1)
        keys = {layer: t[one] for layer, t in self.block.keys.items()}
        return keys, {layer: t[one] for layer, t in self.block.values.items()}

    def chunk_kv(self, *, encoded_at: int = 0) -> ChunkKV:
        if self.block is not None:
            self._leave(self.block)  # the slot will be reused, so the result must not be a view of it
        return super().chunk_kv(encoded_at=encoded_at)

    def _leave(self, block: ArenaBlock) -> None:
        keys, values = self.layers()
        self._keys = {layer: t[:, :, : self.length].clone() for layer, t in keys.items()}
        self._values = {layer: t[:, :, : self.length].clone() for layer, t in values.items()}
        self.block = None
        block.free.append(self.slot)


class KVArena:
    """All arena blocks of a runtime; a block is freed with its last sequence."""

    def __init__(self) -> None:
        self._arena: list[weakref.ref[ArenaBlock]] = []

    def place(self, tokens: int, more: int, sequences: int) -> KVCache:
        """Own KV for a sequence of `tokens` tokens and at most `more` to come; about `sequences` of them run now."""
        needed = tokens + more
        if sequences < 2 or needed > MOST_TOKENS:
            return KVCache(reserve=min(more, MOST_TOKENS))
        capacity = max(64, 1 << (needed - 1).bit_length())
        alive = [(ref, block) for ref in self._arena if (block := ref()) is not None]
        self._arena = [ref for ref, _ in alive]
        for _, block in alive:
            if block.capacity == capacity and block.free:
                return ArenaKVCache(block)
        block = ArenaBlock(min(sequences, MOST_SEQUENCES), capacity)
        self._arena.append(weakref.ref(block))
        return ArenaKVCache(block)


@dataclass(slots=True, eq=False)
class RecomputedSequence(TokenSequence):
    """Recomputes some tokens of a context whose KV is stored; each sees what precedes it in the context.

    `context` holds the KV of positions 0 to its length - 1. The tokens at `indices`, ascending, are run; their keys and
    values replace those in `context`, so that later tokens see them. They may take several passes. Only keys and values
    are wanted.
    """

    context: KVCache = field(kw_only=True)
    indices: Sequence[int] = field(kw_only=True)
    _index: tuple[tuple[int, int, torch.device], Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.cache, self.silent = KVCache(reserve=0), True  # the cache only counts the tokens that were run

    def places(self, n: int) -> Sequence[int]:
        return self.indices[self.cache.length : self.cache.length + n]

    def index(self, n: int, device: torch.device) -> Tensor:
        """`places(n)` as a tensor on the device."""
        key = (self.cache.length, n, device)
        if self._index is None or self._index[0] != key:
            self._index = key, torch.tensor(self.places(n)).to(device, non_blocking=True)
        return self._index[1]

    def append(self, call: LayerCall, tokens: slice) -> tuple[Tensor, Tensor]:
        keys, values = self._stored(call.layer)
        index = self.index(tokens.stop - tokens.start, keys.device)
        keys[:, :, index], values[:, :, index] = call.key[:, :, tokens], call.value[:, :, tokens]
        return keys, values

    def _stored(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.context.layers()
        return keys[layer][:, :, : self.context.length], values[layer][:, :, : self.context.length]


@dataclass(slots=True, eq=False)
class DeviationProbe(RecomputedSequence):
    """Measures how much the values of a context's tokens in one `layer` differ from the stored ones (CacheBlend §4.2);
    it changes nothing.

    In layer 0 keys and values depend only on a token and its position, so stored ones equal new ones.
    """

    layer: int = field(kw_only=True)
    _found: dict[int, Tensor] = field(default_factory=dict, init=False)

    @property
    def until(self) -> int:
        return self.layer

    def append(self, call: LayerCall, tokens: slice) -> tuple[Tensor, Tensor]:
        return self._stored(call.layer)

    def observe(self, layer: int, call: LayerCall, tokens: slice) -> None:
        if layer != self.layer:
            return
        keys, values = self._stored(call.layer)
        new, old = (call.value, values) if values.shape[-1] else (call.key, keys)  # latents are their own values
        index = self.index(tokens.stop - tokens.start, old.device)
        apart = new[0, :, tokens].float() - old[0, :, index].float()
        self._found[self.cache.length] = apart.square().sum((0, 2))

    @property
    def scores(self) -> Tensor:
        """The sum of squared differences over heads and dimensions, `(tokens,)`, for the tokens at `indices`."""
        return torch.cat([self._found[start] for start in sorted(self._found)])


_SCORES = 1 << 25
"""Attention weights in memory at a time."""


@dataclass(slots=True, eq=False)
class AttentionProbe(TokenSequence):
    """Measures how much a question's tokens attend to each token of a context, in some `layers`.

    The context is the beginning of its own KV, and `first` the first token that is scored. With a = exp(s - lse) of
    score s, `norm` is sqrt(sum over the question of (mean over heads of a)²), with the logsumexp over all keys that a
    token sees (InfoFlow §3.2); `sum` is the sum of a over heads and question, with the logsumexp over the scored tokens
    alone (ProphetKV).
    """

    layers: frozenset[int] = field(kw_only=True)
    first: int = field(kw_only=True)
    rule: Literal["norm", "sum"] = field(kw_only=True)
    _end: int = field(default=0, init=False)
    _found: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.silent, self._end = True, self.cache.length

    @property
    def until(self) -> int:
        return max(self.layers)

    def observe(self, layer: int, call: LayerCall, tokens: slice) -> None:
        if layer not in self.layers:
            return
        query, held = call.query[0, :, tokens], self.cache.length
        keys = self.cache.layers()[0][call.layer][0, :, : held + query.shape[1]]
        group = query.shape[0] // keys.shape[0]
        most = max(1, _SCORES // (group * keys.shape[1]))
        places = torch.arange(keys.shape[1], device=keys.device)
        mass = keys.new_zeros(self._end - self.first, dtype=torch.float32)
        for start in range(0, query.shape[1], most):
            some = query[:, start : start + most].float()
            behind = places[held + start : held + start + some.shape[1], None] - places
            hidden = behind < 0 if call.window is None else (behind < 0) | (behind >= call.window)
            shares = mass.new_zeros((some.shape[1], len(mass)))
            for head, key in enumerate(keys):
                each = slice(head * group, head * group + group)
                scores = call.capped(some[each] @ key.float().T * call.scale).masked_fill_(hidden, -torch.inf)
                sink = None if call.sink is None else call.sink[each]
                shares += self._weights(scores, sink).sum(0)
            mass += (shares / query.shape[0]).square().sum(0) if self.rule == "norm" else shares.sum(0)
        self._found[layer, held] = mass

    def _weights(self, scores: Tensor, sink: Tensor | None) -> Tensor:
        """The weights of the scored tokens, `(heads, n, scored)`, from all scores."""
        scored = scores[..., self.first : self._end]
        if self.rule == "sum":
            return torch.softmax(scored, -1).nan_to_num(0.0)  # nan: a window excludes all of them
        lse = scores.logsumexp(-1)
        if sink is not None:
            lse = torch.logaddexp(lse, sink.float()[:, None])
        return torch.exp(scored - lse[..., None])

    @property
    def scores(self) -> Tensor:
        """The mean over the layers, `(context tokens from first on,)`."""
        layers: dict[int, Tensor] = {}
        for (layer, _), found in sorted(self._found.items(), key=lambda each: each[0]):
            layers[layer] = layers[layer] + found if layer in layers else found
        each = [one.sqrt() if self.rule == "norm" else one for one in layers.values()]
        return torch.stack([one.to(each[0].device) for one in each]).mean(0)


LONG = 1024
"""Chunks of this many tokens are not copied: the cost of a kernel call for each is negligible."""


def worth_joining(group: ChunkGroup, *, windowed: bool) -> bool:
    """Whether a decode step reads the group's chunks faster as one.

    `windowed`: some layer has a sliding window, so the joined tokens must have consecutive positions (APE's chunks,
    which share positions, are not joined).
    """
    chunks = [chunk for chunk in group.segments if chunk.kv.tokens]
    apart = any(before.end != after.start for before, after in itertools.pairwise(chunks))
    tokens = sum(chunk.kv.tokens for chunk in chunks)
    return len(chunks) > 1 and not (windowed and apart) and tokens < LONG * len(chunks)


def join(chunks: Sequence[PlacedChunk], rotary: Rotary) -> ChunkKV:
    """A copy of the chunks as one KV, in the order given, every key rotated to its position in the prompt.

    Keys are rotated in fp32 and rounded once to the stored dtype; on a CPU one chunk at a time, so that it fits the
    cache.
    """
    keys, values = _joined(chunks, rotary)
    return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=chunks[0].start)


def _joined(chunks: Sequence[PlacedChunk], rotary: Rotary, room: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """`join` as keys and values of every layer, `(kv_heads, tokens + room, head_dim)`; the room is not initialised."""
    tokens = sum(chunk.kv.tokens for chunk in chunks) + room
    first = chunks[0].kv
    if stored(first.keys)[0].device.type != "cpu":
        return _joined_by_layer(chunks, rotary, tokens)
    moves = _Moves(rotary, [chunk.offset for chunk in chunks])
    keys, values = [], []
    for layer, kind in enumerate(rotary.kinds):
        key, value = (_empty_like(stored(held)[layer], tokens, first.dtype) for held in (first.keys, first.values))
        start = 0
        for index, chunk in enumerate(chunks):
            end = start + chunk.kv.tokens
            held, those = (_written(t, layer, chunk.kv.dtype) for t in (chunk.kv.keys, chunk.kv.values))
            if kind is not None and chunk.offset != 0 and held.numel():
                moves.write(key[:, start:end], held, index, kind)
            else:
                key[:, start:end] = held
            value[:, start:end] = those
            start = end
        keys.append(key)
        values.append(value)
    return keys, values


def _joined_by_layer(chunks: Sequence[PlacedChunk], rotary: Rotary, capacity: int) -> tuple[list[Tensor], list[Tensor]]:
    """`_joined` on a device, with memory for `capacity` tokens: a few launches per layer instead of per chunk."""
    from ragkv.attention.rope import RotationTable

    offsets = sorted({chunk.offset for chunk in chunks})
    lengths = torch.tensor([chunk.kv.tokens for chunk in chunks])
    rows = torch.tensor([offsets.index(chunk.offset) for chunk in chunks]).repeat_interleave(lengths)
    tokens, moved, dtype = len(rows), any(offsets), chunks[0].kv.dtype
    tables: dict[tuple[str, int, torch.device], tuple[RotationTable, Tensor, Tensor]] = {}
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for layer, kind in enumerate(rotary.kinds):
        key, value = (
            torch.cat([_written(held, layer, dtype) for held in each], 1)
            for each in ([chunk.kv.keys for chunk in chunks], [chunk.kv.values for chunk in chunks])
        )
        if kind is not None and moved and key.numel():
            known = kind, key.shape[-1], key.device
            if known not in tables:  # layers may be on several devices
                there, row = (t.to(key.device, non_blocking=True) for t in (torch.tensor(offsets), rows))
                table = RotationTable.of(rotary, there, kind, key.shape[-1])
                tables[known] = table, table.cos[row], table.sin[row]
            table, cos, sin = tables[known]
            wide, partner = table.widened(key)
            key = (wide * cos).addcmul_(partner, sin).to(dtype)
        for joined, tensor in ((keys, key), (values, value)):
            if capacity > tokens or tensor.dtype != dtype:
                joined.append(_empty_like(tensor, capacity, dtype))
                joined[-1][:, :tokens] = tensor
            else:
                joined.append(tensor)
    return keys, values


class _Moves:
    """Writes keys rotated by some offsets, in fp32, rounded once, on a processor.

    It needs no memory but the result and one chunk in fp32: allocating memory for the model's own function would take
    longer than the arithmetic.
    """

    def __init__(self, rotary: Rotary, offsets: Sequence[int]) -> None:
        self._rotary, self._offsets = rotary, torch.tensor(offsets)
        self._angles: dict[str, Angles] = {}
        self._mixed: dict[tuple[str, int], tuple[tuple[slice, slice] | None, Tensor, Tensor]] = {}
        self._buffers = [torch.empty(0, dtype=torch.float32)] * 2

    def write(self, out: Tensor, held: Tensor, index: int, kind: str) -> None:
        """`out` = R(offset `index`)·`held`, `(kv_heads, tokens, head_dim)` each."""
        halves, cos, sin = self._mixing(kind, held.shape[-1])
        if halves is not None:
            self._mix(out, held, halves, cos[index], sin[index])
            return
        if kind not in self._angles:
            self._angles[kind] = self._rotary.angles(self._offsets[:, None], kind)  # (chunks, 1, dim) each
        cos, sin = (a[index : index + 1] for a in self._angles[kind])
        out[:] = self._rotary.apply(held[None].float(), cos, sin)[0]

    def _mixing(self, kind: str, head_dim: int) -> tuple[tuple[slice, slice] | None, Tensor, Tensor]:
        """The halves of a head, and `(chunks, head_dim)` each: the factors of an element and of its partner."""
        if (kind, head_dim) not in self._mixed:
            cos, sin = self._rotary.factors(self._offsets, kind, head_dim)
            _, sign = self._rotary.partners(kind, head_dim, torch.device("cpu"))
            self._mixed[kind, head_dim] = self._rotary.halves(kind, head_dim), cos, sin * sign
        return self._mixed[kind, head_dim]

    def _mix(self, out: Tensor, held: Tensor, halves: tuple[slice, slice], cos: Tensor, sin: Tensor) -> None:
        if held.dtype != torch.float32:
            held = self._buffer(0, out).copy_(held)
        wide = out if out.dtype == torch.float32 else self._buffer(1, out)
        torch.mul(held, cos, out=wide)
        for mine, other in (halves, halves[::-1]):
            wide[..., mine].addcmul_(held[..., other], sin[mine])
        if wide is not out:
            out.copy_(wide)

    def _buffer(self, which: int, like: Tensor) -> Tensor:
        """A float32 buffer of the shape of `like`, reused for the next chunk."""
        if self._buffers[which].numel() < like.numel():
            self._buffers[which] = torch.empty(like.numel(), dtype=torch.float32)
        return self._buffers[which][: like.numel()].view(like.shape)


def _empty_like(like: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Memory for `tokens` tokens of the shape `(kv_heads, tokens, head_dim)`."""
    return like.new_empty((like.shape[0], tokens, head_width(like)), dtype=dtype)


def _written(tensors: Sequence[Tensor], layer: int, dtype: torch.dtype) -> Tensor:
    """A layer's tensor as a source for copies: int8 rows are widened here, float16 by the copy itself."""
    held = stored(tensors)[layer]
    return unpacked(held, dtype) if held.dtype == torch.int8 else held
