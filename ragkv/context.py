"""What a request attends to: the context, chunk by chunk where it lies, and the request's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ragkv.attention import Mask, Part, merge_parts, partial_attention
from ragkv.kv import OwnKV, PlacedKV
from ragkv.rope import Rotary, Turns

__all__ = ["EMPTY", "AttentionRun", "Context", "ContextGroup", "attend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """Chunks under one softmax, and how the group weighs against the rest of the row.

    `row` is the one batch row that sees the group (PCED's expert), or None for all rows. `temperature` T divides
    the softmax scale; the group's logsumexp enters the merge as S·T·lse (`power`, APE §4.4 with the searched pair)
    or T·lse + log S (`log`, the variant of its later code). T = S = 1 is ordinary attention.
    """

    chunks: tuple[PlacedKV, ...]
    row: int | None = None
    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: Literal["power", "log"] = "power"

    @property
    def plain(self) -> bool:
        """Whether the group is ordinary attention, so that its chunks merge with the rest in one step."""
        return self.temperature == 1.0 and self.scale == 1.0

    def weigh(self, part: Part) -> Part:
        """The merged group as it enters the row's softmax."""
        if self.scale_mode == "power":
            return Part(part.out, part.lse * (self.scale * self.temperature))
        return Part(part.out, part.lse * self.temperature + torch.tensor(self.scale).log().item())


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All KV that a request reads besides its own tokens."""

    groups: tuple[ContextGroup, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(placed.kv.tokens for group in self.groups for placed in group.chunks)


EMPTY = Context()


@dataclass(slots=True, kw_only=True)
class AttentionRun:
    """What one forward pass attends with; handed to the registered attention function as a call argument.

    `positions` `(batch, n)` are the new tokens' positions; `spans` caches their lowest and highest on the host, so
    that no layer waits for the device.
    """

    context: Context
    own: OwnKV
    rotary: Rotary
    positions: Tensor
    turns: Turns = field(init=False)
    spans: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.rotary)
        self.spans = int(self.positions.min()), int(self.positions.max())


def attend(
    run: AttentionRun,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """One layer's attention of the new tokens over the context and over the request's own tokens.

    `query` `(batch, q_heads, n, head_dim)`, `key`/`value` `(batch, kv_heads, n, head_dim)`, rotated by the model
    for `run.positions`. `window` is the layer's sliding window: a query at i sees keys at i-window+1..i.
    Returns `(batch, q_heads, n, head_dim)` in the query's dtype. Appends the new tokens to `run.own`.
    """
    keys, values = run.own.append(layer, key, value)
    parts = [_own_part(query, keys, values, scale=scale, softcap=softcap, window=window)]
    by_row: dict[int, list[Part]] = {}
    for group in run.context.groups:
        rows = query if group.row is None else query[group.row : group.row + 1]
        found = _group_parts(run, group, layer, rows, scale=scale, softcap=softcap, window=window)
        if group.row is None:
            parts += found
        else:
            by_row.setdefault(group.row, []).extend(found)
    if by_row:
        parts.append(_stack_rows(by_row, query))
    if len(parts) == 1:
        return parts[0].out
    return merge_parts(parts).out.to(query.dtype)


def _own_part(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None, window: int | None
) -> Part:
    """Causal attention over the request's own tokens, of which the last n are new."""
    n, m = query.shape[2], keys.shape[2]
    if n == 1:
        first = 0 if window is None else max(0, m - window)
        return partial_attention(query, keys[:, :, first:], values[:, :, first:], scale=scale, softcap=softcap)
    mask: Mask = "causal"
    if n != m or (window is not None and m > window):
        behind = torch.arange(m - n, m, device=query.device)[:, None] - torch.arange(m, device=query.device)
        mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return partial_attention(query, keys, values, scale=scale, mask=mask, softcap=softcap)


def _group_parts(
    run: AttentionRun,
    group: ContextGroup,
    layer: int,
    query: Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> list[Part]:
    """One part per visible chunk; a group with its own temperature or scale is merged into one weighed part."""
    visible = [c for c in group.chunks if window is None or run.spans[0] - (c.end - 1) < window]
    turned = run.turns.turn(query, layer, [c.offset for c in visible])
    parts = []
    for placed, rows in zip(visible, turned, strict=True):
        key, value = placed.kv.keys[layer][None], placed.kv.values[layer][None]
        mask: Mask = None
        if window is not None and run.spans[1] - placed.start >= window:
            positions = run.positions if group.row is None else run.positions[group.row : group.row + 1]
            at = torch.arange(placed.start, placed.end, device=query.device)
            mask = positions[..., None] - at < window  # (batch, n, m)
        parts.append(
            partial_attention(rows, key, value, scale=scale, temperature=group.temperature, mask=mask, softcap=softcap)
        )
    if group.plain or not parts:
        return parts
    return [group.weigh(merge_parts(parts))]


def _stack_rows(by_row: dict[int, list[Part]], query: Tensor) -> Part:
    """One part for the whole batch from parts that single rows saw; other rows saw nothing."""
    merged = {row: merge_parts(parts) for row, parts in by_row.items() if parts}
    batch, q_heads, n, head_dim = query.shape
    width = next((part.out.shape[-1] for part in merged.values()), head_dim)
    out = query.new_zeros((batch, q_heads, n, width), dtype=torch.float32)
    lse = query.new_full((batch, q_heads, n), -torch.inf, dtype=torch.float32)
    for row, part in merged.items():
        out[row], lse[row] = part.out[0], part.lse[0]
    return Part(out, lse)
