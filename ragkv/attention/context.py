"""What a request attends to: the context, chunk by chunk where it lies, and the request's own tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ragkv.attention.kv import OwnKV, PlacedKV
from ragkv.attention.part import Mask, Part, merge_parts, partial_attention
from ragkv.attention.rope import Rotary, Turns
from ragkv.attention.visibility import Visible

__all__ = ["EMPTY", "AttentionRun", "Context", "ContextGroup", "RowStack", "attend"]


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
class RowStack:
    """KVs of consecutive batch rows from `first` on, side by side, so that one kernel call reads all of them.

    `keys[l]` and `values[l]` are `(rows, kv_heads, m, head_dim)`, m the longest; `visible` `(rows, 1, m)` is True
    where a row has a token, or None when all are of one length. Only where layers have no window (`attention.settle`).
    """

    first: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    visible: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """All KV that a request reads besides its own tokens."""

    groups: tuple[ContextGroup, ...] = ()
    stacks: tuple[RowStack, ...] = ()


EMPTY = Context()


@dataclass(slots=True, kw_only=True)
class AttentionRun:
    """What one forward pass attends with; handed to the registered attention function as a call argument.

    `positions` `(batch, n)` are the new tokens' positions; `spans` caches their lowest and highest on the host, so
    that no layer waits for the device. `seen`, if it is a list, is told by every layer what its mask lets it see.
    """

    context: Context
    own: OwnKV
    rotary: Rotary
    positions: Tensor
    seen: list[tuple[int, Visible]] | None = None
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
    for stack in run.context.stacks:
        parts.append(_stack_part(stack, layer, query, scale=scale, softcap=softcap))
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
    lowest = None if window is None else run.spans[0] - window + 1  # the first position that any query sees
    visible = [c for c in group.chunks if c.kv.tokens and (lowest is None or c.end > lowest)]
    turned = run.turns.turn(query, layer, [c.offset for c in visible])
    parts = []
    for placed, rows in zip(visible, turned, strict=True):
        key, value, start = placed.kv.keys[layer][None], placed.kv.values[layer][None], placed.start
        mask: Mask = None
        if lowest is not None and lowest > start:  # keys that no query sees are not read
            key, value, start = key[:, :, lowest - start :], value[:, :, lowest - start :], lowest
        if window is not None and run.spans[1] - start >= window:
            positions = run.positions if group.row is None else run.positions[group.row : group.row + 1]
            at = torch.arange(start, placed.end, device=query.device)
            mask = positions[..., None] - at < window  # (batch, n, m)
        parts.append(
            partial_attention(rows, key, value, scale=scale, temperature=group.temperature, mask=mask, softcap=softcap)
        )
    if group.plain or not parts:
        return parts
    return [group.weigh(merge_parts(parts))]


def _stack_rows(by_row: dict[int, list[Part]], query: Tensor) -> Part:
    """One part for the whole batch from parts that single rows saw; other rows saw nothing."""
    merged = {row: parts[0] if len(parts) == 1 else merge_parts(parts) for row, parts in by_row.items() if parts}
    batch, q_heads, n, head_dim = query.shape
    width = next((part.out.shape[-1] for part in merged.values()), head_dim)
    out = query.new_zeros((batch, q_heads, n, width), dtype=torch.float32)
    lse = query.new_full((batch, q_heads, n), -torch.inf, dtype=torch.float32)
    for row, part in merged.items():
        out[row], lse[row] = part.out[0], part.lse[0]
    return Part(out, lse)


def _stack_part(stack: RowStack, layer: int, query: Tensor, *, scale: float, softcap: float | None) -> Part:
    """Attention of a stack's rows over their own keys; the batch's other rows saw nothing."""
    key, value = stack.keys[layer], stack.values[layer]
    last = stack.first + key.shape[0]
    mask = stack.visible
    if mask is not None:
        mask = mask.expand(-1, query.shape[2], -1)  # (rows, n, m)
    part = partial_attention(query[stack.first : last], key, value, scale=scale, mask=mask, softcap=softcap)
    batch, q_heads, n, _ = query.shape
    out = query.new_zeros((batch, q_heads, n, value.shape[-1]), dtype=torch.float32)
    lse = query.new_full((batch, q_heads, n), -torch.inf, dtype=torch.float32)
    out[stack.first : last], lse[stack.first : last] = part.out, part.lse
    return Part(out, lse)
