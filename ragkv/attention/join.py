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

from ragkv.attention.kv import ChunkKV, Segment
from ragkv.attention.rope import Rotary
from ragkv.attention.row import Group

__all__ = ["join", "worth_joining"]

LONG = 1024
"""Tokens per chunk from which a kernel call of its own costs nothing that matters: such chunks are not copied."""


def worth_joining(group: Group, *, windowed: bool) -> bool:
    """Whether a decode step would read the group's segments faster as one.

    `windowed`: some layer has a sliding window, so the joined tokens must stand at consecutive positions (APE's
    chunks, which share positions, are left as they are).
    """
    segments = [segment for segment in group.segments if segment.kv.tokens]
    apart = any(before.end != after.start for before, after in itertools.pairwise(segments))
    tokens = sum(segment.kv.tokens for segment in segments)
    return len(segments) > 1 and not (windowed and apart) and tokens < LONG * len(segments)


def join(segments: Sequence[Segment], rotary: Rotary) -> ChunkKV:
    """The segments as one KV in the order given, every key rotated to where the prompt puts it. An own copy.

    Rotated in fp32, a chunk at a time (it stays in the processor's cache), then rounded once to the stored dtype.
    """
    tokens = sum(segment.kv.tokens for segment in segments)
    first = segments[0].kv
    turns = {
        (kind, key.device) for kind, key in zip(rotary.kinds, first.keys, strict=True) if kind is not None
    }  # layers may lie on several devices
    told = torch.tensor([[segment.offset] for segment in segments])
    offsets = {device: told.to(device, non_blocking=True) for _, device in turns}
    angles = {(kind, device): rotary.angles(offsets[device], kind) for kind, device in turns}  # (chunks, 1, dim) each
    keys, values = [], []
    for layer, kind in enumerate(rotary.kinds):
        key, value = (_empty_like(held[layer], tokens) for held in (first.keys, first.values))
        at = 0
        for index, segment in enumerate(segments):
            end = at + segment.kv.tokens
            stored = segment.kv.keys[layer]
            if kind is not None and segment.offset != 0 and stored.numel():
                cos, sin = (a[index : index + 1] for a in angles[kind, stored.device])
                stored = rotary.apply(stored[None].float(), cos, sin)[0]
            key[:, at:end], value[:, at:end] = stored, segment.kv.values[layer]
            at = end
        keys.append(key)
        values.append(value)
    return ChunkKV(keys=tuple(keys), values=tuple(values), encoded_at=segments[0].start)


def _empty_like(like: Tensor, tokens: int) -> Tensor:
    """Memory for `tokens` tokens of the shape `(kv_heads, tokens, head_dim)`."""
    kv_heads, _, head_dim = like.shape
    return like.new_empty((kv_heads, tokens, head_dim))
