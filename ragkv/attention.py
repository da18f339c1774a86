"""The one attention primitive (DESIGN §3): attention over a piece of the row, and the merge of pieces.

`partial_attention` gives (output, logsumexp) over some keys; `merge_parts` joins such parts exactly as one softmax
over all of their keys would (APE Appendix C, Eqs. 8-10). Every engine is a choice of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ragkv.kv import OwnKV, PlacedKV
from ragkv.rope import Rotary, Turns

__all__ = [
    "EMPTY",
    "AttentionRun",
    "Context",
    "ContextGroup",
    "Part",
    "attend",
    "merge_parts",
    "partial_attention",
]

Mask = Tensor | Literal["causal"] | None
# (query, key, value, mask, scale, temperature, softcap) -> (out, lse)
Kernel = Callable[[Tensor, Tensor, Tensor, Mask, float, float, float | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some keys: `out` is `(batch, q_heads, n, head_dim)`, `lse` is `(batch, q_heads, n)` in fp32.

    A row that saw no key has lse −inf and weighs nothing in a merge.
    """

    out: Tensor
    lse: Tensor


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


def partial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    temperature: float = 1.0,
    mask: Mask = None,
    softcap: float | None = None,
    reference: bool = False,
) -> Part:
    """Attention over one set of keys, with its logsumexp in fp32.

    `query` `(batch, q_heads, n, head_dim)`; `key`/`value` `(batch | 1, kv_heads, m, head_dim)`, read in place: query
    heads of a group, and batch rows over shared keys, are folded into the query axis when all keys are visible.
    `mask` is None (all visible), "causal" (n = m, lower triangle) or a bool tensor `(n, m)` or `(batch, n, m)`, True
    where visible.
    `softcap` caps scores as c·tanh(s/c) (Gemma 2); `temperature` divides what the softmax sees, after the cap.
    `reference` asks for the plain matmul that every fast path is
    tested against; it is also the path of whatever the fast kernels cannot do.
    """
    batch, q_heads, n, _ = query.shape
    kv_heads, m = key.shape[1], key.shape[2]
    if m == 0:  # the CPU kernel divides by zero on an empty key axis
        empty = query.new_zeros((batch, q_heads, n, value.shape[-1]))
        return Part(empty, query.new_full((batch, q_heads, n), -torch.inf, dtype=torch.float32))
    fold = mask is None and (q_heads != kv_heads or key.shape[0] != batch)
    if fold:
        query = _fold(query, kv_heads, shared=key.shape[0] != batch)
    elif key.shape[0] != batch:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    kernel = _matmul if reference or softcap is not None else _kernel(query, key, value, mask)
    out, lse = kernel(query, key, value, mask, scale, temperature, softcap)
    if fold:
        out, lse = _unfold(out, batch, q_heads, n), _unfold(lse[..., None], batch, q_heads, n)[..., 0]
    return Part(out, lse)


def merge_parts(parts: Sequence[Part]) -> Part:
    """The parts joined as one softmax over all their keys: weights exp(lse), in fp32 (APE Eq. 10).

    Safe for parts that saw nothing (lse −inf), any number of them. Returns fp32.
    """
    lse = torch.stack([part.lse for part in parts])  # (parts, batch, q_heads, n)
    top = lse.amax(0)
    weights = torch.exp(lse - torch.where(top.isinf(), 0.0, top))
    total = weights.sum(0)
    out = parts[0].out.float() * weights[0, ..., None]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.addcmul_(part.out.float(), weight[..., None])
    out /= torch.where(total == 0, 1.0, total)[..., None]
    return Part(out, top + torch.where(total == 0, 1.0, total).log())


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


def _fold(query: Tensor, kv_heads: int, *, shared: bool) -> Tensor:
    """`(batch, kv_heads·g, n, d)` as `(batch, kv_heads, g·n, d)`, or `(1, kv_heads, batch·g·n, d)` if `shared`."""
    batch, q_heads, n, head_dim = query.shape
    grouped = query.reshape(batch, kv_heads, (q_heads // kv_heads) * n, head_dim)
    if not shared:
        return grouped
    return grouped.transpose(0, 1).reshape(1, kv_heads, -1, head_dim)  # (1, kv_heads, batch·g·n, head_dim)


def _unfold(folded: Tensor, batch: int, q_heads: int, n: int) -> Tensor:
    """Undo `_fold`: back to `(batch, q_heads, n, d)`."""
    if folded.shape[0] == batch:
        return folded.reshape(batch, q_heads, n, -1)
    kv_heads = folded.shape[1]
    rows = folded.reshape(kv_heads, batch, -1, folded.shape[-1]).transpose(0, 1)
    return rows.reshape(batch, q_heads, n, -1)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Kernel:
    """The fastest kernel that gives a logsumexp for these tensors."""
    same = query.dtype == key.dtype == value.dtype and key.shape[-1] == value.shape[-1] == query.shape[-1]
    if same and query.device.type == "cpu" and query.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return _flash_cpu
    half = query.dtype in (torch.bfloat16, torch.float16)
    aligned = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if same and query.device.type == "cuda" and half and aligned and not isinstance(mask, Tensor):
        return _flash_cuda
    return _matmul


def _flash_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    _softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """torch's CPU flash kernel; it reads grouped heads natively and returns the logsumexp in fp32."""
    bias = None
    if isinstance(mask, Tensor):  # the kernel takes an additive mask of the query's dtype
        mask = mask.expand(query.shape[0], -1, -1)[:, None]  # (batch, 1, n, m)
        bias = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=isinstance(mask, str), attn_mask=bias, scale=scale / temperature
    )
    if isinstance(mask, Tensor):
        blind = ~mask.any(-1)  # rows that see no key of this part: the kernel leaves them undefined
        if bool(blind.any()):
            out = out.masked_fill(blind[..., None], 0.0)
            lse = lse.masked_fill(blind, -torch.inf)
    return out, lse


def _flash_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    _softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """torch's CUDA flash kernel; it wants as many key heads as query heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, is_causal=mask == "causal", scale=scale / temperature
    )
    return out, lse


def _matmul(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scale: float,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """The reference: scores in fp32, one softmax."""
    batch, q_heads, n, head_dim = query.shape
    kv_heads, m = key.shape[1], key.shape[2]
    # (batch, kv_heads, g, n, head_dim) against (batch, kv_heads, 1, m, head_dim)
    grouped = query.reshape(batch, kv_heads, q_heads // kv_heads, n, head_dim).float()
    scores = grouped @ key[:, :, None].float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores / temperature
    if mask is not None:
        if isinstance(mask, str):
            mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~mask.expand(batch, -1, -1)[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    out = weights @ value[:, :, None].float()
    return out.reshape(batch, q_heads, n, -1).to(query.dtype), lse.reshape(batch, q_heads, n)
