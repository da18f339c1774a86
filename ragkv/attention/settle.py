"""Lay a context out once, so that every decode step reads it with one kernel call per layer.

The question is read over chunks where they lie, which makes the first token soon. A decode step has one query row,
and a kernel call per chunk then costs more than its keys do (65 calls per layer at 16K tokens in chunks of 256). So
before the second token the chunks of a group are copied side by side, once per answer, and keys that the prompt
moved are rotated to their place in fp32: Block-Attention's re-encoding (§2.3, Eq. 3). It costs the context's KV once
more in memory; in fp32 nothing changes, in the half types a moved key is rounded once more (0.17 % at most).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ragkv.attention.context import Context, ContextGroup, RowStack
from ragkv.attention.kv import ChunkKV, PlacedKV
from ragkv.attention.rope import Rotary

__all__ = ["join", "settle"]

LONG = 1024
"""Tokens per chunk from which a kernel call of its own costs nothing that matters: such chunks are not copied."""


def settle(context: Context, rotary: Rotary, *, windowed: bool) -> Context:
    """The same context in fewer pieces; pieces that would gain nothing are the ones given, not copies.

    `windowed`: some layer has a sliding window, so a piece's tokens must stand at consecutive positions (APE's
    chunks, which share positions, are left as they are) and rows are not stacked.
    """
    shared = [group for group in context.groups if group.row is None]
    rows = [group for group in context.groups if group.row is not None]
    groups = [_merged(group, rotary, windowed) for group in shared]
    stack = None if windowed else _stacked(rows)
    if stack is None:
        return Context(groups=(*groups, *rows), stacks=context.stacks)
    return Context(groups=tuple(groups), stacks=(*context.stacks, stack))


def join(chunks: Sequence[PlacedKV], rotary: Rotary) -> ChunkKV:
    """The chunks as one KV in the order given, every key rotated to where the prompt puts it. An own copy.

    Rotated in fp32, a chunk at a time (it stays in the processor's cache), then rounded once to the stored dtype.
    """
    tokens = sum(placed.kv.tokens for placed in chunks)
    first = chunks[0].kv
    kinds = {kind for kind in rotary.kinds if kind is not None}
    offsets = torch.tensor([placed.offset for placed in chunks], device=first.keys[0].device)[:, None]
    angles = {kind: rotary.angles(offsets, kind) for kind in kinds}  # (chunks, 1, rotary_dim) each
    keys, values = [], []
    for layer, kind in enumerate(rotary.kinds):
        key, value = (_room(held[layer], tokens) for held in (first.keys, first.values))
        at = 0
        for index, placed in enumerate(chunks):
            end = at + placed.kv.tokens
            stored = placed.kv.keys[layer]
            if kind is not None and placed.offset != 0:
                wide = stored[None].float()  # (1, kv_heads, tokens, head_dim)
                cos, sin = (a[index : index + 1] for a in angles[kind])
                stored = rotary.apply(wide, wide[:, :1], cos, sin)[0][0]
            key[:, at:end], value[:, at:end] = stored, placed.kv.values[layer]
            at = end
        keys.append(key)
        values.append(value)
    return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=chunks[0].start)


def _merged(group: ContextGroup, rotary: Rotary, windowed: bool) -> ContextGroup:
    chunks = [placed for placed in group.chunks if placed.kv.tokens]
    apart = any(before.end != after.start for before, after in itertools.pairwise(chunks))
    if len(chunks) < 2 or (windowed and apart) or sum(c.kv.tokens for c in chunks) >= LONG * len(chunks):
        return group
    whole = PlacedKV(kv=join(chunks, rotary), start=chunks[0].start)
    return ContextGroup(chunks=(whole,), temperature=group.temperature, scale=group.scale, scale_mode=group.scale_mode)


def _stacked(rows: Sequence[ContextGroup]) -> RowStack | None:
    """One stack of rows that each see one unmoved chunk, in row order without a gap; None when that does not hold."""
    if len(rows) < 2 or any(not g.plain or len(g.chunks) != 1 or g.chunks[0].offset for g in rows):
        return None
    first = rows[0].row or 0
    kvs = [group.chunks[0].kv for group in rows]
    lengths = [kv.tokens for kv in kvs]
    longest = max(lengths)
    # rows are padded to the longest, so very uneven rows would cost more than they save
    if (
        [g.row for g in rows] != list(range(first, first + len(rows)))
        or longest >= LONG
        or 2 * sum(lengths) < (longest * len(rows))
    ):
        return None

    def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
        kv_heads, _, head_dim = tensors[0].shape
        out = tensors[0].new_zeros((len(rows), kv_heads, longest, head_dim))
        for row, tensor in enumerate(tensors):
            out[row, :, : tensor.shape[1]] = tensor
        return out

    layers = range(kvs[0].layers)
    visible = None
    if min(lengths) < longest:
        device = kvs[0].keys[0].device
        visible = torch.arange(longest, device=device)[None, None] < torch.tensor(lengths, device=device)[:, None, None]
    return RowStack(
        first=first,
        keys=tuple(side_by_side([kv.keys[layer] for kv in kvs]) for layer in layers),
        values=tuple(side_by_side([kv.values[layer] for kv in kvs]) for layer in layers),
        visible=visible,
    )


def _room(like: Tensor, tokens: int) -> Tensor:
    kv_heads, _, head_dim = like.shape
    return like.new_empty((kv_heads, tokens, head_dim))
