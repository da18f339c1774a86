"""Attention on a CPU: new tokens read all KV in place, in one call per layer.

The kernels, `ragkv.attention.decode_kernel` for single tokens and `ragkv.attention.flash_kernel` for many, take a
table: the addresses of each chunk's keys and values, and how far the chunk was moved, by which the queries are rotated.
So a context is neither joined nor widened before it is read, and needs no merge with the sequence's own tokens. Chunks
that many decoding sequences share are left to `ragkv.attention.batch`, which reads them once for all, as a GEMM.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.attention.kv import ChunkKV, PlacedChunk, head_width, stored
from ragkv.attention.partial import LayerCall, PartialAttention, flash, float_bits, table_row
from ragkv.attention.rope import Rotary, RotationTable
from ragkv.attention.sequence import ArenaBlock, ArenaKVCache, ChunkGroup, SequenceSlice, TokenSequence, tokens_of
from ragkv.util.plugins import kernel_module

_CPU = torch.device("cpu")
_READERS, _KEYS = 2, 1024
_NUMBERS = 1 << 17
"""Elements of keys and values that are worth a thread: 12 µs of work."""
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_KINDS = {*_NAMES, torch.int8}
_COLUMNS = 10
_KEY, _VALUE, _TOKENS, _KEY_STEP, _VALUE_STEP, _ROTATION, _KIND, _UNSEEN = 0, 1, 2, 4, 6, 7, 8, 9
"""Columns of the table: addresses of keys and values; tokens; strides in bytes from head to head and from token to
token of the keys, then of the values; the row in the table of rotations (-1: none); the kind of the numbers (0: the
model's dtype, 1: float16, 2: rows of int8 with a scale); and how many of the first keys the first new token does not
see (one more for each later token; none if negative).
"""
Integers = NDArray[np.int64]
Rotations = tuple[Tensor, Tensor, Tensor]
"""cos and signed sin of R(-offset), `(offsets, head_dim)`, and the partner of each element of a head."""


def _kernels() -> ModuleType | None:
    return kernel_module("ragkv.attention.decode_kernel")


def decode_takes(call: LayerCall) -> bool:
    """Whether the decode kernel can compute a layer's attention of single queries."""
    query, key, value = call.query, call.key, call.value
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.dtype in _NAMES
        and key.shape[-1] % 8 == value.shape[-1] % 8 == 0
        and not (query.requires_grad and torch.is_grad_enabled())
        and _kernels() is not None
    )


def reads_in_place(group: ChunkGroup) -> bool:
    """Whether a group is decoded without being laid out, because the kernel reads it in place."""
    return _kernels() is not None and all(_readable(chunk.kv) for chunk in group.segments)


def _readable(kv: ChunkKV) -> bool:
    return all(
        t.device.type == "cpu" and t.dtype in _KINDS and head_width(t) % 8 == 0 and (t.stride(2) == 1 or not t.numel())
        for t in (*stored(kv.keys), *stored(kv.values))
    )


def shared(readers: int, tokens: int) -> bool:
    """Whether a chunk of `tokens` tokens has enough `readers` to be read once for all of them.

    That costs a merge in every layer, and a copy of the chunk if it was moved.
    """
    return readers > _READERS and readers * tokens > _KEYS


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Chunks under one softmax: their rows of the table for each layer, `(layers, chunks, columns)`, and each chunk's
    first position and id(). `number` is 0 for ordinary attention.
    """

    number: int
    temperature: float
    rows: Integers
    starts: Integers
    ids: Integers

    @classmethod
    def of(cls, number: int, temperature: float, chunks: Sequence[PlacedChunk], offsets: Sequence[int]) -> _Group:
        rows = np.empty((chunks[0].kv.layers if chunks else 0, len(chunks), _COLUMNS), np.int64)
        for at, chunk in enumerate(chunks):
            rotation = offsets.index(chunk.offset) if chunk.offset else -1
            for layer, pair in enumerate(zip(stored(chunk.kv.keys), stored(chunk.kv.values), strict=True)):
                rows[layer, at] = table_row(*pair, rotation)
        starts, ids = [chunk.start for chunk in chunks], [id(chunk.kv) for chunk in chunks]
        return cls(number, temperature, rows, np.array(starts, np.int64), np.array(ids, np.int64))

    def within(self, position: int, window: int | None, others: frozenset[int]) -> Integers:
        """The rows for tokens from `position` on, without the chunks `others` and the keys before the window."""
        rows, starts = self.rows, self.starts
        if others and rows.size:
            some = ~np.isin(self.ids, list(others))
            rows, starts = rows[:, some], starts[some]
        if window is None or not rows.size:
            return rows
        first = position - window + 1 - starts
        some = first < rows[0, :, _TOKENS]
        rows = rows[:, some].copy()
        _cut(rows, first[some])
        return rows


def _cut(rows: Integers, first: Integers | int) -> None:
    """Cut the rows so that they begin with the key `first`, the first that the first new token sees."""
    gone = np.maximum(0, first)
    rows[..., _KEY] += gone * rows[..., _KEY_STEP]
    rows[..., _VALUE] += gone * rows[..., _VALUE_STEP]
    rows[..., _TOKENS] -= gone
    rows[..., _UNSEEN] = first - gone


@dataclass(frozen=True, slots=True, eq=False)
class _Located:
    """The `groups` of a sequence as rows of the table: id() of a chunk -> its `tokens`, the distinct offsets of moved
    chunks, and the dtypes. `parts` is empty if the kernel cannot read them.
    """

    groups: tuple[ChunkGroup, ...]
    tokens: dict[int, int]
    parts: tuple[_Group, ...]
    offsets: tuple[int, ...]
    dtypes: frozenset[torch.dtype]
    _rotations: dict[tuple[str, int], Rotations] = field(default_factory=dict)

    @classmethod
    def of(cls, sequence: TokenSequence) -> _Located:
        """The sequence's; cached until its groups change."""
        held: _Located | None = sequence.located
        if held is None or held.groups is not sequence.groups:
            held = sequence.located = cls._found(sequence.groups)
        return held

    @classmethod
    def _found(cls, groups: tuple[ChunkGroup, ...]) -> _Located:
        filled = [(group, [s for s in group.segments if s.kv.tokens]) for group in groups]
        chunks = [chunk for _, some in filled for chunk in some]
        tokens = {id(chunk.kv): chunk.kv.tokens for chunk in chunks}
        offsets = tuple(sorted({chunk.offset for chunk in chunks} - {0}))
        dtypes = frozenset(t.dtype for s in chunks for held in (s.kv.keys, s.kv.values) for t in stored(held))
        if not all(_readable(chunk.kv) for chunk in chunks):
            return cls(groups, tokens, (), offsets, dtypes)
        plain = [chunk for group, some in filled if group.plain for chunk in some]
        weighed = [(group.temperature, some) for group, some in filled if not group.plain]
        parts = [_Group.of(number, *part, offsets) for number, part in enumerate([(1.0, plain), *weighed])]
        return cls(groups, tokens, tuple(parts), offsets, dtypes)

    def rotations(self, rotary: Rotary, kind: str, width: int) -> Rotations:
        """The rotations by its offsets, for heads of `width` numbers."""
        if (kind, width) not in self._rotations:
            table = RotationTable.of(rotary, -torch.tensor(self.offsets), kind, width)
            self._rotations[kind, width] = table.cos.contiguous(), table.sin.contiguous(), table.partners
        return self._rotations[kind, width]


@dataclass(frozen=True, slots=True)
class InPlace:
    """What a step reads in place: the KV of `spans`, without the chunks `others` (by id()) for single tokens; `starts`
    are the spans' places in the step.
    """

    spans: tuple[SequenceSlice, ...] = ()
    others: frozenset[int] = frozenset()
    starts: frozenset[int] = frozenset()

    @classmethod
    def of(cls, spans: Sequence[SequenceSlice], dtype: torch.dtype, *, single: bool, many: bool) -> InPlace:
        """The spans whose KV the kernels can read in place, for a model that computes in `dtype`: those with a `single`
        token, and those with `many`.
        """
        readable, kinds = list[SequenceSlice](), {dtype, torch.int8}
        if dtype == torch.float32:
            kinds.add(torch.float16)
        for span in spans:
            if (single if span.n == 1 else many) and type(span.sequence) is TokenSequence:
                located = _Located.of(span.sequence)
                if located.parts and located.dtypes <= kinds:
                    readable.append(span)
        decoding, others = [span for span in readable if span.n == 1], set[int]()
        if len(decoding) > _READERS:
            seen = [_Located.of(span.sequence).tokens for span in decoding]
            readers = Counter(itertools.chain.from_iterable(seen))
            others = {chunk for each in seen for chunk, tokens in each.items() if shared(readers[chunk], tokens)}
        return cls(tuple(readable), frozenset(others), frozenset(span.start for span in readable))

    def reads(self, span: SequenceSlice, kv: ChunkKV) -> bool:
        """Whether this chunk of the sequence is read in place."""
        return span.start in self.starts and (span.n > 1 or id(kv) not in self.others)


@dataclass(frozen=True, eq=False)
class _Table:
    """The input of the kernel in layers with the same window.

    `rows` `(layers, chunks, columns)`; part i, the attention of a sequence's new tokens over one group, has the rows
    `starts[i]` to `starts[i + 1]`. `tokens[i]` is the index in the step of the first of its `counts[i]` tokens,
    `sharpness[i]` the inverse of the group's temperature. `groups` are (number, slice of the result's tokens, the same
    tokens in the step).
    """

    rows: Integers
    starts: Integers
    tokens: Integers
    counts: Integers
    sharpness: NDArray[np.float32]
    groups: tuple[tuple[int, slice, slice | Tensor], ...]

    @cached_property
    def keys(self) -> int:
        """Number of query-key pairs, without the keys of the sequences' own tokens."""
        return int(np.add.reduceat(self.rows[0, :, _TOKENS], self.starts[:-1]) @ self.counts)

    @cached_property
    def int8(self) -> bool:
        """Whether some of the keys are int8."""
        return bool((self.rows[..., _KIND] == 2).any())

    @cached_property
    def parts(self) -> Integers:
        """The parts for `ragkv.attention.flash_kernel`; each layer writes the first and last column. Those of group 0
        begin with the sequences' own keys.
        """
        ends = np.cumsum(self.counts)
        own, nothing = ends <= self.groups[0][1].stop, np.zeros_like(ends)
        columns = nothing, ends - self.counts, self.counts, self.starts[:-1], self.starts[1:], own, nothing
        return np.ascontiguousarray(np.stack(columns).T)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of these arrays, except the rows."""
        return tuple(array.ctypes.data for array in (self.starts, self.tokens, self.sharpness))

    @cached_property
    def row_addresses(self) -> list[int]:
        """Addresses of each layer's rows."""
        return [rows.ctypes.data for rows in self.rows]


class AttentionInPlace:
    """The attention in place of one step, over sequences that all have one new token, or all have many."""

    def __init__(self, spans: Sequence[SequenceSlice], others: frozenset[int], rotary: Rotary) -> None:
        self._spans, self._others, self._rotary = spans, others, rotary
        self._many = spans[0].n > 1
        self._located = [_Located.of(span.sequence) for span in spans]
        self._tables: dict[int | None, _Table] = {}
        self._cached_rotations: dict[tuple[str, int], Rotations] = {}
        self.tokens = tokens_of(spans, _CPU)
        """Indices of the tokens in the step."""
        blocks: dict[int, list[int]] = {}
        self._alone: list[int] = []
        for index, span in enumerate(spans):
            cache = span.sequence.cache
            block = cache.block if isinstance(cache, ArenaKVCache) and not self._many else None
            if block is not None and cache.length < block.capacity:
                blocks.setdefault(id(block), []).append(index)
            else:
                self._alone.append(index)
        self._slots = [_Slots(which, [spans[index] for index in which]) for which in blocks.values()]

    @classmethod
    def of(cls, what: InPlace, rotary: Rotary) -> list[AttentionInPlace]:
        """One object per kind of sequence that is read in place."""
        kinds = ([span for span in what.spans if (span.n > 1) == many] for many in (False, True))
        return [cls(spans, frozenset() if spans[0].n > 1 else what.others, rotary) for spans in kinds if spans]

    def attend(self, call: LayerCall) -> list[tuple[int, slice | Tensor, PartialAttention]]:
        """The tokens' attention over each of their groups, as (number, tokens, partial). The first result is group 0,
        of all tokens, together with their own KV, to which the new tokens are appended.
        """
        width, heads = call.query.shape[3], call.query.shape[1]
        if call.window not in self._tables:
            self._tables[call.window] = self._table(call.window)
        table = self._tables[call.window]
        rows = table.rows[call.layer]
        for at in self._alone:
            span = self._spans[at]
            keys, values = span.sequence.append(call, span.tokens)
            rows[table.starts[at]] = table_row(keys, values, -1)
        for slots in self._slots:
            rows[table.starts[slots.which]] = slots.append(call)
        if call.window is not None:
            for own, span in zip(table.starts, self._spans, strict=False):
                _cut(rows[own], rows[own, _TOKENS] - span.n - call.window + 1)
        kind = self._rotary.kinds[call.layer]
        if kind is None:  # a layer without RoPE
            rows[:, _ROTATION] = -1
        tokens = table.groups[-1][1].stop
        dtype = call.query.dtype if self._many else torch.float32
        out = torch.empty((1, tokens, heads, call.value.shape[-1] or width), dtype=dtype).transpose(1, 2)
        lse = torch.empty((1, tokens, heads), dtype=torch.float32).transpose(1, 2)
        (_compute_many if self._many else _compute)(call, table, self._rotations(kind, width), out, lse)
        if len(table.groups) == 1:  # slicing would cost as much as everything else here
            ((number, _, tokens),) = table.groups
            return [(number, tokens, PartialAttention(out, lse))]
        return [
            (number, tokens, PartialAttention(out[:, :, which], lse[:, :, which]))
            for number, which, tokens in table.groups
        ]

    def _rotations(self, kind: str | None, width: int) -> Rotations | None:
        """The rotations of all sequences, concatenated."""
        if kind is None:
            return None
        if (kind, width) not in self._cached_rotations:
            moved = [located for located in self._located if located.offsets]
            if not moved:
                return None
            cos, sin, partners = zip(*(located.rotations(self._rotary, kind, width) for located in moved), strict=True)
            self._cached_rotations[kind, width] = torch.cat(cos), torch.cat(sin), partners[0]
        return self._cached_rotations[kind, width]

    def _table(self, window: int | None) -> _Table:
        own = np.zeros((len(self._rotary.kinds), 1, _COLUMNS), np.int64)  # every layer writes it
        rows, lengths, sharpness = list[Integers](), list[int](), list[float]()
        spans, groups, tokens = list[SequenceSlice](), [], 0
        for number in sorted({part.number for located in self._located for part in located.parts}):
            seen = list[SequenceSlice]()
            for span, part, found in self._parts(number, window):
                some = [own, found] if number == 0 else [found]
                some = [piece for piece in some if piece.size]
                if not some:
                    continue
                rows += some
                lengths.append(sum(piece.shape[1] for piece in some))
                sharpness.append(1.0 / part.temperature)
                seen.append(span)
            if seen:
                spans += seen
                first, tokens = tokens, tokens + sum(span.n for span in seen)
                groups.append((number, slice(first, tokens), tokens_of(seen, _CPU)))
        return _Table(
            np.ascontiguousarray(np.concatenate(rows, 1)),
            np.array([0, *itertools.accumulate(lengths)], np.int64),
            np.array([span.start for span in spans], np.int64),
            np.array([span.n for span in spans], np.int64),
            np.array(sharpness, np.float32),
            tuple(groups),
        )

    def _parts(self, number: int, window: int | None) -> Iterator[tuple[SequenceSlice, _Group, Integers]]:
        """The sequences that have the group, with its rows for their tokens."""
        earlier = 0
        for span, located in zip(self._spans, self._located, strict=True):
            if number < len(located.parts):
                part = located.parts[number]
                rows = part.within(span.sequence.position, window, self._others)
                if earlier:  # skip the rotations of the sequences before
                    rows = rows.copy()
                    rows[..., _ROTATION] += np.where(rows[..., _ROTATION] < 0, 0, earlier)
                yield span, part, rows
            earlier += len(located.offsets)


class _Slots:
    """Sequences whose own KV is in one block; `which` are their indices."""

    def __init__(self, which: Sequence[int], spans: Sequence[SequenceSlice]) -> None:
        caches = [span.sequence.cache for span in spans]
        assert isinstance(caches[0], ArenaKVCache)
        assert caches[0].block is not None
        self._block: ArenaBlock = caches[0].block
        self.which = np.array(which)
        self._tokens = tokens_of(spans, _CPU)
        slots = [cache.slot for cache in caches if isinstance(cache, ArenaKVCache)]
        lengths = [cache.length for cache in caches]
        self._slots, self._places = torch.tensor([slots, lengths])
        self._rows = np.zeros((len(slots), _COLUMNS), np.int64)  # to be added to that of a whole first slot
        self._rows[:, _TOKENS] = np.array(lengths) + 1 - self._block.capacity
        self._numbers = np.array(slots)
        self._strides: tuple[int, ...] = ()

    def append(self, call: LayerCall) -> Integers:
        """Write the new tokens; returns the rows of each sequence's own KV."""
        block = self._block
        block.make(call.layer, call.key, call.value)
        key, value = (t[0, :, self._tokens].transpose(0, 1) for t in (call.key, call.value))
        block.write(call.layer, self._slots, self._places, key, value)
        keys, values = block.keys[call.layer], block.values[call.layer]
        values = values if values.shape[-1] else keys
        strides = tuple(t.stride(0) * t.element_size() for t in (keys, values))
        if strides != self._strides:  # usually those of the layer before
            self._rows[:, [_KEY, _VALUE]], self._strides = np.outer(self._numbers, strides), strides
        return np.array(table_row(keys[0], values[0], -1)) + self._rows


def _compute(call: LayerCall, table: _Table, rotations: Rotations | None, out: Tensor, lse: Tensor) -> None:
    """Fill `out` `(1, q_heads, parts, value_dim)` and `lse` `(1, q_heads, parts)` for single tokens, on torch's number
    of threads.
    """
    kernel = _kernels()
    assert kernel is not None
    kind, kv_heads, query = _NAMES[call.key.dtype], call.key.shape[1], call.query
    if query.stride(3) != 1:
        query = query.contiguous()
    _, heads, _, width = query.shape
    group = heads // kv_heads
    kinds = (kind, "float16" if kind == "float32" else kind, "int8")[: 3 if table.int8 else 2]
    tile = min(group, kernel.TILE)
    attend = kernel.compiled(",".join(kinds), width, out.shape[-1], tile)
    units = out.shape[2] * kv_heads * -(-group // tile)
    threads = min(units, kernel.kernels.threads_for(table.keys * kv_heads * (width + out.shape[-1]), _NUMBERS))
    pointers = query.data_ptr(), out.data_ptr(), lse.data_ptr(), *_addresses(rotations)
    where = table.row_addresses[call.layer], *table.addresses
    sizes = kv_heads, group, query.stride(1), query.stride(2)
    kernel.kernels.run(
        attend, units, threads, *pointers, *where, *sizes, float_bits(call.scale), float_bits(call.softcap or 0.0)
    )


def _addresses(rotations: Rotations | None) -> Sequence[int]:
    return [rotation.data_ptr() for rotation in rotations] if rotations else (0, 0, 0)


def _compute_many(call: LayerCall, table: _Table, rotations: Rotations | None, out: Tensor, lse: Tensor) -> None:
    """As `_compute` for many tokens: `(1, q_heads, tokens, head_dim)` and `(1, q_heads, tokens)`, part by part."""
    query, parts = call.query, table.parts
    parts[:, 0] = query.data_ptr() + query.element_size() * query.stride(2) * table.tokens
    parts[:, -1] = (np.float32(call.scale) * table.sharpness).view(np.int32)
    rows = table.row_addresses[call.layer], table.rows.strides[1]
    flash(query, parts, call.key.shape[1], rows, _addresses(rotations), (out, lse), table.keys)
