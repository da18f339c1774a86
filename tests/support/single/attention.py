"""Attention of one request over its context, chunk by chunk where it lies, and over its own tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.attention.kv import PlacedChunk
from ragkv.attention.partial import LayerCall, PartialAttention, merge_partials, partial_attention
from ragkv.model.attention_hook import attention_backend
from ragkv.model.language_model import LanguageModel

__all__ = ["Group", "Pass", "Rows"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Segments under one softmax; `row` is the one batch row that sees them, None: all do."""

    segments: tuple[PlacedChunk, ...]
    row: int | None = None
    temperature: float = 1.0
    scale: float = 1.0
    scale_mode: str = "power"

    def weigh(self, part: PartialAttention) -> PartialAttention:
        if self.scale_mode == "power":
            return PartialAttention(part.out, part.lse * (self.scale * self.temperature))
        return PartialAttention(part.out, part.lse * self.temperature + math.log(self.scale))


class Rows:
    """Rows of one batch over some groups. They read equally many tokens at a time, each from its own position on."""

    def __init__(self, model: LanguageModel, groups: Sequence[Group], positions: Sequence[int]) -> None:
        self._model = model
        self._groups = tuple(group for group in groups if group.segments)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = list(positions)

    @torch.inference_mode()
    def read(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """`ids[i]` are appended to row i; fp32 logits `(rows, vocab)` of the last."""
        tokens = torch.tensor([list(each) for each in ids])
        positions = torch.tensor(self.positions)[:, None] + torch.arange(tokens.shape[1])
        self._model.require_positions(int(positions.max()) + 1)
        run = Pass(self._model, self._groups, self._own, positions)
        with attention_backend(run):
            logits = self._model.module(
                input_ids=tokens.to(self._model.device),
                position_ids=positions.to(self._model.device),
                use_cache=False,
                logits_to_keep=1,
            ).logits
        self.positions = [position + tokens.shape[1] for position in self.positions]
        return logits[:, -1].float()


@dataclass
class Pass:
    """What the layers of its forward pass attend by."""

    model: LanguageModel
    groups: tuple[Group, ...]
    own: dict[int, tuple[Tensor, Tensor]]
    positions: Tensor

    def attend(self, call: LayerCall) -> Tensor:
        layer, query, key, value, window = call.layer, call.query, call.key, call.value, call.window
        how = {"scale": call.scale, "softcap": call.softcap}
        held = self.own.get(layer)
        if held is not None:
            key, value = torch.cat([held[0], key], 2), torch.cat([held[1], value], 2)
        self.own[layer] = key, value
        n, m = query.shape[2], key.shape[2]
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
        mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        parts = [partial_attention(query, key, value, mask=mask.to(query.device), **how)]
        for group in self.groups:
            rows = slice(None) if group.row is None else slice(group.row, group.row + 1)
            found = [
                partial_attention(
                    self._turned(query[rows], layer, segment),
                    segment.kv.keys[layer][None],
                    segment.kv.values[layer][None],
                    temperature=group.temperature,
                    mask=self._mask(rows, segment, window, query.device),
                    **how,
                )
                for segment in group.segments
            ]
            part = group.weigh(merge_partials(found))
            parts.append(part if group.row is None else _alone(part, group.row, query.shape[0]))
        if call.sink is not None:
            nothing = torch.zeros_like(parts[0].out)
            parts.append(PartialAttention(nothing, call.sink.float()[None, :, None].expand(nothing.shape[:3])))
        return merge_partials(parts).out.to(query.dtype)

    def _turned(self, query: Tensor, layer: int, segment: PlacedChunk) -> Tensor:
        if not segment.offset:
            return query
        return self.model.rotary.rotate(query, layer, torch.tensor([[-segment.offset]]).to(query.device))

    def _mask(self, rows: slice, segment: PlacedChunk, window: int | None, device: torch.device) -> Tensor | None:
        if window is None:
            return None
        seen = self.positions[rows, :, None] - torch.arange(segment.start, segment.end) < window  # (batch, n, m)
        return None if bool(seen.all()) else seen.to(device)


def _alone(part: PartialAttention, row: int, batch: int) -> PartialAttention:
    """The part of one row as one of the whole batch, of which the others saw nothing."""
    out = part.out.new_zeros((batch, *part.out.shape[1:]))
    lse = part.lse.new_full((batch, *part.lse.shape[1:]), -torch.inf)
    out[row], lse[row] = part.out[0], part.lse[0]
    return PartialAttention(out, lse)
