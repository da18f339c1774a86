"""Latent attention (MLA, DeepSeek-V2 §2.1): all heads' keys and values are linear in one small vector per token.

That vector, after its norm, and one key with rotary positions are what transformers caches and ragkv stores: 576
numbers per token and layer for DeepSeek-V3, instead of 40,960 expanded ones. Attention reads them as one key head that
is its own value. The matrix that would expand the keys is multiplied into the queries, and the one for the values into
the result. A chunk is placed by rotating the rope part of the queries; the rest of a score has no position.

On one layer of MiniCPM3 and of DeepSeek-V2-Lite (one processor thread, 2,048 tokens of chunks), this takes 0.02 to 0.6
of the time of expanding keys and values first for 1 to 64 queries, and as much from about 200 queries on. A sequence's
own new tokens are read as latents too: expanded, their attention would take half the time, which is less than 2 % of
the layer's in half types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.attention.partial import LayerCall
from ragkv.errors import UnsupportedModelError
from ragkv.model.attention_hook import AttentionBackend


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """One layer's mapping between heads and latents: `weight` `(q_heads, nope + value_dim, rank)` expands a latent."""

    weight: Tensor
    nope: int

    @classmethod
    def of(cls, module: Any) -> LatentProjection | None:
        """The projection of an attention module, if it is latent attention as transformers writes it.

        A quantised matrix is unpacked once, into the dtype that it computes with. UnsupportedModelError if keys are
        expanded by anything else than a matrix.
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
        """Keys `(1, 1, n, rank + rope)` and values (columns of the keys, so of width 0) from what the cache is
        given.
        """
        key = torch.cat([latent, rope], -1)
        return key, key[..., :0]

    def queries(self, query: Tensor) -> Tensor:
        """Queries for such keys, `(1, q_heads, n, rank + rope)`, from queries for expanded keys."""
        return torch.cat([query[..., : self.nope] @ self.weight[:, : self.nope], query[..., self.nope :]], -1)

    def values(self, out: Tensor) -> Tensor:
        """The heads' attention output, `(1, q_heads, n, value_dim)`, from weighted sums of latent keys."""
        latent, expand = out[..., : self.weight.shape[-1]], self.weight[:, self.nope :]
        if latent.dtype == torch.float32:
            return latent @ expand.transpose(-1, -2)
        # half types: a processor multiplies by a transposed matrix four times slower
        return (expand @ latent.transpose(-1, -2)).transpose(-1, -2)


def latents_of(model: nn.Module) -> dict[int, LatentProjection]:
    """The projections of the layers that have latent attention."""
    found = ((module, LatentProjection.of(module)) for module in model.modules())
    return {module.layer_idx: latent for module, latent in found if latent is not None}  # type: ignore[misc]


def _plain(project: Any) -> bool:
    """Whether it is an ordinary matrix and nothing else."""
    return type(project) is nn.Linear and getattr(project, "bias", None) is None and type(project.weight.data) is Tensor


def _matrix(project: nn.Module, rank: int, module: nn.Module) -> Tensor:
    """`(out, rank)`: the matrix of the linear map `project`, from its output for unit vectors."""
    like = next(p for p in module.parameters() if p.is_floating_point() and p.itemsize > 1)
    with torch.no_grad():
        units = torch.eye(rank + 1, rank, dtype=like.dtype, device=like.device)  # the last is no vector at all
        *made, nothing = project(units[None])[0]
    if nothing.any():
        raise UnsupportedModelError("its latent attention expands keys by more than a matrix")
    return torch.stack(made, -1)


def latent_bytes(config: Any, itemsize: int) -> tuple[int, int]:
    """Bytes of one token's KV in all layers, as latents and as expanded keys and values."""
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    kept = config.kv_lora_rank + config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return layers * kept * itemsize, layers * expanded * itemsize


class LatentAttention:
    """Attends by `step` over latents, in the layers that have them; `cache` receives what these layers keep."""

    def __init__(self, step: AttentionBackend, latents: Mapping[int, LatentProjection], cache: Any) -> None:
        self._step = step
        self._latents = latents
        self._cache = cache

    def attend(self, call: LayerCall) -> Tensor:
        """As `AttentionBackend.attend`, of queries, keys and values of all heads."""
        latent = self._latents.get(call.layer)
        if latent is None:
            return self._step.attend(call)
        if self._cache.given is None or self._cache.given[0] != call.layer:
            raise UnsupportedModelError(f"layer {call.layer} gives its cache no latents")
        key, value = latent.keys(*self._cache.given[1:])
        absorbed = replace(call, query=latent.queries(call.query), key=key, value=value)
        return latent.values(self._step.attend(absorbed))


def rotated_last(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last elements of `states` `(batch, heads, n, head_dim)` rotated, in the half-split layout.

    transformers' rotation leaves them in this layout, whichever one they had before.
    """
    return _last(states, cos, sin, _apart)


def rotated_last_in_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in the interleaved layout, where transformers rotates complex numbers."""
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
