"""Attention over training rows in the full and block layouts, for any family that `ragkv.model.language` runs.

transformers accepts a 4-D mask only without a sliding window, and with eager attention it misreads a bool mask (it
expects additive floats). So the mask is not an argument of the model. It reaches the attention function as a call
argument, as at inference, and is combined here with the layer's window and soft cap.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ragkv.attention.visibility import Visible, require_neutral, window_of
from ragkv.attention.visibility import visible as visible_window
from ragkv.errors import UnsupportedModelError
from ragkv.finetune.mask import visible

__all__ = ["NAME", "RowMask"]

NAME = "ragkv_rows"


class RowMask:
    """The visible keys in a batch of rows (columns of `trainingrow.collate`), with a layer's sliding window.

    Masks are made once per batch and window, not once per layer.
    """

    def __init__(self, *, segments: Tensor, asks: Tensor, positions: Tensor, block: Tensor, causal: bool) -> None:
        self._segments, self._asks, self._positions, self._block = segments, asks, positions, block
        self._causal = causal
        self._made: dict[int | None, Tensor | None] = {}

    def of(self, window: int | None) -> Tensor | None:
        """The bool mask (rows, 1, tokens, tokens), True where visible, for a window; None if it is plainly causal."""
        if window is not None and window >= self._positions.shape[1]:
            window = None  # no two tokens are so far apart
        if window not in self._made:
            self._made[window] = self._make(window)
        return self._made[window]

    def _make(self, window: int | None) -> Tensor | None:
        if window is None:
            return None if self._causal else visible(self._segments, self._asks, self._block)
        behind = self._positions[:, None, :, None] - self._positions[:, None, None, :]  # (rows, 1, queries, keys)
        return visible(self._segments, self._asks, self._block) & (behind < window)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | None,
    *,
    scaling: float,
    ragkv_rows: RowMask | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The registered function, from `(rows, heads, tokens, head_dim)` to `(rows, tokens, heads, head_dim)`."""
    if ragkv_rows is None:
        raise UnsupportedModelError(
            "This model does not pass call arguments on to its attention function, so it cannot be tuned for blocks."
        )
    require_neutral(others)
    mask = ragkv_rows.of(window_of(attention_mask, sliding_window))
    if softcap is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )
        return out, None
    if mask is None:
        tokens = query.shape[2]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scaling / softcap)  # (rows, q_heads, queries, keys)
    weights = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1).to(value.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, visible_window)
