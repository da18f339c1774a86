"""Chunk KV in pages of one pool, so that one kernel call reads many chunks.

`PagePool` copies a chunk's keys and values into adjacent pages of a block: a tensor per layer, `(pages, PAGE, kv_heads,
head_dim)`. The chunk KV that it returns is views of them, so whatever reads a chunk reads it there. `PagedReads` reads
chunks of one block for the tokens that see each, in one launch per layer (`ragkv.attention.varlen`). Pages are free
again with the last chunk KV that lies in them; work on the device is in order, so no kernel still reads what is written
next.
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
from ragkv.attention.kv import ChunkKV, Pages, Place
from ragkv.attention.partial import LayerCall, PartialAttention
from ragkv.attention.rope import QueryRotation

PAGE = 16
"""Tokens of a page."""
BLOCK = 1024
"""Pages of a block, unless a chunk needs more."""


class PageBlock:
    """Pages on a device, some of them taken. `keys[l]` and `values[l]` are `(pages, PAGE, kv_heads, head_dim)`."""

    def __init__(self, like: ChunkKV, devices: Sequence[torch.device], pages: int) -> None:
        def made(held: Sequence[Tensor]) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty((pages, PAGE, t.shape[0], t.shape[2]), dtype=t.dtype, device=device)
                for t, device in zip(held, devices, strict=True)
            )

        self.keys, self.values, self.shape = made(like.keys), made(like.values), like.shape
        self._free = [(0, pages)]  # (first, count) of each run of free pages, ascending
        self._back: deque[tuple[int, int]] = deque()  # a finalizer appends, wherever it runs

    def take(self, count: int) -> Pages | None:
        """The first run of `count` free pages."""
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
        """The chunk KV in pages of the pool; `kv` itself if there is no room, or if it cannot be read from pages."""
        devices = self._place if isinstance(self._place, tuple) else (self._place,) * kv.layers
        first = kv.keys[0][None], kv.keys[0][None], kv.values[0][None]
        if kv.pages is not None or not kv.tokens or not kv.here or not varlen.takes(*first):
            return kv
        with self._lock:
            pages = self._take(kv, devices)
        if pages is None:
            return kv

        def put(blocks: Sequence[Tensor], held: Sequence[Tensor]) -> tuple[Tensor, ...]:
            start = pages.first * PAGE
            places = (block.flatten(0, 1)[start : start + kv.tokens].transpose(0, 1) for block in blocks)
            return tuple(there.copy_(t, non_blocking=True) for there, t in zip(places, held, strict=True))

        block = pages.block
        return replace(kv, keys=put(block.keys, kv.keys), values=put(block.values, kv.values), pages=pages)

    def _take(self, kv: ChunkKV, devices: Sequence[torch.device]) -> Pages | None:
        count = -(-kv.tokens // PAGE)
        shape = kv.shape
        for block in self._blocks:
            if block.shape == shape and (pages := block.take(count)) is not None:
                return pages
        number = max(BLOCK, count)
        size = kv.nbytes // kv.tokens * PAGE * number
        if self._bytes + size > self._budget:
            return None
        self._blocks.append(PageBlock(kv, devices, number))
        self._bytes += size
        return self._blocks[-1].take(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRead:
    """A chunk's pages and its tokens, and those of the pass that see it: where they are, how many, and the row of each
    in the pass's table of rotations.
    """

    pages: Pages
    keys: int
    tokens: slice | Tensor
    count: int
    row: int | Tensor


class PagedReads:
    """Reads of chunks of one block at one temperature for one `group`, in one launch."""

    def __init__(self, reads: Sequence[PagedRead], temperature: float, group: int, device: torch.device) -> None:
        self.group = group
        self._tokens = [read.tokens for read in reads]
        first = self._tokens[0]
        self._alike = isinstance(first, slice) and all(isinstance(t, slice) and t == first for t in self._tokens)
        self._block, self._temperature = reads[0].pages.block, temperature
        self._counts = [read.count for read in reads]
        self._most = max(self._counts), max(read.keys for read in reads)
        self._index = torch.cat(
            [
                torch.arange(t.start, t.stop, device=device) if isinstance(t, slice) else t
                for t in (read.tokens for read in reads)
            ]
        )
        self._rows = torch.cat(
            [
                torch.full((read.count,), read.row, device=device) if isinstance(read.row, int) else read.row
                for read in reads
            ]
        )
        starts = [PAGE * read.pages.first for read in reads]
        keys = torch.tensor([[*starts, 0], [*(read.keys for read in reads), 0]], dtype=torch.int32)
        starts_at, used = keys.to(device, non_blocking=True)
        self._ends, self._used = (varlen.bounds(self._counts, device), starts_at), used[:-1]

    def attend(self, call: LayerCall, rotation: QueryRotation | None) -> list[tuple[slice | Tensor, PartialAttention]]:
        """The partial attention of each read with its tokens; merged to one where the same tokens see all chunks."""
        query = call.query[:, :, self._index] if rotation is None else rotation.by(self._rows, self._index)
        keys, values = (held[call.layer].flatten(0, 1) for held in (self._block.keys, self._block.values))
        kv_heads, group = keys.shape[1], query.shape[1] // keys.shape[1]
        # all keys are visible, so the query heads of a group are queries of one head
        folded = query[0].reshape(kv_heads, group, -1, query.shape[3]).permute(2, 1, 0, 3).flatten(0, 1)
        most, keys_most = self._most
        out, lse = varlen.packed(
            folded,
            keys,
            values,
            (self._ends[0] * group, self._ends[1]),
            (most * group, keys_most),
            scale=call.scale / self._temperature,
            used=self._used,
        )
        out = out.reshape(-1, group, kv_heads, out.shape[-1]).permute(2, 1, 0, 3).flatten(0, 1)[None]
        lse = lse.reshape(kv_heads, -1, group).transpose(1, 2).flatten(0, 1)[None]
        if not self._alike:
            each = zip(torch.split(out, self._counts, 2), torch.split(lse, self._counts, 2), strict=True)
            return list(zip(self._tokens, itertools.starmap(PartialAttention, each), strict=True))
        shape = (1, lse.shape[1], len(self._counts), self._counts[0])
        out, lse = out.reshape(*shape, -1), lse.reshape(shape)  # every query sees keys, so its lse is finite
        total = lse.logsumexp(2)
        merged = (out.float() * torch.exp(lse - total[:, :, None])[..., None]).sum(2)
        return [(self._tokens[0], PartialAttention(merged, total))]
