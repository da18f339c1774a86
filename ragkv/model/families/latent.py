"""Latent attention (MLA, DeepSeek-V2 §2.1): keys and values of all heads are linear in one small vector per token.

That vector, after its norm, and one key with rotary positions are what transformers gives its cache, and what ragkv
keeps: 576 numbers per token and layer for DeepSeek-V3, where its expanded keys and values are 40,960. Attention then
takes them as they are, as one key head that is its own value. What would have expanded the keys is multiplied into the
queries, and what would have expanded the values into the result: the same sums in another order.

A chunk is placed by turning the rope part of the queries alone; the rest of a score has no position.

Measured on one layer of MiniCPM3 and of DeepSeek-V2-Lite (one processor thread, 2,048 tokens of chunks): latents take
0.02 to 0.6 of the time of expanding keys and values first for 1 to 64 queries, as much from about 200 on. A row's own
new tokens are read as latents too. Expanded, which transformers has done already, their attention would take half the
time, which is less than 2 % of the layer's in half types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.errors import UnsupportedModelError
from ragkv.model.interface import Attending

__all__ = ["Absorbing", "Latent", "last_turned", "last_turned_in_pairs", "latent_bytes", "latents_of"]


@dataclass(frozen=True, slots=True)
class Latent:
    """One layer's way from heads to latents and back: `weight` `(q_heads, nope + value_dim, rank)` expands a latent."""

    weight: Tensor
    nope: int

    @classmethod
    def of(cls, module: Any) -> Latent | None:
        """The attention module's, if it is latent attention as transformers writes it: it expands what its cache holds.

        A quantised matrix is taken apart once, into numbers of the type that it computes with. UnsupportedModelError
        where keys are expanded by other means than a matrix.
        """
        if not hasattr(module, "expand_kv"):
            return None
        try:
            project, rank, nope = module.kv_b_proj, module.kv_lora_rank, module.qk_nope_head_dim
            width = nope + module.v_head_dim
        except AttributeError as error:
            raise UnsupportedModelError(f"its latent attention is not built as others are ({error})") from error
        weight = project.weight.detach() if _plain(project) else _matrix(project, rank, module)
        return cls(weight.view(-1, width, rank), nope)

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `(1, 1, n, rank + rope)` and values (their columns, so none of their own) of what the cache is given."""
        key = torch.cat([latent, rope], -1)
        return key, key[..., :0]

    def queries(self, query: Tensor) -> Tensor:
        """Queries of such keys, `(1, q_heads, n, rank + rope)`, from those of expanded keys."""
        return torch.cat([query[..., : self.nope] @ self.weight[:, : self.nope], query[..., self.nope :]], -1)

    def values(self, out: Tensor) -> Tensor:
        """What the heads would have attended to, `(1, q_heads, n, value_dim)`, from sums of keys."""
        latent, expand = out[..., : self.weight.shape[-1]], self.weight[:, self.nope :]
        if latent.dtype == torch.float32:
            return latent @ expand.transpose(-1, -2)
        # half types: a processor multiplies by a transposed matrix four times slower
        return (expand @ latent.transpose(-1, -2)).transpose(-1, -2)


def latents_of(model: nn.Module) -> dict[int, Latent]:
    """The latent attention of each layer that has it."""
    found = ((module, Latent.of(module)) for module in model.modules())
    return {module.layer_idx: latent for module, latent in found if latent is not None}  # type: ignore[misc]


def _plain(project: Any) -> bool:
    """Whether it is a matrix of ordinary numbers and nothing else."""
    return type(project) is nn.Linear and getattr(project, "bias", None) is None and type(project.weight.data) is Tensor


def _matrix(project: nn.Module, rank: int, module: nn.Module) -> Tensor:
    """`(out, rank)`, what `project` multiplies by, from what it makes of unit vectors."""
    like = next(p for p in module.parameters() if p.is_floating_point() and p.itemsize > 1)
    with torch.no_grad():
        units = torch.eye(rank + 1, rank, dtype=like.dtype, device=like.device)  # the last is no vector at all
        *made, nothing = project(units[None])[0]
    if nothing.any():
        raise UnsupportedModelError("its latent attention expands keys by more than a matrix")
    return torch.stack(made, -1)


def latent_bytes(config: Any, itemsize: int) -> tuple[int, int]:
    """Bytes of one token's KV in all layers, as ragkv keeps it and as expanded keys and values would be."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return layers * kept * itemsize, layers * expanded * itemsize


class Absorbing:
    """Attends by `step` over latents, in the layers that have them: `cache` is told what these layers keep."""

    def __init__(self, step: Attending, latents: Mapping[int, Latent], cache: Any) -> None:
        self._step = step
        self._latents = latents
        self._cache = cache

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """As `Attending.attend`, of queries, keys and values of all heads."""
        latent = self._latents.get(layer)
        if latent is None:
            return self._step.attend(layer, query, key, value, **options)
        if self._cache.given is None or self._cache.given[0] != layer:
            raise UnsupportedModelError(f"layer {layer} gives its cache no latents")
        key, value = latent.keys(*self._cache.given[1:])
        return latent.values(self._step.attend(layer, latent.queries(query), key, value, **options))


def last_turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last numbers of `states` `(batch, heads, n, head_dim)` rotated, those of a pair half a key apart.

    So they lie after transformers has rotated them, whichever way they were before.
    """
    return _last(states, cos, sin, _apart)


def last_turned_in_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same of pairs that lie beside each other, as they do where transformers rotates complex numbers."""
    return _last(states, cos, sin, _beside)


def _last(states: Tensor, cos: Tensor, sin: Tensor, quarter: Callable[[Tensor], Tensor]) -> Tensor:
    rank = states.shape[-1] - cos.shape[-1]
    rope = states[..., rank:]
    return torch.cat([states[..., :rank], rope * cos[:, None] + quarter(rope) * sin[:, None]], -1)


def _apart(rope: Tensor) -> Tensor:
    first, second = rope.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _beside(rope: Tensor) -> Tensor:
    return torch.stack([-rope[..., 1::2], rope[..., ::2]], -1).flatten(-2)
