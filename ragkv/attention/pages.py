"""Chunk KV in pages of one pool, so that one kernel call reads many chunks.

`PagePool` copies a chunk's keys and values into adjacent pages of a block: a tensor per layer, `(pages, PAGE, kv_heads,
head_dim)`. The chunk KV that it returns consists of views of them, so every reader reads the pages. `PagedReads` reads
chunks of one block, each for the tokens that see it, in one launch per layer (`ragkv.attention.varlen`). Pages are
freed with the last chunk KV in them; a device works in order, so no kernel still reads what is written next.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.attention import varlen
from ragkv.attention.kv import ChunkKV, Pages, Place, head_width, stored, unpacked
from ragkv.attention.partial import LayerCall, PartialAttention
from ragkv.attention.rope import QueryRotation, RotationTable

PAGE = 16
"""Tokens per page."""
BLOCK = 8192
"""Pages per block, unless the budget is less or a chunk needs more: one launch reads one block."""


class PageBlock:
    """Pages on a device. `keys[l]` and `values[l]` are `(pages, PAGE, kv_heads, head_dim)`."""

    def __init__(self, like: ChunkKV, devices: Sequence[torch.device], pages: int) -> None:
        def made(held: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty((pages, PAGE, t.shape[0], t.shape[2]), dtype=t.dtype, device=device)
                for t, device in zip(held, devices, strict=True)
            )

        self.shape = like.shape
        self.stacked: Tensor | None = None
        """Keys and values of all layers in turn, `(2 · layers, pages, PAGE, kv_heads, head_dim)`, if all have one
        shape."""
        first = like.keys[0]
        if len(set(devices)) == 1 and all(t.shape == first.shape for t in (*like.keys, *like.values)):
            size = 2 * like.layers, pages, PAGE, first.shape[0], first.shape[2]
            self.stacked = torch.empty(size, dtype=first.dtype, device=devices[0])
            self.keys, self.values = tuple(self.stacked[::2]), tuple(self.stacked[1::2])
        else:
            self.keys, self.values = made(like.keys), made(like.values)
        self._free = [(0, pages)]  # (first, count) of each run of free pages, ascending
        self._back: deque[tuple[int, int]] = deque()  # a finalizer appends, in any thread

    def take(self, count: int) -> Pages | None:
        """The first run of `count` free pages, now taken."""
        while self._back:
            bisect.insort(self._free, self._back.popleft())
        runs: list[tuple[int, int]] = []
        for first, free in self._free:
            if runs and sum(runs[-1]) == first:
                runs[-1] = runs[-1][0], runs[-1][1] + free
            else:
                runs.append((first, free))
        self._free = runs
        for at, (first, free) in enumerate(runs):
            if free >= count:
                runs[at : at + 1] = [(first + count, free - count)] if free > count else []
                pages = Pages(block=self, first=first, count=count)
                weakref.finalize(pages, self._back.append, (first, count))
                return pages
        return None


class PagePool:
    """Pages for one model's chunk KV, at most `budget` bytes of them. Thread-safe."""

    def __init__(self, place: Place, budget: int) -> None:
        self._place, self._budget = place, budget
        self._blocks: list[PageBlock] = []
        self._bytes = 0
        self._lock = threading.Lock()

    @torch.inference_mode()
    def hold(self, kv: ChunkKV) -> ChunkKV:
        """Copy the chunk KV into the pool; returns `kv` itself if there is no room or it cannot be read from pages."""
        devices = self._place if isinstance(self._place, tuple) else (self._place,) * kv.layers
        key, value = (
            held[0].new_empty((1, held[0].shape[0], 0, head_width(held[0])), dtype=kv.dtype)
            for held in (stored(kv.keys), stored(kv.values))
        )
        if kv.pages is not None or not kv.tokens or not varlen.takes(key, key, value):
            return kv
        with self._lock:
            pages = self._take(kv, devices)
        if pages is None:
            return kv

        block, start = pages.block, pages.first * PAGE

        def places(blocks: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(each.flatten(0, 1)[start : start + kv.tokens].transpose(0, 1) for each in blocks)

        if block.stacked is None:
            there, keys, values = None, places(block.keys), places(block.values)
        else:
            there = block.stacked.flatten(1, 2)[:, start : start + kv.tokens].transpose(1, 2)
            layers = there.unbind()
            keys, values = layers[::2], layers[1::2]
        held = replace(kv, keys=keys, values=values, pages=pages, stacked=None)
        if there is not None and kv.stacked is not None:
            there.copy_(unpacked(kv.stacked, kv.dtype), non_blocking=True)
        else:
            for to, tensor in zip((*held.keys, *held.values), (*kv.keys, *kv.values), strict=True):
                to.copy_(tensor, non_blocking=True)
        return held

    def _take(self, kv: ChunkKV, devices: Sequence[torch.device]) -> Pages | None:
        count = -(-kv.tokens // PAGE)
        shape = kv.shape
        for block in self._blocks:
            if block.shape == shape and (pages := block.take(count)) is not None:
                return pages
        page = shape.token_bytes * PAGE
        number = min(max(BLOCK, count), (self._budget - self._bytes) // page)
        if number < count:
            return None
        try:
            self._blocks.append(PageBlock(kv, devices, number))
        except torch.OutOfMemoryError:  # less memory is free than the budget allows: leave chunks outside
            self._budget = self._bytes
            return None
        self._bytes += page * number
        return self._blocks[-1].take(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRead:
    """A read of some tokens of a chunk, `keys` of them from the token `first_key` of its block on. It names the
    tokens of the pass that see them, their number, and each one's row in the pass's table of rotations.
    """

    block: PageBlock
    first_key: int
    keys: int
    tokens: slice | Tensor
    count: int
    row: int | Tensor


class PagedReads:
    """Reads of chunks of one block at one temperature for one `group`, in one launch."""

    def __init__(self, reads: Sequence[PagedRead], temperature: float, group: int, device: torch.device) -> None:
        self.group = group
        self._tokens: list[slice | Tensor]
        self._block, self._temperature = reads[0].block, temperature
        first = reads[0].tokens
        self._seen: slice | None = None
        """The tokens that see all the chunks; their partial attentions are merged here."""
        if isinstance(first, slice) and all(isinstance(r.tokens, slice) and r.tokens == first for r in reads):
            self._seen, rounds = first, [list(reads)]
        else:
            rounds = _rounds(reads)
        ordered = [read for turn in rounds for read in turn]
        counts = [read.count for read in ordered]
        self._counts = [sum(read.count for read in turn) for turn in rounds]
        self._most = max(counts), max(read.keys for read in ordered)
        turn = [
            torch.arange(r.tokens.start, r.tokens.stop) if isinstance(r.tokens, slice) else r.tokens for r in ordered
        ]
        rows = [torch.full((r.count,), r.row) if isinstance(r.row, int) else r.row for r in ordered]
        self._index, self._rows = _there(turn, device), _there(rows, device)
        places = zip(rounds, torch.split(self._index, self._counts), strict=True)
        self._tokens = [_run(turn) or index for turn, index in places]
        keys = torch.tensor(
            [[*(read.first_key for read in ordered), 0], [*(r.keys for r in ordered), 0]], dtype=torch.int32
        )
        starts_at, used = keys.to(device, non_blocking=True)
        self._ends, self._used = (varlen.bounds(counts, device), starts_at), used[:-1]
        self._chunks = len(ordered)
        self._folded: dict[int, Tensor] = {}
        """The beginning of each read's queries, by the number of heads that are folded into one."""
        self._factors: dict[RotationTable, tuple[Tensor, ...]] = {}
        """The rotation factors of the reads, by table."""

    def attend(self, call: LayerCall, rotation: QueryRotation | None) -> list[tuple[slice | Tensor, PartialAttention]]:
        """The partial attention of each round of reads, with its tokens; merged to one if the same tokens see all
        chunks.
        """
        keys, values = (held[call.layer].flatten(0, 1) for held in (self._block.keys, self._block.values))
        heads, kv_heads, width = call.query.shape[1], keys.shape[1], call.query.shape[3]
        group = heads // kv_heads
        if group not in self._folded:
            self._folded[group] = self._ends[0] * group
        most, keys_most = self._most
        out, lse = varlen.packed(
            self._queries(call, rotation, kv_heads),
            keys,
            values,
            (self._folded[group], self._ends[1]),
            (most * group, keys_most),
            scale=call.scale / self._temperature,
            used=self._used,
        )
        if self._seen is None:
            out = out.reshape(-1, group, kv_heads, width).permute(2, 1, 0, 3).flatten(0, 1)[None]
            lse = lse.reshape(kv_heads, -1, group).transpose(1, 2).flatten(0, 1)[None]
            parts = zip(torch.split(out, self._counts, 2), torch.split(lse, self._counts, 2), strict=True)
            return list(zip(self._tokens, itertools.starmap(PartialAttention, parts), strict=True))
        out = out.reshape(self._chunks, -1, kv_heads, width)
        out, lse = varlen.merged_splits(out, lse.reshape(kv_heads, self._chunks, -1))
        out = out.reshape(-1, group, kv_heads, width).permute(2, 1, 0, 3).flatten(0, 1)
        one = PartialAttention(out[None], lse.reshape(kv_heads, -1, group).transpose(1, 2).flatten(0, 1)[None])
        return [(self._seen, one)]

    def _queries(self, call: LayerCall, rotation: QueryRotation | None, kv_heads: int) -> Tensor:
        """`(queries · group, kv_heads, head_dim)`: all keys are visible, so a group's heads are folded into queries."""

        def folded(states: Tensor) -> Tensor:
            grouped = states[0].reshape(kv_heads, -1, states.shape[2], states.shape[3])
            return grouped.permute(2, 1, 0, 3)  # (n, group, kv_heads, head_dim)

        if self._seen is None:
            query = call.query[:, :, self._index] if rotation is None else rotation.by(self._rows, self._index)
            return folded(query).flatten(0, 1)
        if rotation is None:
            query = folded(call.query[:, :, self._seen])
            return query.expand(self._chunks, *query.shape).flatten(0, 2)
        table = rotation.table
        wide, partner = table.widened(folded(call.query[:, :, self._seen]))
        if table not in self._factors:
            rows = self._rows[:: self._counts[0] // self._chunks]
            self._factors[table] = tuple(t[rows][:, None, None, None] for t in (table.cos, table.sin))
        cos, sin = self._factors[table]
        return (wide * cos).addcmul_(partner, sin).to(call.query.dtype).flatten(0, 2)


def _rounds(reads: Sequence[PagedRead]) -> list[list[PagedRead]]:
    """The reads in rounds that contain each token at most once, so that a round is merged as one."""
    rounds: list[tuple[set[int] | None, list[PagedRead]]] = []
    for read in reads:
        if not isinstance(read.tokens, slice):  # the indices of its tokens are only on the device
            rounds.append((None, [read]))
            continue
        tokens = set(range(read.tokens.start, read.tokens.stop))
        for taken, round_reads in rounds:
            if taken is not None and taken.isdisjoint(tokens):
                taken |= tokens
                round_reads.append(read)
                break
        else:
            rounds.append((tokens, [read]))
    return [round_reads for _, round_reads in rounds]


def _run(reads: Sequence[PagedRead]) -> slice | None:
    """The tokens of these reads as one slice, if each read continues the one before."""
    found = [read.tokens for read in reads if isinstance(read.tokens, slice)]
    apart = any(before.stop != after.start for before, after in itertools.pairwise(found))
    return None if apart or len(found) < len(reads) else slice(found[0].start, found[-1].stop)


def _there(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Concatenate on the device; tensors in host memory are uploaded in one copy."""
    if all(part.device.type == "cpu" for part in parts):
        return torch.cat(list(parts)).to(device, non_blocking=True)
    return torch.cat([part.to(device, non_blocking=True) for part in parts])
