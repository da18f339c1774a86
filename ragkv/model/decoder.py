"""`PlainDecoder`: the Llama architecture (2302.13971), operation by operation as transformers computes it.

Importing transformers' class takes longer than answering a question with a small model. So a checkpoint runs on these
modules once a load by transformers has passed the self-check and they gave the same bits (`ragkv.model.verdict`). Their
names, and those of the parameters, are transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.model.attention_hook import Visible, attention

_CAUSAL = Visible(window=None, rule=lambda _batch, _head, query, key: key <= query)


class PlainConfig(SimpleNamespace):
    """The entries of a transformers configuration as attributes."""

    def get_text_config(self, decoder: bool = False) -> PlainConfig:
        return self


class LlamaRMSNorm(nn.Module):
    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        states = hidden_states.to(torch.float32)
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * states.to(hidden_states.dtype)


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = scaling

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies: Any = self.inv_freq
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def _rotate_half(states: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return torch.cat((-states[..., half:], states[..., :half]), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `(batch, heads, n, head_dim)` rotated by cos and sin `(batch, n, head_dim)`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


class LlamaAttention(nn.Module):
    def __init__(self, tensors: dict[str, Tensor], name: str, layer: int, head_dim: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, self.scaling = layer, head_dim, head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(tensors, f"{name}.{part}_proj") for part in ("q", "k", "v", "o")
        )

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        out, _ = attention(self, query, key, value, _CAUSAL, scaling=self.scaling)
        result: Tensor = self.o_proj(out.reshape(*heads[:-2], -1).contiguous())
        return result


class LlamaMLP(nn.Module):
    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(tensors, f"{name}.{part}_proj") for part in ("gate", "up", "down")
        )

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return result


class LlamaDecoderLayer(nn.Module):
    def __init__(self, tensors: dict[str, Tensor], layer: int, config: Any) -> None:
        super().__init__()
        name = f"model.layers.{layer}"
        self.self_attn = LlamaAttention(tensors, f"{name}.self_attn", layer, config.head_dim)
        self.mlp = LlamaMLP(tensors, f"{name}.mlp")
        self.input_layernorm, self.post_attention_layernorm = (
            LlamaRMSNorm(tensors.pop(f"{name}.{norm}.weight"), config.rms_norm_eps)
            for norm in ("input_layernorm", "post_attention_layernorm")
        )

    def forward(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), cos, sin)
        result: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result


class LlamaModel(nn.Module):
    def __init__(self, tensors: dict[str, Tensor], config: Any, rotary: LlamaRotaryEmbedding) -> None:
        super().__init__()
        weight = tensors.pop("model.embed_tokens.weight")
        self.embed_tokens = nn.Embedding.from_pretrained(weight)  # type: ignore[no-untyped-call]
        self.layers = nn.ModuleList([LlamaDecoderLayer(tensors, at, config) for at in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(tensors.pop("model.norm.weight"), config.rms_norm_eps)
        self.rotary_emb = rotary

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        states: Tensor = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(states, positions)
        for layer in self.layers:
            states = layer(states, cos, sin)
        result: Tensor = self.norm(states)
        return result


class PlainDecoder(nn.Module):
    """Takes the place of transformers' `LlamaForCausalLM` in a `LanguageModel`.

    `tensors` are its weights under transformers' names; ValueError for one that has no place, KeyError for one that is
    missing. `inv_freq` and `scaling` are the constants of its RoPE, of a kind that does not depend on the length.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        inv_freq: Tensor,
        scaling: float,
        eos_token_id: Any,
    ) -> None:
        super().__init__()
        left = dict(tensors)
        self.config = PlainConfig(**config)
        self.generation_config = SimpleNamespace(eos_token_id=eos_token_id)
        self.model = LlamaModel(left, self.config, LlamaRotaryEmbedding(inv_freq, scaling))
        if self.config.tie_word_embeddings:
            left["lm_head.weight"] = self.model.embed_tokens.weight
        self.lm_head = _linear(left, "lm_head")
        if left:
            raise ValueError(f"there is no place for {', '.join(sorted(left))}")

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def get_decoder(self) -> LlamaModel:
        return self.model

    def forward(self, input_ids: Tensor, *, position_ids: Tensor, logits_to_keep: Tensor, **_: Any) -> SimpleNamespace:
        """As transformers' own, without a cache of its own: `.logits` `(1, kept, vocab)`."""
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids, position_ids)[:, logits_to_keep]))


def _linear(tensors: dict[str, Tensor], name: str) -> nn.Linear:
    weight, bias = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias", None)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
