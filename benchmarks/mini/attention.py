"""Attention for packed training rows on a CPU: only what a token may see is multiplied.

Most of a packed row's attention matrix is masked: no question sees another and, in the block layout, no chunk sees
another chunk. PyTorch's CPU kernels take a mask but compute all of the matrix, forward and backward. This function
multiplies only the visible parts: the context in causal strips or chunk by chunk, and each question on the context and
on itself. A step of the mini model's last stage takes about 0.7 of the time of products over whole rows with a mask,
which in turn take a third of the time of sdpa. `tests/benchmarks/mini/test_attention.py` compares it with plain
forwards of every question alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ragkv.finetune.mask import PAD_SEGMENT

if TYPE_CHECKING:
    import torch

__all__ = ["NAME", "Packing", "packed_attention", "packings", "register"]

NAME = "ragkv_packed_rows"
_STRIP = 256
"""Context queries per product. Fewer skip more of the masked triangle."""


class Packing(NamedTuple):
    """The layout of a row: the tokens of each segment of its context and of each question. The rest is padding."""

    context: tuple[int, ...]
    asks: tuple[int, ...]
    block: bool


def packings(segments: torch.Tensor, asks: torch.Tensor, block: torch.Tensor) -> list[Packing]:
    """The layout of every row, from the columns that `mask.visible` takes: (rows, tokens) twice, and (rows,)."""
    found = []
    for row, asked, alone in zip(segments.tolist(), asks.tolist(), block.tolist(), strict=True):
        runs = [(key, len(list(run))) for key, run in groupby(zip(row, asked, strict=True))]
        parts = {
            is_ask: tuple(size for (segment, own), size in runs if segment != PAD_SEGMENT and own == is_ask)
            for is_ask in (False, True)
        }
        found.append(Packing(parts[False], parts[True], alone))
    return found


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    packing: Sequence[Packing] = (),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (rows, q_heads, tokens, head_dim) on `key` and `value` (rows, kv_heads, tokens, head_dim).

    `packing` says which tokens each row's tokens see; `attention_mask` is ignored. Returns (rows, tokens, q_heads,
    head_dim), transformers' order. Outputs of padding are zero.
    """
    import torch

    group = query.shape[1] // key.shape[1]
    query = query * scaling
    key = key.repeat_interleave(group, dim=1)  # (rows, q_heads, tokens, head_dim)
    value = value.repeat_interleave(group, dim=1)
    outputs = []
    for q, k, v, row in zip(query.unbind(), key.unbind(), value.unbind(), packing, strict=True):
        context, used = sum(row.context), sum(row.context) + sum(row.asks)
        first, first_k, first_v = q[:, :context], k[:, :context], v[:, :context]
        parts = [_alone(first, first_k, first_v, row.context)] if row.block else _strips(first, first_k, first_v)
        if row.asks:
            asked = (q[:, context:used], k[:, context:used], v[:, context:used])
            parts.append(_behind(asked, row.asks, first_k, first_v))
        parts.append(q.new_zeros(q.shape[0], q.shape[1] - used, q.shape[2]))
        outputs.append(torch.cat(parts, dim=1))
    return torch.stack(outputs).transpose(1, 2), None


def _strips(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Causal attention over (heads, tokens, head_dim), one strip of queries at a time. `q` is already scaled."""
    found = []
    for start in range(0, q.shape[1], _STRIP):
        end = min(start + _STRIP, q.shape[1])
        scores = _causal_scores(q[:, start:end], k[:, :end])
        found.append(scores.softmax(-1) @ v[:, :end])
    return found


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Causal attention of each part of a row over itself, (heads, tokens, head_dim). `sizes` are the parts' lengths."""
    places, taken = _places(sizes)
    own_q, own_k, own_v = (part[:, places].flatten(0, 1) for part in (q, k, v))  # (heads x parts, longest, head_dim)
    return _unpadded(_causal_scores(own_q, own_k).softmax(-1) @ own_v, q.shape[0], taken)


def _behind(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, ...],
    shared_k: torch.Tensor,
    shared_v: torch.Tensor,
) -> torch.Tensor:
    """As `_alone`, but each part also sees all of `shared_k` and `shared_v` (heads, shared, head_dim) before itself."""
    import torch

    q, shared = qkv[0], shared_k.shape[1]
    heads = q.shape[0]
    places, taken = _places(sizes)
    own_q, own_k, own_v = (part[:, places].flatten(0, 1) for part in qkv)
    own = _unpadded(_causal_scores(own_q, own_k), heads, taken)  # (heads, tokens, longest)
    weights = torch.cat([q @ shared_k.transpose(-1, -2), own], dim=-1).softmax(-1)
    from_own = weights[..., shared:][:, places].flatten(0, 1) @ own_v
    return weights[..., :shared] @ shared_v + _unpadded(from_own, heads, taken)


def _unpadded(padded: torch.Tensor, heads: int, taken: torch.Tensor) -> torch.Tensor:
    """Reshape (heads x parts, longest, width) to (heads, tokens, width) and drop the padding of short parts."""
    return padded.reshape(heads, -1, padded.shape[-1])[:, taken]


def _causal_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q·kᵀ with a causal mask; the queries belong to the last tokens of the keys."""
    import torch

    return torch.baddbmm(_ahead(q.shape[1], k.shape[1]), q, k.transpose(-1, -2))


def _ahead(queries: int, keys: int) -> torch.Tensor:
    """An additive causal mask, (queries, keys): the most negative number where a key follows the query."""
    import torch

    return torch.full((queries, keys), torch.finfo(torch.float32).min).triu_(1 + keys - queries)


def _places(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each part's tokens, (parts, longest), padded with its first, and which of them are no padding."""
    import torch

    longest = max(sizes)
    lengths = torch.tensor(sizes)
    starts = lengths.cumsum(0) - lengths
    own = torch.arange(longest)[None] < lengths[:, None]  # (parts, longest)
    places = (starts[:, None] + torch.arange(longest)).where(own, starts[:, None])
    return places, own.flatten().nonzero()[:, 0]


def register() -> str:
    """Register the function and its mask with transformers, and return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """The registered mask function. It makes no mask, because the packing says what is visible."""
